"""The local engine against plain dense forward passes over whole rollouts."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from components.attention.plan import MaskPlan
from components.policy import cache
from components.policy.local import LocalEngine
from tests.unit.policy.tiny import (
    KINDS,
    VOCAB,
    plain_logits,
    plain_logprobs,
    request,
    tiny_model,
)


def some_ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def engine_of(model, **settings) -> LocalEngine:
    return LocalEngine(model, **({"max_tokens": 600, "max_batch_size": 8} | settings))


def watch_tokens(model) -> list[int]:
    """Tokens of every forward pass from now on, seen at the embeddings."""
    seen: list[int] = []
    model.tok_embeddings.register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    return seen


class Conversation:
    """A rollout that sends its turns to an engine and keeps its own ledger."""

    def __init__(self, name: str, system: list[int], *, temperature: float, shared: bool = True):
        self.name, self.temperature = name, temperature
        self.shared_len = len(system) if shared else 0
        self.ids = list(system)
        self.turns: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = []

    def ask(self, observation: list[int], *, seed: int, max_new_tokens: int, stop_ids=frozenset()):
        self.ids += observation
        return request(
            self.name,
            self.ids,
            shared_len=self.shared_len,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            temperature=self.temperature,
            seed=seed,
        )

    def take(self, result) -> None:
        self.turns.append((len(self.ids), result.ids, result.logprobs))
        self.ids += result.ids

    def check(self, model, tolerance: float) -> None:
        for length, ids, logprobs in self.turns:
            expected = plain_logprobs(model, self.ids[:length], ids, temperature=self.temperature)
            assert logprobs == pytest.approx(expected, abs=tolerance), self.name


def talk(engine: LocalEngine, *, turns: int = 3, stop_ids=frozenset({7, 11, 13, 17})):
    """Conversations with two system prompts, one without, and turns of very different lengths."""
    first, second = some_ids(1, 21), some_ids(2, 13)
    rollouts = [
        Conversation("a", first, temperature=1.0),
        Conversation("b", second, temperature=0.7),
        Conversation("c", first, temperature=1.3),
        Conversation("d", some_ids(3, 2), temperature=1.0, shared=False),
        Conversation("e", second, temperature=0.0),
        Conversation("f", first, temperature=1.0),
    ]
    for turn in range(turns):
        asked = rollouts if turn != 1 else rollouts[::-2]  # others pause, in another order
        requests = [
            rollout.ask(
                some_ids(100 * turn + i, (i * 7 + turn * 5) % 17 + 1),
                seed=10 * turn + i,
                max_new_tokens=5 + 6 * i,
                stop_ids=stop_ids,
            )
            for i, rollout in enumerate(asked)
        ]
        for rollout, result in zip(asked, engine.generate(requests), strict=True):
            rollout.take(result)
    return rollouts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefill_chunk", [1024, 9])
def test_logprobs_equal_a_plain_forward(kind, prefill_chunk, monkeypatch):
    if prefill_chunk == 9:
        monkeypatch.setattr(cache, "BLOCK", 4)  # many blocks, and runs of rows that need them
    model = tiny_model(kind)
    rollouts = talk(engine_of(model, prefill_chunk=prefill_chunk))
    assert len({len(ids) for r in rollouts for _, ids, _ in r.turns}) > 3  # they leave apart
    for rollout in rollouts:
        rollout.check(model, 1e-5)


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk": 9, "deterministic": False}])
@pytest.mark.parametrize("kind", ["all", "plain", "window"])
def test_bfloat16_stays_close(kind, settings):
    exact = tiny_model(kind)
    model = tiny_model(kind).to(torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    for rollout in talk(engine_of(model, **settings), turns=2):
        rollout.check(exact, 0.25)
        # and no further off than a plain forward in bfloat16
        for length, ids, logprobs in rollout.turns:
            settings = {"temperature": rollout.temperature}
            truth = torch.tensor(plain_logprobs(exact, rollout.ids[:length], ids, **settings))
            plain = torch.tensor(plain_logprobs(model, rollout.ids[:length], ids, **settings))
            ours = (torch.tensor(logprobs) - truth).abs().max()
            assert ours <= 3 * (plain - truth).abs().max() + 0.02


def test_caches_grow_and_long_rollouts_stay_exact():
    model = tiny_model("all")
    engine = engine_of(model, max_tokens=900, prefill_chunk=100)
    long = Conversation("long", some_ids(1, 20), temperature=1.0)
    short = Conversation("short", some_ids(1, 20), temperature=1.0)
    for turn, (n, m) in enumerate([(5, 3), (290, 7), (150, 260)]):
        requests = [
            long.ask(some_ids(turn, n), seed=turn, max_new_tokens=30),
            short.ask(some_ids(50 + turn, m), seed=turn, max_new_tokens=30),
        ]
        for rollout, result in zip([long, short], engine.generate(requests), strict=True):
            rollout.take(result)
    for rollout in (long, short):
        rollout.check(model, 2e-5)


def test_nothing_is_computed_twice():
    model = tiny_model()
    seen = watch_tokens(model)
    engine = engine_of(model, deterministic=False)
    rollouts = talk(engine)
    # Each token once, the two system prompts once for all; the last sampled token of a rollout
    # has not been fed back.
    total = sum(len(r.ids) - r.shared_len for r in rollouts) + 21 + 13 - len(rollouts)
    assert sum(seen) == total
    stats = engine.stats
    assert stats.shared_tokens == 21 + 13
    assert stats.shared_tokens + stats.prefill_tokens + stats.decode_tokens == total


def test_prefill_goes_in_whole_rows():
    model = tiny_model()
    seen = watch_tokens(model)
    requests = [request(str(i), some_ids(i, 30), max_new_tokens=1) for i in range(5)]
    engine_of(model, prefill_chunk=64, deterministic=False).generate(requests)
    assert seen == [64, 64, 22]


def test_greedy_takes_the_most_probable_and_reports_it_at_temperature_1():
    model = tiny_model()
    context = some_ids(5, 12)
    [result] = engine_of(model).generate([request("a", context, temperature=0.0)])
    for n, (token, logprob) in enumerate(zip(result.ids, result.logprobs, strict=True)):
        logits = plain_logits(model, [*context, *result.ids[:n]])[-1]
        assert token == int(logits.argmax())
        assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-5)


def test_a_turn_does_not_depend_on_its_neighbours():
    model = tiny_model("all")
    system = some_ids(1, 10)
    requests = [
        request(str(i), system + some_ids(i, 3 + 4 * i), shared_len=10, seed=i, max_new_tokens=12)
        for i in range(5)
    ]
    together = engine_of(model).generate(requests)
    queued = engine_of(model, max_batch_size=2).generate(requests)
    for one, both, waited in zip(requests, together, queued, strict=True):
        [alone] = engine_of(model).generate([one])
        assert alone.ids == both.ids == waited.ids
        assert both.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_the_batch_is_bounded_and_refilled_in_order():
    model = tiny_model()
    seen = watch_tokens(model)
    lengths = [3, 6, 1, 4, 2]
    requests = [request(str(i), [i + 1], max_new_tokens=n, seed=i) for i, n in enumerate(lengths)]
    results = engine_of(model, max_batch_size=2, deterministic=False).generate(requests)
    assert [len(r.ids) for r in results] == lengths
    # 0 and 1 start; 2 takes 0's place and ends at once; 3, then 4 with what is left of 3.
    assert seen == [2, 2, 2, 1, 1, 2, 2, 2, 1, 1]


def test_finish_reasons_come_from_the_engine():
    model = tiny_model()
    context = some_ids(9, 6)
    [free] = engine_of(model).generate([request("a", context, max_new_tokens=10)])
    assert free.finish_reason == "length"
    assert len(free.ids) == 10
    stop = free.ids[4]
    [stopped] = engine_of(model).generate(
        [request("a", context, max_new_tokens=10, stop_ids=frozenset({stop}))]
    )
    first = free.ids.index(stop)
    assert stopped.finish_reason == "stop"
    assert stopped.ids == free.ids[: first + 1]
    # a stop id in the last place is a stop
    [exact] = engine_of(model).generate(
        [request("a", context, max_new_tokens=first + 1, stop_ids=frozenset({stop}))]
    )
    assert exact.finish_reason == "stop"
    # the context's end cuts a turn
    [cut] = engine_of(model, max_tokens=9).generate([request("a", context, max_new_tokens=10)])
    assert (len(cut.ids), cut.finish_reason) == (3, "length")


def test_the_same_context_can_be_sampled_again():
    model = tiny_model("sinks")
    engine = engine_of(model)
    context = some_ids(4, 9)
    whole = request("a", context, shared_len=9, max_new_tokens=1, seed=1)  # all of it shared
    [one] = engine.generate([whole])
    [again] = engine.generate([whole])
    assert one == again
    expected = plain_logprobs(model, context, one.ids, temperature=1.0)
    assert one.logprobs == pytest.approx(expected, abs=1e-5)


def test_sync_drops_every_cache():
    model = tiny_model()
    engine = engine_of(model)
    rollout = Conversation("a", some_ids(1, 15), temperature=1.0)
    rollout.take(engine.generate([rollout.ask([3, 4], seed=0, max_new_tokens=4)])[0])
    old_turns, rollout.turns = rollout.turns, []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine.sync(5)
    assert engine.cache_bytes() == 0
    [result] = engine.generate([rollout.ask([5], seed=1, max_new_tokens=6)])
    rollout.take(result)
    assert result.policy_version == engine.policy_version == 5
    rollout.check(model, 1e-5)
    rollout.turns = old_turns  # the weights did change
    with pytest.raises(AssertionError):
        rollout.check(model, 1e-3)


def test_release_frees_memory_and_rows_are_reused():
    model = tiny_model()
    engine = engine_of(model)
    system = some_ids(1, 16)

    def turn(names: str) -> None:
        engine.generate([request(n, [*system, 1], shared_len=16, max_new_tokens=2) for n in names])

    turn("abcd")
    full = engine.cache_bytes()
    engine.release(["a", "b", "nobody"])
    turn("ef")
    assert engine.cache_bytes() == full
    engine.release("cdef")
    # keys and values of 3 layers, 16 tokens, 2 heads of 16, 4 bytes
    assert engine.cache_bytes() == 2 * 3 * 16 * 2 * 16 * 4
    engine.sync(1)
    assert engine.cache_bytes() == 0


def test_prefixes_that_nobody_has_do_not_pile_up():
    engine = engine_of(tiny_model())
    prefix = 3 * 16 * 2 * 2 * 16 * 4  # 16 tokens of 3 layers, keys and values of 2 heads of 16
    for number in range(30):
        system = some_ids(number, 16)
        engine.generate([request("a", [*system, 1], shared_len=16, max_new_tokens=1)])
        engine.release(["a"])
        assert engine.cache_bytes() <= 4 * prefix
    before = engine.stats.shared_tokens
    for number in (28, 26, 28):  # one of the last four is still there, one that was used is kept
        system = some_ids(number, 16)
        engine.generate([request("a", [*system, 1], shared_len=16, max_new_tokens=1)])
        engine.release(["a"])
    assert engine.stats.shared_tokens == before


def test_a_released_rollout_starts_anew():
    model = tiny_model()
    engine = engine_of(model)
    engine.generate([request("a", [1, 2, 3])])
    with pytest.raises(ValueError, match="differs from what was computed before at token 1"):
        engine.generate([request("a", [1, 5, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4])])
    engine.release(["a"])
    [result] = engine.generate([request("a", [1, 5, 3])])
    expected = plain_logprobs(model, [1, 5, 3], result.ids, temperature=1.0)
    assert result.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": []}, "context has 0 tokens"),
        ({"context": [1] * 50}, "fewer than max_tokens = 50"),
        ({"shared_len": 4}, "shared_len = 4 must be from 0 to the length of the context, 3"),
        ({"shared_len": -1}, "shared_len = -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"temperature": -0.5}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"context": [1, VOCAB, 2]}, f"id {VOCAB} is outside the vocabulary"),
        ({"context": [1, -1, 2]}, "id -1 is outside the vocabulary"),
    ],
)
def test_bad_requests_are_refused_before_any_compute(settings, message):
    model = tiny_model()
    seen = watch_tokens(model)
    engine = engine_of(model, max_tokens=50)
    good = request("good", [1, 2])
    with pytest.raises(ValueError, match=message):
        engine.generate([good, request("r7", **({"context": [1, 2, 3]} | settings))])
    assert seen == []
    with pytest.raises(ValueError, match="rollout good: two requests"):
        engine.generate([good, good])


def test_shared_len_may_not_change_and_a_context_may_not_shrink():
    engine = engine_of(tiny_model())
    [result] = engine.generate([request("a", [1, 2, 3, 4], shared_len=2)])
    context = [1, 2, 3, 4, *result.ids, 5]
    with pytest.raises(ValueError, match="shared_len = 3, but it was 2"):
        engine.generate([request("a", context, shared_len=3)])
    with pytest.raises(ValueError, match="contexts only grow"):
        engine.generate([request("a", [1, 2, 3], shared_len=2)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 4000}, "the model's context is 2048"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        engine_of(tiny_model(), **settings)


def test_logits_that_are_not_finite_name_the_rollout_and_the_version():
    model = tiny_model()
    engine = engine_of(model)
    engine.sync(3)
    with torch.no_grad():
        model.tok_embeddings.weight[9] = float("nan")
    # its embedding is the head's row, too: every rollout sees it
    with pytest.raises(FloatingPointError, match=r"rollout x, y under policy version 3"):
        engine.generate([request("x", [1]), request("y", [2])])
    assert engine.cache_bytes() == 0
    with torch.no_grad():
        model.tok_embeddings.weight[9] = 0.0
    engine.generate([request("x", [1]), request("y", [2])])


def test_an_interrupted_call_leaves_no_half_filled_cache(monkeypatch):
    model = tiny_model()
    engine = engine_of(model)
    asked = request("a", [1, 2, 3], seed=4)
    [expected] = engine_of(model).generate([asked])
    with monkeypatch.context() as patch:
        patch.setattr(model.norm, "forward", lambda x: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate([asked])
    assert engine.generate([asked]) == [expected]


def test_bitwise_equal_across_processes():
    code = (
        "from tests.unit.policy.test_local import talk, engine_of, tiny_model\n"
        "rollouts = talk(engine_of(tiny_model('all')))\n"
        "print([[p.hex() for _, _, ps in r.turns for p in ps] for r in rollouts])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rollouts = talk(engine_of(tiny_model("all")))
    here = [[p.hex() for _, _, ps in r.turns for p in ps] for r in rollouts]
    assert run.stdout.strip().splitlines()[-1] == str(here)


def test_training_goes_on_after_sampling():
    """What the model builds while sampling (RoPE tables) must not refuse autograd later."""
    model = tiny_model()
    engine_of(model).generate([request("a", [1, 2, 3])])
    logits = model(
        torch.tensor([[1, 2, 3]]), mask=MaskPlan.causal(3), input_pos=torch.arange(3)[None]
    )
    logits.sum().backward()
    assert model.tok_embeddings.weight.grad is not None


def test_compiled_layers_run_uncompiled_while_sampling():
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    model = tiny_model()
    model.layers[0].compile(backend=backend)
    asked = request("a", [1, 2, 3], temperature=0.0)
    [result] = engine_of(model).generate([asked])
    assert compiled == []
    plain_logits(model, [1, 2, 3, *result.ids])
    assert compiled  # and the trainer's passes stay compiled
