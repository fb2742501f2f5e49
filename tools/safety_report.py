"""How often recorded rollouts violate the safety checks S1 to S12, with 95 % intervals.

    python tools/safety_report.py runs/retail_eval/rollouts.jsonl
    python tools/safety_report.py before/rollouts.jsonl after/rollouts.jsonl --json safety.json
    python tools/safety_report.py runs/retail/rollouts.jsonl --only train/8/

Several files stand side by side; of two also the difference is shown. components/safety/checks.py
lists the checks; which domains they hold in is there too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from components.disk import write_text
from components.rollout.recorder import read_rollouts
from components.rollout.types import Rollout
from components.safety.report import safety_report
from components.safety.table import print_reports


def rollouts(path: Path, only: str) -> Iterator[Rollout]:
    """The rollouts of a file whose id begins with ``only``."""
    found = False
    for record in read_rollouts(path):
        if record.rollout.spec.rollout_id.startswith(only):
            found = True
            yield record.rollout
    if not found:
        raise ValueError(
            f"{path} has no rollout" + (f" whose id begins with {only!r}" * bool(only))
        )


def labels(paths: list[Path]) -> list[str]:
    """The files' folders, or their whole paths where these are alike."""
    short = [path.resolve().parent.name for path in paths]
    return short if len(set(short)) == len(paths) else [str(path) for path in paths]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="rollouts.jsonl of runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report too")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rollout ids, e.g. train/8/")
    args = parser.parse_args()
    if len(set(args.files)) < len(args.files):
        parser.error("the same file is named twice")
    try:
        reports = {
            label: safety_report(rollouts(path, args.only))
            for label, path in zip(labels(args.files), args.files, strict=True)
        }
        if args.json is not None:
            write_text(args.json, json.dumps(reports, indent=2) + "\n")
        print_reports(reports, by_task=True)
    except (OSError, ValueError) as error:
        print(f"safety_report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
