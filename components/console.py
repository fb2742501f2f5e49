"""The console that tables are printed on."""

from __future__ import annotations

from typing import Any

WIDTH = 200
"""Columns where the output does not go to a terminal: no row is broken in a log file."""


def table_console() -> Any:
    """A ``rich.console.Console`` as wide as the terminal, or :data:`WIDTH` columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
