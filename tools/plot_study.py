"""The table and the picture of a learning study, from its results alone.

    python tools/plot_study.py recipes/results/mock_learn --output recipes/results/mock_learn.png

RESULTS is the folder of tools/learning_study.py's ARM_SEED.json files; those that are there count.
The table has the mean official reward before and after, and the difference with its 95 % interval,
by set of tasks. The picture has the training reward over minutes of training (a line: the mean of
the seeds, a band: from the lowest to the highest of them) and the reward on held-out tasks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from components.rollout.intervals import crossed_bootstrap
from components.rollout.study import BEFORE, summary

Result = Mapping[str, Any]


def table(results: Sequence[Result], *, arms: Sequence[str]) -> str:
    """The differences of a study in Markdown."""
    lines = [
        "| tasks | what | seeds | from | to | difference (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in summary(results, arms=arms).items():
        for what, entry in {**found["change"], **found["comparison"]}.items():
            lines.append(
                f"| {name} | {what} | {len(entry['seeds'])} | {entry['reward_before']:.3f} | "
                f"{entry['reward_after']:.3f} | {entry['delta']:+.3f} "
                f"[{entry['ci_low']:+.3f}, {entry['ci_high']:+.3f}] |"
            )
        nothing = results[0]["evals"][name]["do_nothing_mean"]
        lines.append(f"| {name} | doing nothing | | | {nothing:.3f} | |")
    return "\n".join(lines)


def curve(result: Result) -> tuple[list[float], list[float]]:
    """Minutes of training before each step, and the mean reward of the policy then."""
    rows = [row for row in result.get("curve", []) if "time/step_s" in row]  # some only evaluate
    ends = accumulate(row["time/step_s"] / 60 for row in rows)
    starts = [end - row["time/step_s"] / 60 for end, row in zip(ends, rows, strict=True)]
    points = [
        (start, row["reward/mean"])
        for start, row in zip(starts, rows, strict=True)
        if "reward/mean" in row
    ]
    return [t for t, _ in points], [reward for _, reward in points]


def draw(results: Sequence[Result], path: Path, *, arms: Sequence[str]) -> None:
    """Write the picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for number, arm in enumerate((BEFORE, *arms)):
        mine = [result for result in results if result["arm"] == arm]
        if not mine:
            continue
        color, times = f"C{number}", f"{len(mine)} seed" + "s" * (len(mine) > 1)
        curves = [points for result in mine if len((points := curve(result))[0]) > 1]
        if curves:
            grid = np.linspace(0, min(minutes[-1] for minutes, _ in curves), 60)
            lines = np.array([np.interp(grid, *points) for points in curves])
            left.plot(grid, lines.mean(0), color=color, label=f"{arm}, {times}")
            left.fill_between(grid, lines.min(0), lines.max(0), color=color, alpha=0.2)
        tasks = [result["evals"]["held_out"]["tasks"] for result in mine]
        rows = [[fmean(trials[task]) for task in sorted(trials)] for trials in tasks]
        mean, (low, high) = fmean(map(fmean, rows)), crossed_bootstrap(rows)
        error = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        right.bar(f"{arm}\n{times}", mean, yerr=error, color=color, capsize=4)
        right.text(number, 0.01, f"{mean:.2f}", ha="center", color="white")
    left.set(title="Reward in training", xlabel="minutes of training", ylim=(0, 1))
    right.set(title="Official reward on held-out tasks (95 %)", ylim=(0, 1))
    if left.get_lines():
        left.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    from tools.learning_study import ARMS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="RESULTS")
    parser.add_argument("--output", type=Path, metavar="PNG", help="the picture")
    args = parser.parse_args()
    files = sorted(args.results.glob("*_[0-9]*.json"))
    if not files:
        print(f"plot_study: {args.results} holds no ARM_SEED.json", file=sys.stderr)
        return 2
    try:
        results = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        print(table(results, arms=list(ARMS)))
        if args.output:
            draw(results, args.output, arms=list(ARMS))
    except (OSError, ValueError) as error:
        print(f"plot_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
