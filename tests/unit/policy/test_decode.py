from __future__ import annotations

import random

import pytest

from components.policy import cache
from components.policy.cache import RolloutCache, RowPool, SharedPrefix
from components.policy.decode import DecodePass, needed_blocks
from components.policy.local import LocalEngine
from components.policy.spans import span_of
from tests.unit.policy.tiny import VOCAB, plain_logprobs, request, tiny_model


@pytest.mark.parametrize("seed", range(30))
def test_a_block_is_needed_where_it_holds_a_key_that_the_mask_shows(seed):
    rng = random.Random(seed)
    window, prefix, size = rng.choice([None, 0, 3, 9]), rng.randrange(12), rng.randrange(1, 6)
    spans = [span_of(window, prefix)]
    shared = SharedPrefix(tuple(range(rng.randrange(6))), spans=spans)
    rollout = RolloutCache(
        pool=RowPool(spans=spans, num_kv_heads=1),
        row=0,
        shared=shared,
        shared_len=len(shared),
        ids=list(range(len(shared) + rng.randrange(40))),
    )
    query = len(rollout.ids)  # the position of the new token
    head = max(0, prefix - rollout.base)
    row: dict[int, int] = {}  # positions by slot, written in order
    for at in range(query - rollout.base + 1):
        wraps = window is not None and at >= head
        row[head + (at - head) % (window + 1) if wraps else at] = rollout.base + at
    seen = {
        slot // size
        for slot, key in row.items()
        if window is None or query - key <= window or key < prefix
    }
    assert set(needed_blocks(rollout, size, span=spans[0])) == seen


@pytest.mark.parametrize("kind", ["plain", "all", "narrow"])
def test_one_long_rollout_among_short_ones_and_gaps_in_the_pool(kind, monkeypatch):
    """Blocks are gathered one by one where most of the pool is of no use, and only there."""
    monkeypatch.setattr(cache, "BLOCK", 4)
    gathered: list[tuple[int, bool]] = []
    plan = DecodePass._plan

    def watched(self, *args):
        found = plan(self, *args)
        gathered.append((len(self._caches), found.pieces is not None))
        return found

    monkeypatch.setattr(DecodePass, "_plan", watched)
    model = tiny_model(kind)
    engine = LocalEngine(model, max_tokens=200, max_batch_size=8)
    draw = random.Random(0)
    contexts = {
        str(index): [7, 8, 9, *draw.choices(range(VOCAB), k=60 if index == 1 else 1 + index)]
        for index in range(8)
    }
    settings = {"shared_len": 3, "max_new_tokens": 7}
    for names in ("0234567", "01234567", "14", "025"):
        asked = [request(name, contexts[name], **settings) for name in names]
        for one, result in zip(asked, engine.generate(asked), strict=True):
            expected = plain_logprobs(model, list(one.context), result.ids, temperature=1.0)
            assert result.logprobs == pytest.approx(expected, abs=1e-5), (names, one.rollout_id)
            contexts[one.rollout_id] += [*result.ids, 5]
    assert {pieces for _, pieces in gathered} == {True, False}
    if kind == "narrow":  # a row is one block, however long its rollout: only gaps are passed over
        assert all(pieces == (2 * live < 8) for live, pieces in gathered)
