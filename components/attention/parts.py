"""How the folded backend cuts a mask into calls of a flash kernel.

A packed row is a list of *chains*: runs of rows whose positions are consecutive and where each row
is the parent of the next (a node and its first child, that one's first child, ...). A chain hangs
below some row of its parent chain and sees that chain up to this row. Cutting along chains gives
parts that a plain flash kernel does without a mask: a chain on itself is causal, its ancestors are
seen whole. Only where a window ends inside a part does the kernel need a band, and keys that no
query of a block sees are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FULL, CAUSAL, BAND = 0, 1, 2


def block_size(window: int) -> int:
    """Queries per part where a window slides.

    Measured in bf16, forward and backward: below 192 queries the CPU kernel's backward cuts its
    products into pieces of 32, which costs more than the keys that a shorter block would save.
    """
    return 192 if window < 256 else 256


class Chain(NamedTuple):
    """Consecutive rows that form one path."""

    start: int
    """First row."""
    end: int
    """One past the last row."""
    position: int
    """Position of the first row."""
    parent: int
    """Index of the chain that this one hangs below, -1 for a root."""
    attach: int
    """One past the last row of the parent chain that is visible here."""


class Part(NamedTuple):
    """One kernel call: queries ``[q0, q1)`` against keys ``[k0, k1)`` of the packed row.

    Every query of a part sees at least one of its keys.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: int
    """FULL: every key; CAUSAL: key j of query i iff j <= i; BAND: iff 0 <= offset + i - j <= w."""
    offset: int
    """Distance in positions from the first key to the first query."""
    own: bool
    """The part that holds the query's own key: exactly one for each query."""


def split(chains: Sequence[Chain], *, window: int | None, prefix: int) -> list[Part]:
    """Parts that cover every visible (query, key) pair of a packed row exactly once.

    Args:
        chains: the row, in row order.
        window: largest distance in positions that is still seen; None for no window.
        prefix: positions at the start of each rollout that no window hides.

    Returns:
        Parts whose ``own`` ones come first.
    """
    if window is None:
        parts = _split_plain(chains)
    else:
        parts = [
            part
            for index in range(len(chains))
            for part in _split_window(chains, index, window=window, prefix=prefix)
        ]
    return sorted(parts, key=lambda part: not part.own)


def _split_plain(chains: Sequence[Chain]) -> list[Part]:
    """Own chains are causal; chains that hang at one row share one part for what is above it."""
    parts = [Part(c.start, c.end, c.start, c.end, CAUSAL, 0, True) for c in chains]
    end = [c.end for c in chains]
    for index in range(len(chains) - 1, -1, -1):
        if chains[index].parent >= 0:
            end[chains[index].parent] = max(end[chains[index].parent], end[index])
    # Depth-first order keeps siblings, with all that hangs below them, next to each other.
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    for index, c in enumerate(chains):
        if c.parent >= 0:
            first, last = rows.get((c.parent, c.attach), (c.start, c.start))
            rows[c.parent, c.attach] = (first, max(last, end[index]))
    for (parent, attach), (first, last) in rows.items():
        parts.append(Part(first, last, chains[parent].start, attach, FULL, 0, False))
    return parts


def _ancestors(chains: Sequence[Chain], index: int) -> list[Chain]:
    """The visible pieces of the chains above, nearest first."""
    pieces = []
    while chains[index].parent >= 0:
        attach, index = chains[index].attach, chains[index].parent
        pieces.append(chains[index]._replace(end=attach))
    return pieces


def _split_window(chains: Sequence[Chain], index: int, *, window: int, prefix: int) -> list[Part]:
    """Parts of one chain under a window."""
    own = chains[index]
    above = _ancestors(chains, index)
    root = above[-1].position if above else own.position
    # Up to here a query sees everything before it, in positions: plain causal.
    head = min(max(prefix, root + window + 1), own.position + own.end - own.start)
    split_row = own.start + max(head - own.position, 0)
    parts = []
    if split_row > own.start:
        parts.append(Part(own.start, split_row, own.start, split_row, CAUSAL, 0, True))
        parts += [Part(own.start, split_row, c.start, c.end, FULL, 0, False) for c in above]
    if split_row == own.end:
        return parts
    for c in [own, *above]:
        seen = min(prefix - c.position, c.end - c.start)
        if seen > 0:
            parts.append(Part(split_row, own.end, c.start, c.start + seen, FULL, 0, False))
    size = block_size(window)
    for q0 in range(split_row, own.end, size):
        q1 = min(q0 + size, own.end)
        parts += _own_block(own, q0, q1, window=window, prefix=prefix)
        for c in above:
            first = c.start + max(prefix - c.position, 0)
            gap = own.position - c.position - (own.start - c.start)
            parts += _slide(q0, q1, first, c.end, gap=gap, window=window)
    return parts


def _own_block(own: Chain, q0: int, q1: int, *, window: int, prefix: int) -> list[Part]:
    """Parts of a block of queries within its own chain, where rows differ as positions do."""
    first = max(own.start, own.start + prefix - own.position, q0 - window)
    if window < 2 * block_size(window):
        if first == q0 and q1 - 1 - q0 <= window:
            return [Part(q0, q1, q0, q1, CAUSAL, 0, True)]
        return [Part(q0, q1, first, q1, BAND, q0 - first, True)]
    causal = Part(q0, q1, q0, q1, CAUSAL, 0, True)
    return [causal, *_slide(q0, q1, first, q0, gap=0, window=window)]


def _slide(q0: int, q1: int, k0: int, k1: int, *, gap: int, window: int) -> list[Part]:
    """Parts of a block of queries against earlier keys; position distance is ``q - k + gap``."""
    k0 = max(k0, q0 + gap - window)
    q1 = min(q1, k1 - gap + window)
    if k0 >= k1 or q0 >= q1:
        return []
    if q1 - 1 - k0 + gap <= window:
        return [Part(q0, q1, k0, k1, FULL, 0, False)]
    if window < 2 * block_size(window):
        return [Part(q0, q1, k0, k1, BAND, q0 - k0 + gap, False)]
    # A wide window: the kernel does the bulk unmasked, and a band only where the window ends.
    edge = q1 - 1 + gap - window
    band = Part(q0, min(q1, edge - gap + window), k0, edge, BAND, q0 - k0 + gap, False)
    return [band, Part(q0, q1, edge, k1, FULL, 0, False)]
