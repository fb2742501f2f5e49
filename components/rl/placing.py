"""Which rollout goes into which row: bin packing where a shared prefix is paid for once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


class Prefixes:
    """How much any two rollouts share.

    Args:
        prefixes: the shareable leading tokens of each rollout.
    """

    def __init__(self, prefixes: Sequence[tuple[int, ...]]) -> None:
        self.order = sorted(range(len(prefixes)), key=lambda i: (prefixes[i], i))
        """Rollouts in depth-first order of the trie."""
        self.rank = [0] * len(prefixes)
        for rank, i in enumerate(self.order):
            self.rank[i] = rank
        # Any two of sorted strings share the least of what the neighbours between them share.
        self.next_shared = [
            _common(prefixes[a], prefixes[b]) for a, b in itertools.pairwise(self.order)
        ]
        self.sizes = [len(prefix) for prefix in prefixes]

    def shared(self, i: int, j: int) -> int:
        """Length of the common prefix of two different rollouts."""
        a, b = sorted((self.rank[i], self.rank[j]))
        return min(self.next_shared[a:b])

    def shared_by_rank(self, i: int) -> list[int]:
        """Length of the common prefix with every rollout, in depth-first order."""
        rank, n = self.rank[i], len(self.rank)
        row = [self.sizes[i]] * n
        for r in range(rank - 1, -1, -1):
            row[r] = min(row[r + 1], self.next_shared[r])
        for r in range(rank + 1, n):
            row[r] = min(row[r - 1], self.next_shared[r - 1])
        return row


def place(prefixes: Prefixes, lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Distribute rollouts over rows so that few tokens are computed.

    Best fit: a rollout goes where it adds the fewest tokens, i.e. to its siblings, then to its
    domain. Two orders are tried, and the one that computes fewer tokens wins: depth-first, which
    keeps families of rollouts together, and longest first within each family, which fills better.

    Args:
        prefixes: what the rollouts share.
        lengths: tokens of each rollout, none above ``capacity``.
        capacity: tokens of a row.

    Returns:
        Rows of rollout indices in depth-first order; rows in the order of their first rollout.
    """
    families = _families(prefixes)
    longest_first = sorted(
        prefixes.order, key=lambda i: (families[i], -lengths[i], prefixes.rank[i])
    )
    candidates = [
        _best_fit(order, prefixes, lengths, capacity) for order in (prefixes.order, longest_first)
    ]
    _, rows = min(candidates, key=lambda c: c[0])  # the first wins a tie
    rows = [sorted(row, key=lambda i: prefixes.rank[i]) for row in rows]
    return sorted(rows, key=lambda row: prefixes.rank[row[0]])


def _best_fit(
    order: Sequence[int], prefixes: Prefixes, lengths: Sequence[int], capacity: int
) -> tuple[tuple[int, int], list[list[int]]]:
    """Place in the given order; returns (tokens computed, number of rows) and the rows."""
    rows: list[list[int]] = []
    used: list[int] = []
    for i in order:
        shared = prefixes.shared_by_rank(i)
        best: tuple[int, int, int] | None = None  # added tokens, free tokens left, row
        for r, row in enumerate(rows):
            added = lengths[i] - max(shared[prefixes.rank[j]] for j in row)
            left = capacity - used[r] - added
            if left >= 0 and (best is None or (added, left, r) < best):
                best = (added, left, r)
        if best is None:
            rows.append([i])
            used.append(lengths[i])
        else:
            rows[best[2]].append(i)
            used[best[2]] += best[0]
    return (sum(used), len(rows)), rows


def _families(prefixes: Prefixes) -> list[int]:
    """A number per rollout: neighbours that share at least half of their prefix are one family.

    Chat templates make all domains share a few tokens, so the root of the trie is no domain.
    """
    family = [0] * len(prefixes.order)
    current = 0
    for k, i in enumerate(prefixes.order):
        if k and 2 * prefixes.next_shared[k - 1] < prefixes.sizes[i]:
            current += 1
        family[i] = current
    return family


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix, by bisection over slices (compared in C)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
