"""Runs of the recipes through the real command, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
"""Of whatever should end: far beyond what a loaded machine needs, for a hang has no end."""

TINY = {
    "device": "cpu",
    "dtype": "fp32",
    "num_steps": 4,
    "save_every": 2,
    "checker": "tests.recipes.checkers.TextHash",
    "tasks_per_step": 2,
    "rollout.group_size": 3,
    "rollout.max_turns": 6,
    "rollout.max_turn_tokens": 32,
    "rollout.max_tokens": 1024,
    "rollout.num_workers": 4,
    "tokens_per_batch": 6144,
    "optimizer.lr": 1e-4,
    "warm_start.num_steps": 1,
    "warm_start.num_demonstrations": 4,
    "warm_start.demonstrations_per_step": 2,
    "warm_start.max_tokens": 1024,
    "warm_start.optimizer.lr": 1e-5,
    "eval.before": "true",
    "eval.dataset.include": "[create_task_1]",
    "eval.every": 2,
    "eval.num_trials": 1,
}
"""Overrides of configs/mock.yaml for the tiny model: a step takes about a second, and one turn in
ten is cut. A larger learning rate breaks the model's habit of ending its turns."""


def arguments(recipe: object = "recipes/grpo_agentic.py", *, config, launcher=(), **keys):
    """What follows ``tune``; in the names of overrides ``__`` stands for a dot."""
    settings = [f"{name.replace('__', '.')}={value}" for name, value in keys.items()]
    return ["run", *launcher, str(recipe), "--config", str(config), *settings]


def training(*, recipe="recipes/grpo_agentic.py", config="configs/mock.yaml", launcher=(), **keys):
    """``arguments`` of a GRPO run: TINY with further overrides."""
    keys = {name.replace("__", "."): value for name, value in keys.items()}
    overrides = TINY | keys
    if overrides.get("eval") == "null":
        overrides = {k: v for k, v in overrides.items() if not k.startswith("eval.")}
    return arguments(recipe, config=config, launcher=launcher, **overrides)


class Tune:
    """The command with a model cache of its own."""

    def __init__(self, home: Path, model_dir: Path) -> None:
        self.home, self.model_dir = home, model_dir

    def start(
        self, *args: str, cwd: Path = ROOT, largest_file: int | None = None
    ) -> subprocess.Popen:
        """Start it, in a process group of its own as in a terminal.

        ``largest_file`` bytes are what a file may have: a write beyond fails as on a full disk.
        """
        limit = largest_file or resource.RLIM_INFINITY
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "SINKFLEX_HOME": str(self.home),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "components.cli", *args],
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )

    def run(self, *args: str, code: int = 0, **how) -> subprocess.CompletedProcess:
        """Run it to its end; the exit code must be ``code``. ``how``: see ``start``."""
        process = self.start(*args, **how)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            kill_group(process)
            raise
        assert process.returncode == code, out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def train(self, output_dir: Path, *, code: int = 0, **keys):
        """Run the GRPO recipe with the tiny model."""
        how = {name: keys.pop(name) for name in ("cwd", "largest_file") if name in keys}
        keys = {"model_dir": self.model_dir, "output_dir": output_dir, **keys}
        return self.run(*training(**keys), code=code, **how)


def kill_group(process: subprocess.Popen) -> None:
    """SIGKILL to the process and all that it started.

    A launcher gives each rank a session of its own; a rank that waits for another in a collective
    would stay behind for as long as that takes to time out.
    """
    for group in (process.pid, *ranks_of(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()


def ranks_of(launcher: int) -> list[int]:
    """Process ids of the ranks: they know their rank, and are no workers of one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if int(fields[1]) == launcher and any(v.startswith(b"LOCAL_RANK=") for v in environment):
            found.append(int(entry.name))
    return found


def wait_for(condition, process: subprocess.Popen, *, timeout_s: float = TIMEOUT_S) -> None:
    """Poll until it holds; the process must not end before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def session_members(session: int) -> list[str]:
    """Command lines of the living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) == session:
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def assert_no_orphans(process: subprocess.Popen, *, timeout_s: float = 15) -> None:
    """All that a run started is gone soon after it."""
    deadline = time.monotonic() + timeout_s
    while session_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(process.pid) == []


def rows(output_dir: Path) -> list[dict]:
    """metrics.jsonl."""
    path = output_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def steps(output_dir: Path) -> list[int]:
    """Training steps that metrics.jsonl has a row of."""
    return [row["step"] for row in rows(output_dir) if "time/step_s" in row]


def without_timings(row: dict) -> dict:
    """A row of metrics.jsonl without what the machine decides."""
    return {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "mem/"))}


def played(output_dir: Path) -> list[dict]:
    """rollouts.jsonl without the wall times."""
    records = [json.loads(line) for line in (output_dir / "rollouts.jsonl").open()]
    for record in records:
        record["stats"] = {k: v for k, v in record["stats"].items() if not k.endswith("_s")}
    return records
