"""What the CPU of this machine can do, against what Linux says of it."""

from pathlib import Path

import pytest

from components.cpu import multiplies_bf16

CPUINFO = Path("/proc/cpuinfo")


def flags():
    """Features of the CPU by Linux's names; empty where it names none of x86-64."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    return set(lines[0].split(":")[1].split()) if lines else set()


@pytest.mark.skipif("avx2" not in flags(), reason="asks about x86-64 with AVX2 on Linux")
def test_products_in_bf16_come_with_avx512():
    if flags() & {"avx512_bf16", "amx_bf16"}:
        assert multiplies_bf16()
    elif not flags() & {"avx512f", "avx_ne_convert"}:
        assert not multiplies_bf16()
