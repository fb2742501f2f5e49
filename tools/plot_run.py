"""Draw runs: one run as its run.png again, several together with their seeds as bands.

    python tools/plot_run.py runs/retail
    python tools/plot_run.py runs/grpo_0 runs/grpo_1 runs/sft_0 runs/sft_1 --output arms.png

Runs whose settings differ in nothing but the seed are one arm: a line for the mean of its seeds, a
band from the least to the most of them, at the steps that all of its seeds have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from components.training.plot import plot_run
from components.training.plot_arms import plot_arms


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output_dir of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="of several runs: the PNG")
    args = parser.parse_args()
    if (len(args.runs) > 1) != (args.output is not None):
        parser.error("--output FILE goes with several runs; one run is drawn as its run.png")
    try:
        if args.output is not None:
            print(plot_arms(args.runs, args.output))
            return 0
        path = plot_run(args.runs[0])
    except (OSError, ValueError) as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    if path is None:
        print(f"{args.runs[0]} has no finished step to draw", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
