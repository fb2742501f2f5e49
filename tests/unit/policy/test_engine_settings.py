"""What the local engine's settings promise: memory, independence of neighbours, truncation."""

from __future__ import annotations

import random

import pytest
import torch

from components.models.lora import add_adapters, merged_weight
from components.policy.cache import BLOCK
from components.policy.checks import check_device
from components.policy.local import LocalEngine
from tests.unit.policy.tiny import (
    VOCAB,
    plain_logits,
    plain_logprobs,
    request,
    tiny_model,
    watch_decode,
)

SYSTEM = random.Random(0).choices(range(VOCAB), k=12)
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4  # keys and values, 3 layers, 2 heads of 16 numbers, fp32


def gib(tokens: int) -> float:
    return tokens * TOKEN_BYTES / 2**30


def some_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def play(engine: LocalEngine, names: list[int], *, turns: int) -> dict[int, list]:
    """Turns of rollouts whose contexts and lengths follow from their numbers alone."""
    contexts = {name: [*SYSTEM, *some_ids(name, 1 + name % 7)] for name in names}
    results: dict[int, list] = {name: [] for name in names}
    for turn in range(turns):
        requests = [
            request(
                str(name),
                contexts[name],
                shared_len=0 if name % 5 == 4 else len(SYSTEM),
                max_new_tokens=4 + (name * 5 + turn) % 9,
                seed=100 * name + turn,
            )
            for name in names
        ]
        for name, result in zip(names, engine.generate(requests), strict=True):
            results[name].append(result)
            contexts[name] += [*result.ids, *some_ids(name + turn, 1 + (name + turn) % 4)]
    return results


def assert_same(found: list, expected: list) -> None:
    assert [r.ids for r in found] == [r.ids for r in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_a_rollout_is_the_same_alone_or_among_16():
    model = tiny_model("all")
    settings = {"max_tokens": 200, "max_batch_size": 16}
    together = play(LocalEngine(model, **settings), list(range(16)), turns=3)
    for name in (0, 4, 11, 15):
        alone = play(LocalEngine(model, **settings), [name], turns=3)
        assert_same(alone[name], together[name])


def test_shapes_do_not_depend_on_who_shares_the_batch():
    model = tiny_model()
    seen: list[int] = []
    model.tok_embeddings.register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    settings = {"max_tokens": 200, "max_batch_size": 6}

    def shapes(names: list[int], *, deterministic: bool) -> list[int]:
        seen.clear()
        engine = LocalEngine(model, **settings, deterministic=deterministic)
        play(engine, names, turns=1)
        assert engine.stats.decode_tokens == sum(3 + (name * 5) % 9 for name in names)
        return list(seen)

    shared, own, *steps = shapes([3], deterministic=True)
    assert (shared, own) == (len(SYSTEM), 4)
    assert set(steps) == {6}
    shared, *passes = shapes([3, 5, 6], deterministic=True)
    assert (shared, passes[:3]) == (len(SYSTEM), [4, 6, 7])  # each rollout in a pass of its own
    assert set(passes[3:]) == {6}
    assert shapes([3, 5, 6], deterministic=False)[:3] == [len(SYSTEM), 4 + 6 + 7, 3]


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_the_memory_limit_queues_and_changes_no_token(kind):
    model = tiny_model(kind)
    names = list(range(7))
    free = play(LocalEngine(model, max_tokens=100, max_batch_size=8), names, turns=3)
    # two rollouts of one block each, and the shared prefix
    limit = gib(2 * BLOCK + len(SYSTEM))
    engine = LocalEngine(model, max_tokens=100, max_batch_size=8, max_kv_gib=limit)
    held, live = watch_decode(engine)
    for name, results in play(engine, names, turns=3).items():
        assert_same(results, free[name])
    assert max(held) <= limit * 2**30
    assert max(live) == 2
    assert engine.stats.forgotten > 0


def test_room_is_made_when_rollouts_outgrow_the_pool():
    """One rollout grows to two blocks while others hold one: the pool is packed anew."""
    model = tiny_model("all")
    limit = gib(4 * BLOCK + len(SYSTEM))
    settings = {"max_tokens": 2 * BLOCK, "max_batch_size": 8}
    results = []
    for max_kv_gib in (None, limit):
        engine = LocalEngine(model, **settings, max_kv_gib=max_kv_gib)
        engine.generate([request(n, [*SYSTEM, 1], shared_len=len(SYSTEM)) for n in "abcd"])
        engine.release("b")
        long = [*SYSTEM, *some_ids(5, BLOCK + 30)]
        requests = [
            request("d", [*SYSTEM, *some_ids(1, 3)], shared_len=len(SYSTEM)),
            request("e", long, shared_len=len(SYSTEM)),
            request("c", [*SYSTEM, *some_ids(2, 4)], shared_len=len(SYSTEM)),
        ]
        engine.release("dc")
        results.append(engine.generate(requests))
        assert max_kv_gib is None or engine.cache_bytes() <= max_kv_gib * 2**30
    assert_same(results[1], results[0])
    expected = plain_logprobs(model, long, results[1][1].ids, temperature=1.0)
    assert results[1][1].logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_kv_gib": gib(100)}, r"max_kv_gib = .*one rollout of max_tokens = 100 needs"),
        ({"top_p": 0.0}, r"top_p = 0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p = 1.5"),
        ({"top_k": 0}, r"top_k = 0: must be at least 1, or null"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LocalEngine(tiny_model(), max_tokens=100, max_batch_size=2, **settings)


def test_top_k_and_top_p_report_the_distribution_that_was_drawn_from():
    model = tiny_model()
    engine = LocalEngine(model, max_tokens=100, max_batch_size=2, top_k=5, top_p=0.8)
    context = some_ids(3, 9)
    [result] = engine.generate([request("a", context, max_new_tokens=30, temperature=1.5)])
    logits = plain_logits(model, [*context, *result.ids])[len(context) - 1 : -1].double() / 1.5
    for row, token, logprob in zip(logits, result.ids, result.logprobs, strict=True):
        best = sorted(row.softmax(-1).tolist(), reverse=True)[:5]
        kept, total = [], 0.0
        while total < 0.8 * sum(best):
            kept.append(best[len(kept)])
            total += kept[-1]
        p = float(row.softmax(-1)[token])
        assert p == pytest.approx(min(kept, key=lambda x: abs(x - p)))  # it is one of them
        assert logprob == pytest.approx(float(torch.tensor(p / total).log()), abs=1e-4)


def test_adapters_are_applied_without_merging():
    plain = tiny_model("all")
    model = tiny_model("all")
    add_adapters(model, ["q_proj", "v_proj", "w2"], rank=2, alpha=6.0)
    model.load_state_dict(plain.state_dict(), strict=False)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.3)
        for mine, theirs in zip(model.layers, plain.layers, strict=True):
            for path in ("attn.q_proj", "attn.v_proj", "mlp.w2"):
                adapted = mine.get_submodule(path)
                a, b = adapted.lora_a.weight, adapted.lora_b.weight
                weight = theirs.get_submodule(path).weight
                weight.copy_(merged_weight(weight, a, b, scale=3.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = LocalEngine(model, max_tokens=100, max_batch_size=2)
    context = some_ids(4, 20)
    [result] = engine.generate([request("a", context, shared_len=9)])
    expected = plain_logprobs(plain, context, result.ids, temperature=1.0)
    assert result.logprobs == pytest.approx(expected, abs=2e-5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_model_without_kernels_is_refused_at_once():
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match=r"float32: on cuda .*bfloat16.*set dtype: bf16"):
        check_device(cuda, torch.float32, head_dim=64)
    with pytest.raises(ValueError, match=r"head_dim = 20: .*multiples of 8"):
        check_device(cuda, torch.bfloat16, head_dim=20)
    check_device(cuda, torch.bfloat16, head_dim=64)
    check_device(torch.device("cpu"), torch.float32, head_dim=20)
    with pytest.raises(ValueError, match="runs on cpu and cuda, not on meta"):
        LocalEngine(tiny_model().to("meta"), max_tokens=100, max_batch_size=2)
