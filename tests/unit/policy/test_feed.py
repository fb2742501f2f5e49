"""Continuous batching in the local engine, against the same turns sampled in rounds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from components.policy.cache import BLOCK
from components.policy.engine import in_rounds
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest, SampleResult
from tests.unit.policy.tiny import VOCAB, plain_logprobs, request, tiny_model, watch_decode

SYSTEM = random.Random(0).choices(range(VOCAB), k=12)
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4  # keys and values, 3 layers, 2 heads of 16 numbers, fp32
UNEQUAL = {"a": (8, 2), "b": (2, 8)}


class Dialogues:
    """Rollouts whose turns have given lengths; tool results follow from name and turn.

    Args:
        lengths: tokens of each turn, by rollout.
        engine: told to release those that have ended, if given.
    """

    def __init__(
        self, lengths: Mapping[str, Sequence[int]], *, engine: LocalEngine | None = None
    ) -> None:
        self.lengths, self.engine = lengths, engine
        self.ids = {name: [*SYSTEM, *self.some_ids(name, 0)] for name in lengths}
        self.turns: dict[str, list[SampleResult]] = {name: [] for name in lengths}
        self.asked: list[SampleRequest] = []
        self.calls: list[list[int]] = []

    @staticmethod
    def some_ids(name: str, turn: int) -> list[int]:
        draw = random.Random(f"{name}{turn}")
        return draw.choices(range(VOCAB), k=draw.randrange(1, 7))

    def ask(self, name: str) -> SampleRequest:
        turn = len(self.turns[name])
        self.asked.append(
            request(
                name,
                self.ids[name],
                shared_len=len(SYSTEM),
                max_new_tokens=self.lengths[name][turn],
                seed=100 * turn + sum(map(ord, name)),
            )
        )
        return self.asked[-1]

    def start(self) -> list[SampleRequest]:
        return [self.ask(name) for name in self.lengths]

    def feed(self, done: Sequence[tuple[int, SampleResult]]) -> list[SampleRequest]:
        self.calls.append([number for number, _ in done])
        entering = []
        for number, result in done:
            name = self.asked[number].rollout_id
            self.turns[name].append(result)
            self.ids[name] += [*result.ids, *self.some_ids(name, len(self.turns[name]))]
            if len(self.turns[name]) < len(self.lengths[name]):
                entering.append(self.ask(name))
            elif self.engine is not None:
                self.engine.release([name])
        return entering


def engine_of(model, **settings) -> LocalEngine:
    return LocalEngine(model, **({"max_tokens": 200, "max_batch_size": 8} | settings))


def played(engine: LocalEngine, lengths, *, rounds: bool = False, release: bool = True):
    dialogues = Dialogues(lengths, engine=engine if release else None)
    if rounds:
        results = in_rounds(engine.generate, dialogues.start(), dialogues.feed)
    else:
        results = engine.generate(dialogues.start(), feed=dialogues.feed)
    by_number = [dialogues.turns[r.rollout_id].pop(0) for r in list(dialogues.asked)]
    assert results == by_number  # in the order of their numbers, none twice
    for asked, result in zip(dialogues.asked, results, strict=True):
        dialogues.turns[asked.rollout_id].append(result)
    return dialogues


def many(count: int = 7) -> dict[str, list[int]]:
    draw = random.Random(5)
    return {f"r{i}": [draw.choice((1, 2, 3, 17)) for _ in range(1 + i % 4)] for i in range(count)}


@pytest.mark.parametrize(("rounds", "decode_steps"), [(True, 14), (False, 8)])
def test_decode_steps_worked_out_by_hand(rounds, decode_steps):
    """The first token of each turn comes of its prefill, each further one of a decode step.

    In rounds: 7 steps for the 8 of a, then 7 for the 8 of b. Else b leaves after 1 step, its next
    turn shares 6 with the rest of a's; a's next turn, of 2, shares the last of b's: 1 + 6 + 1.
    """
    engine = engine_of(tiny_model())
    played(engine, UNEQUAL, rounds=rounds)
    assert engine.stats.decode_steps == decode_steps
    assert engine.stats.decode_tokens == 7 + 1 + 1 + 7


def test_feed_is_called_after_every_step_with_what_ended_in_it():
    dialogues = played(engine_of(tiny_model()), UNEQUAL)
    # prefill of a and b; 1 step; prefill of b's second turn (2); 6 steps; prefill of a's second
    # (3); the last step.
    assert dialogues.calls == [[], [1], [], [], [], [], [], [], [0], [], [2, 3]]


@pytest.mark.parametrize("kind", ["all", "window"])
@pytest.mark.parametrize("max_batch_size", [8, 3])
def test_tokens_equal_those_of_rounds(kind, max_batch_size):
    model = tiny_model(kind)
    settings = {"max_batch_size": max_batch_size, "deterministic": True}
    rounds = played(engine_of(model, **settings), many(), rounds=True)
    stream = played(engine_of(model, **settings), many())
    for name, turns in rounds.turns.items():
        assert [t.ids for t in stream.turns[name]] == [t.ids for t in turns]
        for ours, theirs in zip(stream.turns[name], turns, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    for asked in stream.asked[-4:]:  # and those of a dense forward pass
        turn = next(
            t
            for t in stream.turns[asked.rollout_id]
            if stream.ids[asked.rollout_id][len(asked.context) :][: len(t.ids)] == list(t.ids)
        )
        expected = plain_logprobs(model, list(asked.context), turn.ids, temperature=1.0)
        assert turn.logprobs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("deterministic", [True, False])
def test_equal_calls_give_equal_turns(deterministic):
    model = tiny_model("all")
    first, second = (
        played(engine_of(model, deterministic=deterministic, max_batch_size=3), many())
        for _ in range(2)
    )
    assert first.turns == second.turns
    assert first.calls == second.calls
    assert first.asked == second.asked


def test_an_error_in_feed_ends_the_call_and_drops_the_caches():
    engine = engine_of(tiny_model())
    dialogues = Dialogues(UNEQUAL)

    def broken(done):
        if done:
            raise KeyError("no such worker")
        return []

    with pytest.raises(KeyError, match="no such worker"):
        engine.generate(dialogues.start(), feed=broken)
    assert engine.cache_bytes() == 0
    assert played(engine, UNEQUAL).turns == played(engine_of(tiny_model()), UNEQUAL).turns


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("a", [1, 2]), "rollout a: two requests at once"),
        (request("w", [1, 2]), "rollout w: two requests at once"),
        (request("new", [1, VOCAB]), f"rollout new: id {VOCAB} is outside"),
        (request("b", [1, 2, 3], shared_len=12), "rollout b: shared_len = 12 must be"),
        (request("b", [*SYSTEM, 60, 60], shared_len=12), "rollout b: the context differs"),
    ],
)
def test_requests_that_feed_gives_are_checked(bad, message):
    """Rollout a is being sampled then, w waits for a place, and b has just ended a turn."""
    engine = engine_of(tiny_model(), max_batch_size=2)
    waits = request("w", SYSTEM)
    with pytest.raises(ValueError, match=message):
        engine.generate(
            [*Dialogues(UNEQUAL).start(), waits], feed=lambda done: [bad] if done else []
        )
    assert engine.cache_bytes() == 0


def test_rollouts_that_are_kept_go_on_before_others_begin():
    """Room for two of four with two turns of 9: 8 steps a turn, two at a time, so 4 times 8."""
    engine = engine_of(
        tiny_model("all"),
        max_tokens=BLOCK,
        max_kv_gib=(2 * BLOCK + len(SYSTEM)) * TOKEN_BYTES / 2**30,
    )
    played(engine, dict.fromkeys("abcd", (9, 9)))
    assert engine.stats.decode_steps == 32
    assert engine.stats.forgotten == 0


def test_nothing_is_forgotten_for_a_request_that_has_to_wait_all_the_same():
    """Room for four blocks. The rows of a and c would have three each, whoever else is kept."""
    engine = engine_of(
        tiny_model(),
        max_tokens=3 * BLOCK + len(SYSTEM),
        max_kv_gib=(4 * BLOCK + len(SYSTEM)) * TOKEN_BYTES / 2**30,
    )
    small = {"shared_len": len(SYSTEM), "max_new_tokens": 3}
    engine.generate([request("idle", [*SYSTEM, 1], **small)])
    kept: list[bool] = []

    def watch(done):
        kept.append("idle" in engine._store.caches)
        engine.release(["a"] if len(kept) == 3 else [])
        return []

    long = [*SYSTEM, *([2] * (2 * BLOCK + 5))]
    engine.generate([request("a", [*SYSTEM, 3], **small), request("c", long, **small)], feed=watch)
    # Three passes of a, in which c waits; then c needs the room.
    assert kept == [True, True, True, False, False, False]
    assert engine.stats.forgotten == 1


@pytest.mark.parametrize("release", [True, False])
def test_the_memory_limit_holds_and_fed_requests_wait(release):
    """Room for two of seven: the others wait, or are forgotten between their turns."""
    model = tiny_model("all")
    limit = (2 * BLOCK + len(SYSTEM)) * TOKEN_BYTES
    free = played(engine_of(model, max_tokens=BLOCK), many())
    engine = engine_of(model, max_tokens=BLOCK, max_kv_gib=limit / 2**30)
    held, live = watch_decode(engine)
    stream = played(engine, many(), release=release)
    assert max(held) <= limit
    assert max(live) == 2
    # Rollouts that are kept go on before others begin: none of them makes room.
    assert (engine.stats.forgotten > 0) == (not release)
    for name, turns in free.turns.items():
        assert [t.ids for t in stream.turns[name]] == [t.ids for t in turns]
