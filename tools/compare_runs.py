"""Two training runs side by side: settings that differ, metrics at their first and last step.

    python tools/compare_runs.py runs/retail runs/longer
    python tools/compare_runs.py runs/retail runs/longer --only reward/ --json difference.json

A difference of two runs with one seed each says nothing about their settings: draw several seeds
with tools/plot_run.py, and compare evaluations with tools/compare_evals.py, which has intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from components.console import table_console
from components.disk import write_text
from components.training.compare_runs import MEASURES, compare_runs


def show(found: dict[str, Any]) -> None:
    """The comparison as tables."""
    from rich.table import Table
    from rich.text import Text

    console = table_console()
    for label, run, steps in zip(
        ("first ", "second"), found["runs"], found["num_steps"], strict=True
    ):
        console.print(Text(f"{label} {run}  ({steps} steps)"))
    differing = {**found["settings"], **found["versions"]}
    if differing:
        table = Table(title="settings that differ", show_edge=False, pad_edge=False)
        for column in ("setting", "first", "second"):
            table.add_column(column, overflow="fold")
        for name, values in differing.items():
            table.add_row(*(Text(str(text)) for text in (name, *values)))
        console.print(table)
    else:
        console.print("no setting differs")
    table = Table(title="metrics: first run, second run, difference", show_edge=False)
    table.add_column("metric", overflow="fold")
    for measure in MEASURES:
        for column in (f"{measure} step" if measure != "mean" else "mean", "", "difference"):
            table.add_column(column, justify="right")
    for name, measures in found["metrics"].items():
        cells = [Text(name)]
        for measure in MEASURES:
            first, second, difference = measures[measure]
            cells += [Text(_number(first)), Text(_number(second)), Text(_number(difference, "+"))]
        table.add_row(*cells)
    console.print(table)


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="output_dir of a run")
    parser.add_argument("second", type=Path, help="output_dir of another")
    parser.add_argument("--only", default="", metavar="PREFIX", help="metrics that begin with it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison too")
    args = parser.parse_args()
    try:
        found = compare_runs(args.first, args.second)
        metrics = {k: v for k, v in found["metrics"].items() if k.startswith(args.only)}
        if not metrics:
            raise ValueError(f"--only {args.only!r}: neither run has a metric that begins with it")
        found["metrics"] = metrics
        if args.json is not None:
            write_text(args.json, json.dumps(found, indent=2, allow_nan=False) + "\n")
        show(found)
    except (OSError, ValueError) as error:
        print(f"compare_runs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
