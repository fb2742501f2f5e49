"""Look at the rollouts of a run: in the terminal, or as one HTML file that needs no server.

    python tools/view_rollouts.py runs/retail
    python tools/view_rollouts.py runs/retail --step 3:5 --reward 0:0.5 --status truncated
    python tools/view_rollouts.py runs/retail --show 17 --tokens
    python tools/view_rollouts.py runs/retail --html rollouts.html

Advantages are worked out from the rewards of each group and the run's config.yaml; the texts of
tokens come from the run's tokenizer; the safety checks S1 to S12 run over the recorded messages.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from components.console import table_console
from components.disk import write_text
from tools.viewer import entries as found
from tools.viewer.entries import Entry
from tools.viewer.page import build_page
from tools.viewer.run_files import decoder, find_tokenizer, read_config, rollouts_file
from tools.viewer.terminal import print_list, print_rollout


def number_range(text: str) -> tuple[float, float]:
    """``3``, ``3:5``, ``:5`` or ``3:`` as lowest and highest."""
    low, colon, high = text.partition(":")
    try:
        first = float(low) if low else float("-inf")
        last = (float(high) if high else float("inf")) if colon else first
    except ValueError:
        first, last = 1.0, 0.0
    if not text.strip(":") or not first <= last:
        raise argparse.ArgumentTypeError(f"{text!r}: must be 3, 3:5, 3: or :5")
    return first, last


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="output_dir of a run, or a rollouts.jsonl")
    parser.add_argument("--step", type=number_range, metavar="A:B", help="step, or from and to")
    parser.add_argument("--reward", type=number_range, metavar="A:B", help="likewise")
    parser.add_argument("--task", default="", help="part of domain/task")
    parser.add_argument("--status", default="", help="whole, or its beginning: truncated, error")
    parser.add_argument("--split", default="", help="train, eval, ...")
    parser.add_argument(
        "--violated", default="", metavar="CHECK", help="a safety check it breaks, or any"
    )
    parser.add_argument("--limit", type=int, default=0, help="show so many at most; 0: all")
    parser.add_argument("--show", metavar="ROLLOUT", help="one rollout: its number or id")
    parser.add_argument("--tokens", action="store_true", help="with --show: tokens, probabilities")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page instead")
    parser.add_argument("--tokenizer", metavar="DIR", help="the run's own is found; none: no texts")
    parser.add_argument("--no-safety", action="store_true", help="leave the safety checks out")
    parser.add_argument("--no-pager", action="store_true", help="never page on a terminal")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[list[Entry], list[str]]:
    """The rollouts of a run with all that is asked for, and what a reader must know of them."""
    path = rollouts_file(args.run)
    entries = found.read_entries(path)
    if not entries:
        raise ValueError(f"{path} has no rollout")
    notes = []
    config = read_config(path.parent)
    if config is None:
        config = {}
        if any(entry.split == "train" for entry in entries):
            notes.append("no config.yaml beside it: advantages as by the default settings")
    found.add_advantages(entries, config)
    if not args.no_safety:
        found.add_findings(entries)
    if args.tokens or args.html:
        tokenizer = find_tokenizer(path.parent, config)
        if args.tokenizer:
            tokenizer = None if args.tokenizer == "none" else Path(args.tokenizer)
        found.add_pieces(entries, None if tokenizer is None else decoder(tokenizer))
        if any(entry.pieces is None for entry in entries):
            notes.append("no tokenizer: tokens are shown by their ids")
    return entries, notes


def choose(entries: list[Entry], args: argparse.Namespace) -> list[Entry]:
    """Those that pass the filters."""
    chosen = found.select(
        entries,
        steps=args.step,
        rewards=args.reward,
        task=args.task,
        status=args.status,
        split=args.split,
        violated=args.violated,
    )
    if not chosen:
        raise ValueError(f"none of {len(entries)} rollouts passes the filters")
    return chosen[: args.limit] if args.limit else chosen


def find_one(entries: list[Entry], name: str) -> Entry:
    """The rollout of a number or id."""
    for entry in entries:
        if name in (entry.id, str(entry.number)):
            return entry
    raise ValueError(f"--show {name!r}: no such rollout (1 to {len(entries)}, or an id)")


def view(args: argparse.Namespace) -> None:
    """Write the page, or print."""
    entries, notes = load(args)
    if args.html is not None:
        title = visible_name(args.run)
        write_text(args.html, build_page(choose(entries, args), title=title, notes=notes))
        print(args.html)
        return
    console = table_console()
    with pager(console, off=args.no_pager):
        for note in notes:
            console.print(f"note: {note}", style="yellow", markup=False)
        if args.show is None:
            print_list(console, choose(entries, args))
            return
        entry = find_one(entries, args.show)
        siblings = [other for other in entries if other.group == entry.group]
        print_rollout(console, entry, tokens=args.tokens, siblings=siblings)


def visible_name(run: Path) -> str:
    """A name for the page: the run's folder."""
    path = run.resolve()
    return path.name if path.is_dir() else path.parent.name


def pager(console: Any, *, off: bool) -> Any:
    """Page on a terminal, in colour; in a pipe or file the text is as it is."""
    if off or not console.is_terminal:
        return nullcontext()
    os.environ.setdefault("LESS", "-FRX")  # colours; a short text is not paged
    return console.pager(styles=bool(re.search(r"less|^$", os.environ.get("PAGER", ""))))


def main() -> int:
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    try:
        view(parse_arguments())
    except (OSError, ValueError) as error:
        print(f"view_rollouts: {found.visible(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
