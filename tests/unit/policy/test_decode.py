from __future__ import annotations

import random

import pytest

from components.policy.runs import MAX_BRIDGE, cut_runs


@pytest.mark.parametrize("seed", range(30))
def test_runs_cover_what_is_needed_once(seed):
    rng = random.Random(seed)
    size = rng.randrange(1, 12)
    rows = sorted(rng.sample(range(15), size))
    needed = [rng.random() < 0.6 for _ in rows]
    runs = cut_runs(3, rows, needed)
    covered = [place for _, first, last, _ in runs for place in range(first, last)]
    assert len(covered) == len(set(covered))
    assert {p for p in range(size) if needed[p]} <= set(covered)
    for block, first, last, row in runs:
        assert block == 3
        assert rows[first:last] == list(range(row, row + last - first))  # one piece of the pool
        assert needed[first]
        assert needed[last - 1]
        idle = "".join("x" if n else "." for n in needed[first:last])
        assert "." * (MAX_BRIDGE + 1) not in idle


def test_whole_batches_are_one_run():
    assert cut_runs(0, range(16), [True] * 16) == [(0, 0, 16, 0)]
    # row 2 is not in the batch: its queries do not exist, so nothing may bridge it
    assert cut_runs(0, [0, 1, 3], [True] * 3) == [(0, 0, 2, 0), (0, 2, 3, 3)]
