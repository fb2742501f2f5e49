"""Layers with a window keep their window and prefix alone, and no logit changes for it."""

from __future__ import annotations

import random

import pytest
import torch

from components.models.decoder import PolicyModel
from components.models.gpt_oss import gpt_oss
from components.policy import cache, local
from components.policy.cache import RowPool, SharedPrefix
from components.policy.local import LocalEngine
from components.policy.prefill import PrefillPass
from components.policy.replay import replay
from components.policy.spans import KvSizes, Span, hidden_slots, keep, runs, slots, spans_of
from tests.unit.models.gpt_oss import tiny as tiny_moe
from tests.unit.policy.test_shared_prefix import dense_logprobs, some_ids
from tests.unit.policy.tiny import plain_logprobs, request, tiny_model, watch_decode

BLOCK = 4
TOKEN_BYTES = 2 * 2 * 16 * 4  # keys and values of one layer: 2 heads of 16 numbers, fp32
# (window, prefix) of the three layers. A ring holds window + 1 tokens, a block four.
LAYOUTS = {
    "smaller than a block, a block, a block and one": [(2, 0), (3, 0), (4, 0)],
    "two blocks, three less one, the token alone": [(7, 0), (10, 0), (0, 0)],
    "wider than the shared part": [(25, 0), (31, 3), (None, 0)],
    "prefix in the shared part": [(2, 1), (6, 2), (9, 11)],
    "prefix beyond the shared part": [(3, 14), (0, 21), (6, 17)],
    "prefix beyond most rollouts": [(5, 70), (None, 0), (1, 33)],
}


def build(layers: list[tuple[int | None, int]], *, sinks: bool = True) -> PolicyModel:
    model = tiny_model("sinks" if sinks else "plain")
    for layer, (window, prefix) in zip(model.layers, layers, strict=True):
        layer.attn.window, layer.attn.prefix = window, prefix
    return model


def error(model: PolicyModel, context: list[int], result) -> float:
    """Of a turn's log-probabilities, against the dense decoder in fp64."""
    ids = list(result.ids)
    expected = dense_logprobs(model, context + ids)[len(context) - 1 : -1]
    expected = expected[torch.arange(len(ids)), ids]
    return float((torch.tensor(result.logprobs, dtype=torch.float64) - expected).abs().max())


def play(
    engine: LocalEngine, model: PolicyModel, *, shared_len: int, seed: int, turns: int = 3
) -> float:
    """Turns of rollouts of very different lengths; the largest error of all.

    Two prompts, one of them half as long as the other, and a rollout that shares none. In some
    turns the context is what is kept, so that the newest token is fed again.
    """
    rng = random.Random(seed)
    prompts = [some_ids(1, shared_len), some_ids(2, shared_len // 2), []]
    starts = [(0, 1), (0, 33), (0, 6), (1, 2), (1, 17), (2, 1), (2, 26)]
    shared = {str(i): len(prompts[which]) for i, (which, _) in enumerate(starts)}
    contexts = {
        str(i): prompts[which] + some_ids(10 + i, length)
        for i, (which, length) in enumerate(starts)
    }
    worst = 0.0
    for turn in range(turns):
        names = [name for name in contexts if turn == 0 or rng.random() < 0.8]
        asked = [
            request(
                name,
                contexts[name],
                shared_len=shared[name],
                max_new_tokens=rng.choice([1, 5, 14]),
                seed=turn,
            )
            for name in names
        ]
        for one, result in zip(asked, engine.generate(asked), strict=True):
            worst = max(worst, error(model, list(one.context), result))
            context = [*one.context, *result.ids]
            again = rng.random() < 0.3
            new = [] if again else some_ids(100 + turn, rng.choice([1, 3, 21]))
            contexts[one.rollout_id] = context[:-1] if again else context + new
    return worst


@pytest.mark.parametrize("shared_len", [0, 4, 19])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_the_dense_decoder(layout, chunk, shared_len, monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    plan = PrefillPass._plan_writes

    def watched(self, *args):
        found = plan(self, *args)
        assert len(found.places.unique()) == len(found.places)  # which one stays is undefined
        return found

    monkeypatch.setattr(PrefillPass, "_plan_writes", watched)
    model = build(LAYOUTS[layout])
    engine = LocalEngine(
        model, max_tokens=160, max_batch_size=8, prefill_chunk=chunk, deterministic=chunk == 3
    )
    assert play(engine, model, shared_len=shared_len, seed=chunk) < 2e-5


@pytest.mark.parametrize("window", [0, 3, 4, 9])
@pytest.mark.parametrize("num_kept", range(8, 14))
def test_the_newest_token_is_fed_again(window, num_kept, monkeypatch):
    """The last kept token is dropped and computed anew: its window begins one token earlier."""
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    model = build([(window, 0), (window, 2), (window, 7)])
    engine = LocalEngine(model, max_tokens=64, max_batch_size=1)
    context = some_ids(3, num_kept - 5)
    [first] = engine.generate([request("a", context, max_new_tokens=6, shared_len=2)])
    context += first.ids[:-1]
    assert len(engine._store.caches["a"].ids) == len(context) == num_kept
    [second] = engine.generate([request("a", context, max_new_tokens=6, shared_len=2, seed=5)])
    assert error(model, context, second) < 2e-5


@pytest.mark.parametrize("seed", range(40))
def test_slots_against_a_row_written_token_by_token(seed):
    rng = random.Random(seed)
    span = Span(rng.choice([0, 1, 3, 6, 11]), rng.choice([0, 0, 5, 13]))
    base, num = rng.randrange(8), 1 + rng.randrange(40)
    at, new = torch.arange(num), torch.tensor([[num - 1]])
    places = slots(span, at, torch.full_like(at, base)).tolist()
    row = dict(zip(places, range(num), strict=True))  # later tokens take the places of earlier ones
    visible = [t for t in range(num) if num - 1 - t <= span.window or base + t < span.prefix]
    found = hidden_slots(span, torch.arange(60), new, torch.tensor([[base]]))[0]
    assert sorted(row[slot] for slot in range(60) if not found[slot]) == visible
    kept = keep(span, base=base, stop=num, num_last=span.ring)
    order = [slot for first, last in runs(span, kept, base=base) for slot in range(first, last)]
    assert [row[slot] for slot in order] == visible
    for index, token in enumerate(visible):
        assert kept.find(token, token + 1) == (index, index + 1)
    assert max(places) < span.head(base) + span.window + 1


@pytest.mark.parametrize("seed", range(20))
def test_a_shared_prefix_rolls_on_chunk_by_chunk(seed):
    rng = random.Random(seed)
    span = Span(rng.choice([0, 2, 5, 30]), rng.choice([0, 3, 9, 50]))
    length = 1 + rng.randrange(24)
    prefix = SharedPrefix(tuple(range(length)), spans=[span, None])
    at = 0
    while at < length:
        stop = min(length, at + 1 + rng.randrange(9))
        new = torch.arange(float(at), stop)[None, :, None]
        for layer in range(2):
            prefix.write(layer, at, new, -new)
        at = stop
        seen = [t for t in range(at) if t < span.prefix or t >= at - span.window]
        keys, values = prefix.read(0, at)
        assert keys.flatten().tolist() == (-values).flatten().tolist() == seen
    assert prefix.num_bytes() == 2 * 4 * (len(seen) + length)
    assert prefix.num_bytes() == KvSizes(spans=prefix.spans, token_bytes=8, block=1).shared(length)


def rows_of(engine: LocalEngine, layer: int) -> tuple[int, ...]:
    pair = engine._store.pool._layers[layer]
    assert pair is not None
    return tuple(pair[0].shape)


@pytest.mark.parametrize("prefill", [True, False])
def test_windowed_layers_stop_growing(prefill, monkeypatch):
    """A rollout 20 times as long: not a byte more with windows, and else that of full layers."""
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    short, long = 24, 480
    held = {}
    for name, layers in {
        "windowed": [(7, 0), (2, 13), (9, 3)],
        "mixed": [(7, 0), (None, 0), (9, 3)],
    }.items():
        model = build(layers)
        for length in (short, long):
            # One row, and no more blocks than are needed: what is held is what is kept.
            engine = LocalEngine(
                model, max_tokens=600, max_batch_size=1, prefill_chunk=50, max_kv_gib=1.0
            )
            context = some_ids(1, length - 1 if prefill else 10)
            new = length - len(context)
            [result] = engine.generate(
                [request("a", context, max_new_tokens=new + 1, shared_len=5)]
            )
            assert len(engine._store.caches["a"].ids) == length
            # Angles of the rotation are fp32: at position 480 they are off by up to 3e-5.
            assert error(model, context, result) < 1e-4
            held[name, length] = engine.cache_bytes()
    # rings of 8, 3 and 10 tokens; a head of 13 - 5; the shared part is 5 long, the windows are
    # 7, 2 and 9, and all 5 are in the second layer's prefix
    windowed = (8 + (8 + 4) + 12) + (5 + 5 + 5)
    assert held["windowed", short] == held["windowed", long] == windowed * TOKEN_BYTES
    mixed = {length: 8 + (-(-(length - 5) // 4) * 4) + 12 + 5 + 5 + 5 for length in (short, long)}
    assert {length: held["mixed", length] for length in mixed} == {
        length: tokens * TOKEN_BYTES for length, tokens in mixed.items()
    }


def test_heads_come_with_rollouts_that_share_less(monkeypatch):
    """A row whose shared part covers the prefix has no head; another's does not disturb it."""
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    model = build([(3, 12), (5, 12), (None, 0)])
    engine = LocalEngine(model, max_tokens=160, max_batch_size=4)
    prompt = some_ids(4, 12)
    contexts = {"a": [*prompt, *some_ids(5, 30)], "b": some_ids(6, 40), "c": [*prompt, 1]}
    seen = []
    for turn, names in enumerate(("a", "ab", "abc", "cb")):
        asked = [
            request(n, contexts[n], shared_len=0 if n == "b" else 12, seed=turn) for n in names
        ]
        for one, result in zip(asked, engine.generate(asked), strict=True):
            assert error(model, list(one.context), result) < 2e-5, (turn, one.rollout_id)
            contexts[one.rollout_id] = [*one.context, *result.ids, 3, 4, 5]
        seen.append(rows_of(engine, 0)[0])
    assert seen == [1, 4, 4, 4]  # a ring of 4; then a head of 12 before it


@pytest.mark.parametrize("layout", ["prefix beyond the shared part", "windows", "mixed"])
def test_the_memory_limit_queues_and_forgets(layout, monkeypatch):
    """Rings that have wrapped are computed anew; never more than the limit is held."""
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    monkeypatch.setattr(local, "BLOCK", BLOCK)
    layers = {"windows": [(7, 0), (3, 0), (10, 0)], "mixed": [(3, 0), (None, 0), (6, 2)]}
    model = build((LAYOUTS | layers)[layout])
    limit = {"windows": 120, "mixed": 400, "prefix beyond the shared part": 330}[layout]
    engine = LocalEngine(
        model,
        max_tokens=160,
        max_batch_size=8,
        prefill_chunk=11,
        max_kv_gib=limit * TOKEN_BYTES / 2**30,
    )
    held, live = watch_decode(engine)
    for seed in range(2):
        assert play(engine, model, shared_len=6, seed=seed, turns=4) < 2e-5
        engine.release(map(str, range(7)))
    assert max(held) <= limit * TOKEN_BYTES
    assert max(live) > 1
    assert engine.stats.forgotten


@pytest.mark.parametrize("prefix", [0, 9])
def test_a_wrapped_ring_is_moved_as_it_is(prefix, monkeypatch):
    """A long prompt that others share takes the rows of those that left; the last row moves up."""
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    monkeypatch.setattr(local, "BLOCK", BLOCK)
    model = build([(7, prefix), (None, 0), (2, 0)])
    # full rows of 16 blocks, rings of 2 blocks and 1, and heads: four rows and nothing else
    row = 64 + 4 * -(-(prefix + 8) // 4) + 4
    engine = LocalEngine(
        model, max_tokens=64, max_batch_size=4, max_kv_gib=4 * row * TOKEN_BYTES / 2**30
    )
    rows, compact = [], RowPool.compact

    def watched(pool, kept, **settings):
        rows.append((list(kept), pool.num_rows))
        compact(pool, kept, **settings)

    monkeypatch.setattr(RowPool, "compact", watched)
    contexts = {name: some_ids(index, 50) for index, name in enumerate("abcd")}
    asked = [request(name, contexts[name], max_new_tokens=6) for name in "abcd"]
    for one, result in zip(asked, engine.generate(asked), strict=True):
        contexts[one.rollout_id] += result.ids
    engine.release("abc")
    asked = [
        request("e", some_ids(9, 60), shared_len=55, max_new_tokens=3),
        request("d", contexts["d"], max_new_tokens=5, seed=4),
    ]
    for one, result in zip(asked, engine.generate(asked), strict=True):
        assert error(model, list(one.context), result) < 2e-5
    assert rows == [([3], 4)]
    assert engine.stats.forgotten == 0
    assert engine.cache_bytes() <= 4 * row * TOKEN_BYTES


def test_windows_let_more_rollouts_in(monkeypatch):
    """The same limit: two rollouts of 40 tokens where all is kept, and ten in rings of a block."""
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    monkeypatch.setattr(local, "BLOCK", BLOCK)
    most = {}
    for window in (None, 3):
        model = build([(window, 0)] * 3)
        engine = LocalEngine(
            model, max_tokens=40, max_batch_size=16, max_kv_gib=3 * 80 * TOKEN_BYTES / 2**30
        )
        live, decode = [], engine._decode
        engine._decode = lambda step, turns, live=live, decode=decode: (
            live.append(len(turns)),
            decode(step, turns),
        )[1]
        asked = [request(str(i), some_ids(i, 33), max_new_tokens=7) for i in range(12)]
        for one, result in zip(asked, engine.generate(asked), strict=True):
            assert error(model, list(one.context), result) < 2e-5
        most[window] = max(live)
    assert most == {None: 2, 3: 12}


@pytest.mark.parametrize("shared_len", [0, 3, 20, 56])
def test_the_least_limit_holds_one_rollout(shared_len, monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    monkeypatch.setattr(local, "BLOCK", BLOCK)
    model = build([(5, 9), (2, 0), (7, 30)])
    # by hand: max_tokens 60; prefix and two windows, or all 60, and a block
    least = ((9 + 10) + (0 + 4) + min(60, 30 + 14) + 3 * BLOCK) * TOKEN_BYTES / 2**30
    settings = {"max_tokens": 60, "max_batch_size": 2}
    with pytest.raises(ValueError, match=r"max_kv_gib = .*one rollout of max_tokens = 60 needs"):
        LocalEngine(model, **settings, max_kv_gib=least * 0.999)
    engine = LocalEngine(model, **settings, max_kv_gib=least)
    asked = [
        request(name, [*some_ids(7, 56), index], shared_len=shared_len, max_new_tokens=9)
        for index, name in enumerate("ab")
    ]
    for one, result in zip(asked, engine.generate(asked), strict=True):
        assert error(model, list(one.context), result) < 2e-5
        assert engine.cache_bytes() <= least * 2**30


def test_a_rollout_is_the_same_alone_or_among_others(monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    model = build([(5, 9), (None, 0), (7, 0)])
    prompt = some_ids(8, 6)
    asked = [
        request(str(i), prompt + some_ids(i, 1 + 9 * i), shared_len=6, max_new_tokens=30, seed=i)
        for i in range(6)
    ]
    settings = {"max_tokens": 160, "max_batch_size": 6}
    together = LocalEngine(model, **settings).generate(asked)
    for index in (0, 3, 5):
        [alone] = LocalEngine(model, **settings).generate([asked[index]])
        assert alone.ids == together[index].ids
        assert alone.logprobs == pytest.approx(together[index].logprobs, abs=1e-5)


def test_tiny_gpt_oss_equals_its_forward_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", BLOCK)
    model = gpt_oss(tiny_moe.write(tmp_path), dtype=torch.float32)
    assert spans_of(model) == (Span(7, 0), None) * 2  # of 8 keys the furthest is 7 tokens back
    engine = LocalEngine(model, max_tokens=200, max_batch_size=4, prefill_chunk=13)
    context = some_ids(1, 30)
    for turn in range(3):
        [result] = engine.generate(
            [request("a", context, max_new_tokens=30, shared_len=11, seed=turn)]
        )
        expected = plain_logprobs(model, context, result.ids, temperature=1.0)
        assert result.logprobs == pytest.approx(expected, abs=2e-5)
        context = [*context, *result.ids, *some_ids(50 + turn, 9)]
    # 137 tokens are kept, 11 of them shared; the pool's blocks grow by halves
    assert rows_of(engine, 0)[0] == 2
    assert rows_of(engine, 1)[0] >= (137 - 11) / BLOCK
    logits = replay(model, context, num_prompt=30)
    expected = plain_logprobs(model, context[:30], tuple(context[30:]), temperature=1.0)
    got = logits.double().log_softmax(-1)[torch.arange(len(expected)), context[30:]]
    assert got.tolist() == pytest.approx(expected, abs=2e-5)
