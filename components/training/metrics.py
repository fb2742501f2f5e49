"""Metrics of a run: a JSON line and a CSV row per step, TensorBoard by config, a console line."""

from __future__ import annotations

import csv
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Timer:
    """Wall time per phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, *, since: float) -> dict[str, float]:
        """``time/<phase>_s`` for each phase, and ``time/step_s`` since that ``perf_counter()``."""
        phases = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        return {**phases, "time/step_s": time.perf_counter() - since}


def peak_gib(device: torch.device) -> float:
    """Peak memory in GiB: CUDA's allocator peak, or the peak resident size of this process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class MetricsLog:
    """``metrics.jsonl`` (the record), ``metrics.csv`` (rebuilt from it) and TensorBoard.

    Rows are appended whole and flushed. On resume, rows of steps after the checkpoint are dropped,
    so every step stands once.
    """

    def __init__(
        self, output_dir: Path, *, resume_step: int = 0, tensorboard: bool = False
    ) -> None:
        """Open the log; keep the rows of steps up to ``resume_step``.

        Raises:
            ValueError: if TensorBoard is asked for and not installed.
        """
        self._jsonl = output_dir / "metrics.jsonl"
        self._csv = output_dir / "metrics.csv"
        self._tensorboard = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError(
                    "tensorboard: true, but the package is missing: pip install tensorboard"
                ) from error
            self._tensorboard = SummaryWriter(
                str(output_dir / "tensorboard"), purge_step=resume_step + 1
            )
        self._rows = [row for row in read_metrics(self._jsonl) if row["step"] <= resume_step]
        temporary = self._jsonl.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in self._rows))
        temporary.replace(self._jsonl)
        self._write_csv()

    def has(self, step: int, prefix: str) -> bool:
        """Whether a row of ``step`` has a metric of that group, such as ``"eval/"``."""
        rows = [row for row in self._rows if row["step"] == step]
        return any(name.startswith(prefix) for row in rows for name in row)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row for ``step`` (number of finished steps)."""
        row = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        self._rows.append(row)
        with self._jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._write_csv()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()

    def _write_csv(self) -> None:
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        temporary = self._csv.with_suffix(".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=names or ["step"])
            writer.writeheader()
            writer.writerows(self._rows)
        temporary.replace(self._csv)

    def close(self) -> None:
        """Close what is open."""
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl``; a torn last line (the run was killed) is left out."""
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise ValueError(f"{path}: line {number + 1} is not JSON") from None
    return rows


def console_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """One aligned line for the console."""
    columns = (
        ("reward", "reward/mean", "5.3f"),
        ("official", "reward/official_mean", "5.3f"),
        ("strict", "reward/strict_mean", "5.3f"),
        ("loss", "loss/total", "8.4f"),
        ("kl", "loss/kl", "7.4f"),
        ("gnorm", "train/grad_norm", "7.3f"),
        ("calls", "rollout/tool_calls", "4.1f"),
        ("errors", "rollout/error_frac", "4.2f"),
        ("tok", "rollout/tokens", "6.0f"),
        ("s", "time/step_s", "6.1f"),
    )
    parts = [f"step {step:>3}/{num_steps}"]
    for label, name, form in columns:
        # What a step did not compute is a dash, so that "nan" is always a number gone wrong.
        width = int(form.partition(".")[0])
        text = f"{metrics[name]:{form}}" if name in metrics else "-".rjust(width)
        parts.append(f"{label} {text}")
    return "  ".join(parts)
