"""Peak memory of the folded backend, in bytes: linear in T, forward and backward, mask included.

Two independent counters: the allocator's events as the profiler records them, which contain the
buffers inside kernels, and the high-water mark of a process, which nothing can hide from.
"""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from components.attention.folded import folded_attention
from components.attention.masks import TreeMask
from components.attention.plan import MaskPlan
from components.attention.reference import reference_attention
from tests.memory import peak_bytes

from .cases import inputs

LENGTHS = (2048, 4096, 8192, 16384)
SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": torch.bfloat16}


def packed_plan(num_tokens: int) -> MaskPlan:
    """A prompt of half the row, and four rollouts below it."""
    eighth = num_tokens // 8
    enter = torch.tensor([0, 0, 0, 0, 1, 2, 3, 4]).repeat_interleave(eighth)
    start = torch.tensor([0, 0, 0, 0, 4, 4, 4, 4]).repeat_interleave(eighth) * eighth
    place = torch.arange(num_tokens)
    position = torch.where(enter == 0, place, start + place % eighth)
    exit_ = torch.where(enter == 0, 5, enter + 1)
    return MaskPlan.from_tree(TreeMask(enter=enter, exit=exit_, position=position))


def step_peak(attend, num_tokens, *, plan, window, prefix):
    """Peak of one forward and backward, the inputs and the building of the mask included."""

    def step() -> None:
        q, k, v, s, grad = inputs(num_tokens, **SHAPE)
        settings = {"plan": plan(num_tokens), "window": window, "prefix": prefix}
        attend(q, k, v, sinks=s, scale=None, **settings).backward(grad)

    step()  # band masks that are kept between calls
    return peak_bytes(step)


@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (127, 16), (127, 0), (1000, 0)])
@pytest.mark.parametrize("plan", [MaskPlan.causal, packed_plan], ids=["one rollout", "packed"])
def test_memory_is_linear(window, prefix, plan):
    """Twice the tokens, twice the bytes at each doubling; no T x T of one bit per pair."""
    peaks = [
        step_peak(folded_attention, n, plan=plan, window=window, prefix=prefix) for n in LENGTHS
    ]
    for short, long in itertools.pairwise(peaks):
        assert long <= 2.1 * short
    assert peaks[-1] < LENGTHS[-1] ** 2 // 8


def test_the_measure_sees_a_quadratic_backend():
    """The dense reference fails what the folded backend passes, by its own T x T."""
    short, long = (
        step_peak(reference_attention, n, plan=MaskPlan.causal, window=None, prefix=0)
        for n in (512, 1024)
    )
    assert long > 3.5 * short
    assert long > 2 * 4 * 1024**2  # fp32 scores of two heads


def test_the_measure_sees_buffers_inside_a_kernel():
    """A softmax keeps its scores where no tensor of ours would show them."""
    x = torch.randn(1, 1, 4096, 8)
    hidden = peak_bytes(lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x))
    assert hidden > 2 * x.numel() * 4  # the output, and the kernel's blocks beside it


def test_memory_beside_the_inputs_is_small():
    """Output, LSE, three gradients and bounded blocks: at most 1.6 x what plain flash allocates."""
    num_tokens = 4096
    q, k, v, s, grad = inputs(num_tokens, heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    plan = MaskPlan.causal(num_tokens)
    settings = {"plan": plan, "window": None, "prefix": 0, "scale": None}

    def ours() -> None:
        out = folded_attention(q, k, v, sinks=s, **settings)
        torch.autograd.grad(out, (q, k, v, s), grad)

    def plain() -> None:
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    assert peak_bytes(ours) <= 1.6 * peak_bytes(plain)


SCRIPT = """
import torch
from components.attention.folded import folded_attention
from components.attention.plan import MaskPlan
from tests.unit.attention.cases import inputs

def high_water():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1])

def step(num_tokens):
    q, k, v, s, grad = inputs(num_tokens, heads=2, kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    plan = MaskPlan.causal(num_tokens)
    out = folded_attention(q, k, v, plan=plan, window={window}, prefix=0, sinks=s, scale=None)
    out.backward(grad)

step(256)
before = high_water()
step(16384)
print(high_water() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("window", [None, 127])
def test_the_process_grows_by_less_than_a_square(window):
    """16,384 tokens: two heads of bf16 scores alone would be 1 GiB; ours stays below 200 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(window=window)],
        cwd=Path(__file__).parents[3],
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) * 1024 < 200 * 2**20
