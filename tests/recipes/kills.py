"""SIGKILL at random moments of a run through the real command, again and again until it is done."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from tests.recipes.runs import (
    TIMEOUT_S,
    Tune,
    assert_no_orphans,
    kill_group,
    ranks_of,
    rows,
    steps,
    training,
)

MOMENTS = ("saving", "pruning", "training")


def run_with_kills(tune: Tune, output_dir: Path, *, num_kills: int, seed: int, **keys) -> list[str]:
    """Start a run, kill it, resume it; after the last kill it runs to its end.

    Args:
        tune: the command.
        output_dir: of the run.
        num_kills: how often.
        seed: of the moments.
        keys: overrides; ``launcher`` for several ranks.

    Returns:
        What was going on at each kill, and where the run went on after it.
    """
    rng = random.Random(seed)
    keys = {"model_dir": tune.model_dir, "output_dir": output_dir, **keys}
    told = []
    for number in range(num_kills):
        resume = {"resume": "true"} if output_dir.exists() else {}
        process = tune.start(*training(**keys, **resume))
        try:
            moment = MOMENTS[(number + seed) % len(MOMENTS)]  # each is among any three
            fraction = rng.random()
            delay_s = 0.0
            if _wait_until(moment, output_dir, process):
                delay_s = fraction * _longest_s(moment, output_dir)
            time.sleep(delay_s)
            if process.poll() is not None:
                out, err = process.communicate()
                assert process.returncode == 0, out + err
                return [*told, "done before the next kill"]
            # A launcher gives each rank a session of its own.
            ranks = ranks_of(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            out, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode != 0, out + err
            for leader in (process.pid, *ranks):
                assert_no_orphans(SimpleNamespace(pid=leader), timeout_s=60)
        finally:
            kill_group(process)
        there = sorted(p.name for p in output_dir.glob("step_*"))
        told.append(f"{moment} + {delay_s * 1000:.0f} ms: {' '.join(there)}")
    done = tune.train(resume="true", **keys)
    lines = done.stdout.splitlines()
    return [
        *told,
        *(line for line in lines if line.startswith(("resuming", "no whole checkpoint"))),
    ]


def _wait_until(moment: str, output_dir: Path, process) -> bool:
    """Wait for a checkpoint being written, one that was just renamed, or a step just logged.

    Returns:
        Whether that was seen; False: the run has ended.
    """
    before = _state(moment, output_dir)
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None:
        now = _state(moment, output_dir)
        if now - before:
            return True
        before = now
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.0005)
    return False


def _longest_s(moment: str, output_dir: Path) -> float:
    """From the moment on, about what a save takes, or a step."""
    if moment == "training":
        return rows(output_dir)[-1]["time/step_s"]
    return {"saving": 0.03, "pruning": 0.02}[moment]


def _state(moment: str, output_dir: Path) -> set[str]:
    if moment == "saving":
        return {p.name for p in output_dir.glob("step_*.tmp*")}
    if moment == "pruning":
        return {p.name for p in output_dir.glob("step_*") if p.suffix == ""}
    return {str(step) for step in steps(output_dir)}
