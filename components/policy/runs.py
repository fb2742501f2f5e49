"""Which blocks of the pool a decode step reads, and which of them go through one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from components.policy.cache import RolloutCache

MAX_BRIDGE = 2
"""Blocks that no query needs but that go along, to keep two runs of rows in one product."""


class Run(NamedTuple):
    """One block of neighbouring rows of the pool, which go through one product."""

    block: int
    first: int
    last: int
    """Places in the batch; their rows in the pool are neighbours, too."""
    row: int
    """Row of the first in the pool."""


def needs(cache: RolloutCache, start: int, size: int, window: int | None, prefix: int) -> bool:
    """Whether a rollout's new token sees any of its own tokens from ``start`` on."""
    new = len(cache.ids) - cache.base
    last = min(new, start + size - 1)
    if last < start:
        return False
    return window is None or new - last <= window or cache.base + start < prefix


def cut_runs(block: int, rows: Sequence[int], needed: Sequence[bool]) -> list[Run]:
    """The pieces of a block that a batch needs.

    Args:
        block: index of the block.
        rows: row of each rollout in the pool, rising.
        needed: whether the rollout needs the block.

    Returns:
        Runs that cover what is needed, and at most MAX_BRIDGE blocks at a time that are not.
    """
    runs: list[Run] = []
    for place, row in enumerate(rows):
        if not needed[place]:
            continue
        if runs:
            _, first, last, first_row = runs[-1]
            close = place - last <= MAX_BRIDGE
            if close and row - first_row == place - first:
                runs[-1] = Run(block, first, place + 1, first_row)
                continue
        runs.append(Run(block, place, place + 1, row))
    return runs
