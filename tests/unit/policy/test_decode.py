from __future__ import annotations

import itertools
import random

import pytest

from components.policy import decode
from components.policy.decode import cut_spans


def cost(rows, lengths, spans):
    for a, b in spans:
        if rows[b - 1] - rows[a] != b - 1 - a:
            return float("inf")  # not neighbours
    return sum(decode.SPAN_COST + (b - a) * max(lengths[a:b]) for a, b in spans)


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_the_cheapest_cut(seed):
    rng = random.Random(seed)
    size = rng.randrange(1, 8)
    rows = sorted(rng.sample(range(10), size))
    lengths = [rng.choice([50, 900, 4000]) for _ in rows]
    spans = cut_spans(rows, lengths)
    assert [i for a, b in spans for i in range(a, b)] == list(range(size))
    every = (
        list(itertools.pairwise([0, *cuts, size]))
        for n in range(size)
        for cuts in itertools.combinations(range(1, size), n)
    )
    assert cost(rows, lengths, spans) == min(cost(rows, lengths, s) for s in every)


def test_equal_rows_stay_together():
    assert cut_spans(range(16), [1000] * 16) == [(0, 16)]
    assert cut_spans([0, 1, 3], [9, 9, 9]) == [(0, 2), (2, 3)]
