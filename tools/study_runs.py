"""Commands of a study, run as a user runs them: one at a time, with a limit, never left behind."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

POLL_S = 0.5
_PR_SET_PDEATHSIG = 1


def shown(command: Sequence[str]) -> str:
    """A command as one types it: ``tune run ...`` or ``python tools/...``."""
    words = [str(word) for word in command]
    if words[:3] == [sys.executable, "-m", "components.cli"]:
        words = ["tune", *words[3:]]
    elif words[:1] == [sys.executable]:
        words = ["python", *words[1:]]
    return shlex.join(words)


def tune(recipe: str, config: str, **settings: object) -> list[str]:
    """A ``tune run`` command; in names of settings ``__`` stands for a dot."""
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "components.cli", "run"]
    return [*command, f"recipes/{recipe}.py", "--config", config, *overrides]


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[IO[str]]:
    """Hold a lock file, against other studies and what a killed one has left running.

    The lock is inherited by the commands, so it lasts as long as one of them does.

    Args:
        path: of the file.
        wait: for whoever holds it.

    Raises:
        BlockingIOError: another process holds it, and ``wait`` is False.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            print(f"waiting: another study, or a command of one, holds {path}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def step_seconds(run: Path) -> list[float]:
    """Wall time of each finished training step of a run, none if there is no run."""
    from components.training.metrics import read_metrics

    rows = read_metrics(run / "metrics.jsonl")
    return [row["time/step_s"] for row in rows if "time/step_s" in row]


def is_over(seconds: Sequence[float], limit_s: float) -> bool:
    """Whether the time is up: no further step of mean length would end before the limit."""
    total = sum(seconds)
    return bool(seconds) and total + total / len(seconds) > limit_s


def execute(
    command: Sequence[str],
    *,
    log: Path,
    lock: IO[str],
    run: Path | None = None,
    limit_s: float | None = None,
) -> None:
    """Run a command to its end, or stop a training run when its time is over.

    The time of a training run is that of its finished steps: neither imports and loading nor what
    a kill has made it repeat. It is stopped as by Ctrl-C: the step under way is given up, unless
    its update is all but done, and a checkpoint written.

    Args:
        command: with its arguments.
        log: gets what it prints, after what is there.
        lock: of :func:`locked`.
        run: output_dir of the run to watch.
        limit_s: seconds of training.

    Raises:
        ValueError: if it fails, with the end of what it printed.
        KeyboardInterrupt: after the command has come to a clean stop.
    """
    stopping = False
    before = _written(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {shown(command)}\n")
        output.flush()
        # In a session of its own, or Ctrl-C at the terminal would reach it twice: a second one
        # does not wait for the checkpoint.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
            preexec_fn=_stop_with_us if sys.platform == "linux" else None,
        )
        try:
            while process.poll() is None:
                # A resumed run begins with dropping the steps that no checkpoint has.
                if limit_s is not None and run and not stopping and _written(run) != before:
                    stopping = is_over(step_seconds(run), limit_s)
                    if stopping:
                        process.send_signal(signal.SIGINT)
                time.sleep(POLL_S)
        except BaseException:
            if not stopping:  # a second one would not wait for the checkpoint
                process.send_signal(signal.SIGINT)
            process.wait()
            raise
    # A run that has just ended by itself has no handler any more.
    if process.returncode != 0 and not (stopping and process.returncode == -signal.SIGINT):
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise ValueError(
            f"{shown(command)}\nended with code {process.returncode}; the end of {log}:\n"
            + "\n".join(end)
        )


def _written(run: Path | None) -> int:
    """When the metrics of a run were last written; 0 if never."""
    path = None if run is None else run / "metrics.jsonl"
    return path.stat().st_mtime_ns if path is not None and path.exists() else 0


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _stop_with_us() -> None:
    """Between fork and exec: SIGINT stops the command, and so does the kernel if the study dies."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    assert _libc is not None
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def machine() -> dict[str, object]:
    """What a measured time depends on."""
    return {
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "niceness": os.nice(0),
        "platform": sys.platform,
        "cpu": _cpu_model(),
    }


def _cpu_model() -> str:
    """As Linux names it; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "")
