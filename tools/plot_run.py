"""Draw the picture of a run again: ``python tools/plot_run.py runs/retail`` writes its run.png."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from components.training.plot import plot_run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="output_dir of a run")
    run = parser.parse_args().run
    path = plot_run(run)
    if path is None:
        print(f"{run} has no finished step to draw", file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
