"""Which checkpoints keep what: the newest, and the best by a metric of the run."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from components.disk import remove_tree
from components.training.metrics import read_metrics

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The checkpoints of the steps with the best values of a metric."""

    metric: str
    """As in ``metrics.jsonl``."""
    mode: str
    """``max`` or ``min``."""
    num: int
    """How many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept of older checkpoints."""

    keep_last: int
    """So many of the newest stay whole; 0: all of them."""
    keep_best: Best | None
    """These stay whole, too."""
    exports: str
    """Of the others: ``all``, their models stay; ``kept``, nothing does."""


def numbered(output_dir: Path) -> list[tuple[int, Path]]:
    """``step_N`` directories, the newest first."""
    found = []
    for path in output_dir.glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def is_whole(path: Path) -> bool:
    """Whether every file that the checkpoint's manifest lists is there at full size."""
    manifest = path / MANIFEST
    try:
        sizes = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return all((path / n).is_file() and (path / n).stat().st_size == s for n, s in sizes.items())


def prune(output_dir: Path, retention: Retention) -> None:
    """Drop what is not kept. A step's metrics count from when they are in ``metrics.jsonl``.

    Only whole checkpoints are looked at: a torn one must not push out a whole one, and what an
    earlier call left of one (its model) is not deleted by a later, stricter one.
    """
    if retention.keep_last <= 0:
        return
    for _, path in numbered(output_dir):
        if not (path / MANIFEST).exists():  # killed between the two lines at the end
            remove_tree(path / "resume")
    # The newest first.
    whole = [(step, path) for step, path in numbered(output_dir) if is_whole(path)]
    kept = {step for step, _ in whole[: retention.keep_last]}
    if retention.keep_best is not None:
        values = _values(output_dir, retention.keep_best.metric)
        kept |= best_steps({step: values.get(step) for step, _ in whole}, retention.keep_best)
    for step, path in whole:
        if step in kept:
            continue
        if retention.exports == "kept":
            # A directory that is half deleted would look like a model.
            dropped = path.with_name(path.name + ".dropped")
            path.rename(dropped)
            remove_tree(dropped)
        else:
            # The manifest goes first: without it the directory is no longer one to resume from.
            (path / MANIFEST).unlink()
            remove_tree(path / "resume")


def best_steps(values: Mapping[int, float | None], best: Best) -> set[int]:
    """The steps with the best values; of equal ones the later, of those without a value none.

    Args:
        values: metric by step; None or NaN where it was not measured.
        best: which metric counts, and how.
    """
    sign = {"max": 1.0, "min": -1.0}[best.mode]
    ranked = sorted(
        (sign * value, step)
        for step, value in values.items()
        if value is not None and not math.isnan(value)
    )
    return {step for _, step in ranked[-best.num :]}


def _values(output_dir: Path, metric: str) -> dict[int, float]:
    rows = read_metrics(output_dir / "metrics.jsonl")
    found = {int(row["step"]): row[metric] for row in rows if metric in row}
    if rows and not found:
        logger.warning("checkpoints.keep_best: no step has the metric %s so far", metric)
    return found


def remove_leftovers(output_dir: Path) -> None:
    """Delete halves of checkpoints, what was written beside them, and half-deleted ones."""
    for pattern in ("step_*.tmp*", "step_*.dropped"):
        for path in output_dir.glob(pattern):
            remove_tree(path)
