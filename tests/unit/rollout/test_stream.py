"""Rollouts that do not wait for each other: workers and an engine that samples step by step."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from components.policy.engine import Feed, in_rounds
from components.policy.local import LocalEngine
from components.rollout import worker
from components.rollout.recorder import Recorder
from components.rollout.slot import Slot
from components.rollout.types import Rollout, SampleRequest, SampleResult
from components.rollout.workers import WorkerPool
from tests.unit.policy import tiny
from tests.unit.rollout.fakes import (
    FakeEngine,
    look_inside,
    make_env,
    make_renderer,
    serve_late,
    spec,
)
from tests.unit.rollout.test_workers import LIMITS, make_pool, pids, without_times


class StepEngine(FakeEngine):
    """Samples one token of each turn per step, and calls feed after every step.

    Args:
        lengths: tokens of each turn, by rollout.
        after_step: called with the number of each step before feed is.
    """

    def __init__(
        self,
        lengths: Mapping[str, Sequence[int]],
        *,
        after_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        super().__init__({name: ["Yes"] * len(turns) for name, turns in lengths.items()})
        self.lengths = {name: list(turns) for name, turns in lengths.items()}
        self.after_step = after_step
        self.num_steps = 0
        self.entered: list[tuple[int, list[str]]] = []
        """After how many steps which rollouts' requests came, in their order."""

    def generate(
        self, requests: Sequence[SampleRequest], *, feed: Feed | None = None
    ) -> list[SampleResult]:
        assert feed is not None
        left: dict[int, int] = {}
        results: dict[int, Any] = {}
        while requests or left:
            if requests:
                self.entered.append((self.num_steps, [r.rollout_id for r in requests]))
            turns = self.sample_all(requests) if requests else []
            for request, turn in zip(requests, turns, strict=True):
                number = len(results)
                results[number] = turn
                left[number] = self.lengths[request.rollout_id].pop(0)
            self.num_steps += 1
            left = {number: steps - 1 for number, steps in left.items()}
            ended = [number for number, steps in left.items() if steps == 0]
            for number in ended:
                del left[number]
            self.after_step(self.num_steps)
            requests = feed([(number, results[number]) for number in ended])
        return [results[number] for number in sorted(results)]


class PollEngine(StepEngine):
    """Likewise, but in real time, as an engine on a server."""

    clocked = False


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with make_pool() as pool:
        yield pool


LENGTHS = {"r0": (6, 2), "r1": (1, 4), "r2": (2,), "r3": (3, 1)}


def specs_of(lengths: Mapping[str, Sequence[int]]) -> list:
    return [spec(f"user_stop:{len(turns)}", rollout_id=name) for name, turns in lengths.items()]


def test_nobody_waits_for_the_slowest(pool):
    """Three workers, four rollouts. After step 1 r1 goes on; after step 2 r2 ends and r3 takes its
    worker; its turn ends after step 5, as r1's second, with which r1 ends; r0's first after 6."""
    engine, done = StepEngine(LENGTHS), []
    rollouts = pool.run(
        specs_of(LENGTHS), engine, on_done=lambda r: done.append((engine.num_steps, r.spec))
    )
    assert engine.entered == [
        (0, ["r0", "r1", "r2"]),
        (1, ["r1"]),
        (2, ["r3"]),
        (5, ["r3"]),
        (6, ["r0"]),
    ]
    assert engine.num_steps == 8  # in rounds 6 + 4 + 1, the longest turn of each
    assert [(step, s.rollout_id) for step, s in done] == [
        (2, "r2"),
        (5, "r1"),
        (6, "r3"),
        (8, "r0"),
    ]
    assert engine.released == ["r2", "r1", "r3", "r0"]
    assert [r.spec.rollout_id for r in rollouts] == list(LENGTHS)
    assert [len(r.turns) for r in rollouts] == [2, 2, 1, 2]


def test_a_reply_enters_when_it_is_due():
    """With a delay of 2: r1's turn ends with step 1, its next enters after 3. r2's ends with 2, its
    worker is free after 4, and r3's first enters after 6. r0's ends with 6, its next enters after
    8. r3's ends with 9 and is due after 11, but r0's ends with 10: nothing is sampled then, so the
    clock jumps to what is due first."""
    with make_pool(reply_delay=2) as pool:
        engine = StepEngine(LENGTHS)
        pool.run(specs_of(LENGTHS), engine)
    assert engine.entered == [
        (0, ["r0", "r1", "r2"]),
        (3, ["r1"]),
        (6, ["r3"]),
        (8, ["r0"]),
        (10, ["r3"]),
    ]
    assert engine.num_steps == 11
    assert engine.released == ["r2", "r1", "r0", "r3"]


@pytest.mark.parametrize("reply_delay", [0, 3])
def test_the_order_does_not_depend_on_who_is_quick(reply_delay):
    draw = [3, 1, 7, 2, 5, 1, 4, 9, 2, 6]
    lengths = {f"r{i}": [draw[(3 * i + t) % 10] for t in range(1 + i % 3)] for i in range(7)}
    found = []
    for delay in (0.0, 0.03, 0.03):
        done: list[Rollout] = []
        settings = {"make_env": make_env(max_delay_s=delay), "reply_delay": reply_delay}
        with make_pool(**settings) as pool:
            engine = StepEngine(lengths)
            rollouts = pool.run(specs_of(lengths), engine, on_done=done.append)
        found.append((engine.entered, engine.num_steps, without_times(done)))
        assert without_times(sorted(done, key=lambda r: r.spec.rollout_id)) == without_times(
            rollouts
        )
    assert found[0] == found[1] == found[2]


def test_a_stop_is_noticed_within_a_turn(pool):
    steps: list[int] = []

    def stop() -> None:
        steps.append(engine.num_steps)
        if engine.num_steps == 3:
            raise InterruptedError("asked to")

    engine = StepEngine({"r0": (50,), "r1": (50,)})
    with pytest.raises(InterruptedError):
        pool.run(specs_of(engine.lengths), engine, on_round=stop)
    assert steps == [0, 1, 2, 3]
    assert engine.released == ["r0", "r1"]
    engine = StepEngine({"r0": (1,)})
    assert [r.status for r in pool.run(specs_of({"r0": (1,)}), engine)] == ["completed"]


def test_a_worker_killed_in_the_middle_of_a_turn_loses_its_rollout_alone():
    lengths = {"r0": (4, 3), "r1": (2, 9), "r2": (3, 2)}
    with make_pool() as pool:

        def kill(step: int) -> None:
            if step == 5:  # r1 is in its second turn
                os.kill(pids(pool)[1], signal.SIGKILL)

        engine = StepEngine(lengths, after_step=kill)
        rollouts = pool.run(specs_of(lengths), engine)
    assert [r.status for r in rollouts] == ["completed", "error_infra", "completed"]
    assert "exit code -9" in rollouts[1].error
    # The others go on; that it was lost is seen when its turn has ended.
    assert engine.entered == [(0, ["r0", "r1", "r2"]), (2, ["r1"]), (3, ["r2"]), (4, ["r0"])]
    assert engine.num_steps == 11


@pytest.mark.parametrize("other", ["starts", "ready", "dead"])
def test_without_a_clock_a_slow_environment_holds_up_nobody(tmp_path, other):
    """r0's environment answers its first turn when r1 has ended, whose worker may have to start."""
    orders = [spec("wait:1", rollout_id="r0"), spec("user_stop:3", rollout_id="r1")]
    engine, done, gate = PollEngine({"r0": (1,), "r1": (20, 20, 20)}), [], tmp_path / "gate"

    def end(rollout: Rollout) -> None:
        done.append(rollout.spec.rollout_id)
        gate.touch()

    with make_pool(make_env=make_env(gate=gate), num_workers=2) as pool:
        if other == "starts":  # long after r0 waits
            pool._slots[1].kill()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(worker, "serve", serve_late)
                pool._slots[1].start()
        else:
            pool.run_local(look_inside, ["pid"] * 2)
        if other == "dead":
            os.kill(pids(pool)[1], signal.SIGKILL)
            pool._slots[1]._process.join()
        rollouts = pool.run(orders, engine, on_done=end)
    assert done == ["r1", "r0"]
    assert [r.status for r in rollouts] == ["completed", "completed"]


def test_a_late_reply_is_noticed_before_it_is_due():
    """r0's environment hangs; its answer is due after 61 steps, and its time is over after five."""
    orders = [spec("hang:1", rollout_id="r0"), spec("user_stop:1", rollout_id="r1")]
    gone: list[int] = []
    with make_pool(reply_delay=60) as pool:
        first: list[int] = []

        def watch(step: int) -> None:
            if step == 5:
                pool._slots[0]._deadline = 0.0
            first.append(pids(pool)[0])
            if first[-1] != first[0]:
                gone.append(step)

        engine = StepEngine({"r0": (1,), "r1": (80,)}, after_step=watch)
        rollouts = pool.run(orders, engine)
    assert [r.status for r in rollouts] == ["error_deadline", "completed"]
    assert gone[0] == 6  # its successor was started then, long before it was due


@pytest.mark.parametrize("kind", [StepEngine, PollEngine])
def test_a_stop_is_noticed_while_an_environment_is_waited_for(kind):
    begin, stops = time.monotonic(), []

    def stop() -> None:
        stops.append(time.monotonic())
        if stops[-1] - begin > 2:
            raise InterruptedError("asked to")

    with make_pool(env_timeout_s=60.0) as pool, pytest.raises(InterruptedError):
        pool.run([spec("hang:1", rollout_id="r0")], kind({"r0": (1,)}), on_round=stop)
    assert time.monotonic() - begin < 30


def test_without_a_clock_nobody_waits_for_a_worker_to_be_replaced():
    """r1's worker dies; r0 goes on while the next one starts."""
    lengths = {"r0": (150,), "r1": (1,), "r2": (1,)}
    orders = [
        spec("user_stop:1", rollout_id="r0"),
        spec("die:1", rollout_id="r1"),
        spec("user_stop:1", rollout_id="r2"),
    ]
    with make_pool(num_workers=2) as pool:
        done: list[str] = []
        blocked: list[bool] = []
        waits = Slot._make_ready

        def make_ready(slot: Slot) -> None:
            blocked.append(not slot.is_ready() and "r0" not in done)
            waits(slot)

        engine = PollEngine(lengths, after_step=lambda step: time.sleep(0.01))
        with pytest.MonkeyPatch.context() as patch:
            pool.run(specs_of({"r9": (1,)}), PollEngine({"r9": (1,)}))  # all are ready now
            patch.setattr(Slot, "_make_ready", make_ready)
            rollouts = pool.run(orders, engine, on_done=lambda r: done.append(r.spec.rollout_id))
    assert [r.status for r in rollouts] == ["completed", "error_infra", "completed"]
    assert blocked == [False, False, False]


def test_an_engine_has_to_call_feed():
    class Deaf(FakeEngine):
        def generate(self, requests, *, feed=None):
            return self.sample_all(requests)

    with (
        make_pool() as pool,
        pytest.raises(TypeError, match=r"Deaf\.generate returned before feed"),
    ):
        pool.run(specs_of({"r0": (1,)}), Deaf({"r0": ["Yes"]}))


def test_time_in_which_nobody_looked_is_not_the_workers(monkeypatch):
    """This process is stopped between a request and the look at its answer: no deadline passes."""
    slot = Slot(None, b"", preload=(), start_timeout_s=1.0)  # type: ignore[arg-type]
    read, write = os.pipe()
    try:
        slot._connection = Connection(read, writable=False)
        now = time.monotonic()
        slot._looked, slot._deadline, slot.idle = now - 100.0, now - 90.0, False  # 10 s were given
        Slot.gather([slot], patient=False)
        assert not slot.answered
        assert slot._deadline == pytest.approx(now + 10.0, abs=1.0)
        slot._deadline = slot._looked - 0.1
        monkeypatch.setattr(slot, "start", lambda: None)
        Slot.gather([slot], patient=False)  # looked at a moment ago: this one is late
        assert slot.answered
    finally:
        os.close(write)


class CutEngine:
    """A local engine whose turns have lengths that follow from their seeds."""

    def __init__(self, engine: LocalEngine, *, rounds: bool) -> None:
        self.engine, self.rounds = engine, rounds
        self.policy_version = engine.policy_version
        self.release, self.sync = engine.release, engine.sync

    def cut(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        return [dataclasses.replace(r, max_new_tokens=1 + r.seed % 23) for r in requests]

    def generate(
        self, requests: Sequence[SampleRequest], *, feed: Feed | None = None
    ) -> list[SampleResult]:
        assert feed is not None
        if self.rounds:
            return in_rounds(lambda some: self.engine.generate(self.cut(some)), requests, feed)  # type: ignore[return-value]
        return self.engine.generate(self.cut(requests), feed=lambda done: self.cut(feed(done)))


def without_logprobs(path):
    """The records of a file, and their log-probabilities, which are taken out of them."""
    records, logprobs = [json.loads(line) for line in path.read_text().splitlines()], []
    for record in records:
        for turn in record["turns"]:
            logprobs += turn.pop("logprobs")
    return records, logprobs


def test_what_is_recorded_equals_that_of_rounds(tmp_path, monkeypatch):
    """All but the last digits of log-probabilities: on some CPUs a product rounds by its rows."""
    monkeypatch.setattr(tiny, "VOCAB", 512)
    model = tiny.tiny_model("all")
    limits = dataclasses.replace(LIMITS, max_turns=4, max_refused=4, max_tokens=1200)
    specs = [spec("max_steps:3", member=i) for i in range(6)]
    steps, found = [], []
    for rounds, reply_delay in ((True, 0), (False, 0), (False, 3)):
        engine = LocalEngine(model, max_tokens=1200, max_batch_size=3)
        with make_pool(limits=limits, reply_delay=reply_delay) as pool:
            rollouts = pool.run(specs, CutEngine(engine, rounds=rounds))
        path = tmp_path / f"{rounds}{reply_delay}.jsonl"
        with Recorder(path, full_tokens=True, decode=make_renderer().decode) as recorder:
            recorder.write(0, without_times(rollouts))
        steps.append(engine.stats.decode_steps)
        found.append(without_logprobs(path))
    (records, logprobs), *others = found
    assert len(records) == 6
    assert logprobs
    for other_records, other_logprobs in others:
        assert other_records == records
        assert other_logprobs == pytest.approx(logprobs, abs=1e-5)
    assert steps[1] < 0.8 * steps[0]


def test_reply_delay_is_checked():
    with pytest.raises(ValueError, match="reply_delay=-1: must be 0 or more"):
        make_pool(reply_delay=-1)
