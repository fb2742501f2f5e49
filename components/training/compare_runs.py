"""Two runs side by side: the settings that differ, and what became of each metric."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.training.metrics import read_metrics
from components.training.run_dir import flat

MEASURES = ("first", "last", "mean")


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """What differs between two runs.

    Args:
        first: output_dir of a run.
        second: output_dir of another.

    Returns:
        A JSON-able mapping. ``runs``: the two directories. ``num_steps``: the last step of each.
        ``settings`` and ``versions``: name to the two values where they differ, ``"not set"`` for
        one that is absent. ``metrics``: name to ``first``, ``last`` and ``mean`` over the steps
        that have it, each the two values and their difference (second - first), null where a run
        has none or it is not finite.

    Raises:
        ValueError: a run has no metrics.
    """
    rows = []
    for run in (first, second):
        rows.append(read_metrics(run / "metrics.jsonl"))
        if not rows[-1]:
            raise ValueError(f"{run} has no metrics.jsonl with a finished step")
    names = dict.fromkeys(name for row in (*rows[0], *rows[1]) for name in row if name != "step")
    summaries = [{name: _summary(of, name) for name in names} for of in rows]
    return {
        "runs": [str(first), str(second)],
        "num_steps": [max(int(row["step"]) for row in of) for of in rows],
        "settings": _differing(*(_read(run / "config.yaml") for run in (first, second))),
        "versions": _differing(*(_read(run / "versions.json") for run in (first, second))),
        "metrics": {
            name: {
                measure: _pair(*(summary[name][measure] for summary in summaries))
                for measure in MEASURES
            }
            for name in names
        },
    }


def _summary(rows: Sequence[Mapping[str, float]], name: str) -> dict[str, float | None]:
    values = [row[name] for row in rows if name in row]
    if not values:
        return dict.fromkeys(MEASURES)
    found = (values[0], values[-1], sum(values) / len(values))
    return {
        measure: value if math.isfinite(value) else None
        for measure, value in zip(MEASURES, found, strict=True)
    }


def _pair(first: float | None, second: float | None) -> list[float | None]:
    if first is None or second is None:
        return [first, second, None]
    return [first, second, second - first]


def _read(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    return flat(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text) or {})


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    missing = "not set"
    return {
        key: [first.get(key, missing), second.get(key, missing)]
        for key in dict.fromkeys([*first, *second])
        if first.get(key, missing) != second.get(key, missing)
    }
