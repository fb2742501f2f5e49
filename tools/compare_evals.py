"""Two evaluations of the same tasks side by side, with the interval and test of the difference.

    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml output_dir=runs/seen
    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml output_dir=runs/held_out \\
        env.paraphrases=held_out
    python tools/compare_evals.py runs/seen/eval.json runs/held_out/eval.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from components.console import table_console
from components.disk import write_text
from components.rollout.compare import compare


def show(found: dict[str, Any]) -> None:
    """The comparison as tables."""
    from rich.markup import escape
    from rich.table import Table

    console = table_console()
    for key, (a, b) in found["settings"].items():
        console.print(f"{key}: {a} -> {b}", markup=False, highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    for column in ("metric", "first", "second", "difference"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, (a, b, difference) in found["metrics"].items():
        table.add_row(name, f"{a:.3f}", f"{b:.3f}", f"{difference:+.3f}")
    console.print(table)
    for task, (a, b) in found["tasks"].items():
        console.print(f"task {escape(task)}: official {a:.2f} -> {b:.2f}", highlight=False)
    for kind in ("official", "strict"):
        entry = found[kind]
        interval = (
            "" if entry["low"] is None else f"  95 % [{entry['low']:+.3f}, {entry['high']:+.3f}]"
        )
        print(
            f"{kind}: {entry['difference']:+.3f}{interval}, p {entry['p']:.3f}, paired over "
            f"{found['num_tasks']} tasks"
            + (", none of which differed: that is all this says" * (not entry["num_differ"]))
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path, help="eval.json of a run of eval_agentic")
    parser.add_argument("second", type=Path, help="eval.json of another, on the same tasks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison too")
    args = parser.parse_args()
    try:
        first, second = (
            json.loads(path.read_text(encoding="utf-8")) for path in (args.first, args.second)
        )
        found = compare(first, second)
        show(found)
        if args.json is not None:
            write_text(args.json, json.dumps(found, indent=2) + "\n")
    except (OSError, ValueError) as error:
        print(f"compare_evals: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
