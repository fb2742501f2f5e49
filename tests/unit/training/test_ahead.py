"""Batches ahead of training: how old they may be, what a resume draws, what ends the thread.

The engine is a double that has only a version: whoever plays stamps its tokens with it.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from components.data.dataset import task_loader
from components.envs.base import Task
from components.rollout.specs import group_specs
from components.rollout.stats import staleness_metrics
from components.rollout.types import Ledger, Rollout
from components.training.ahead import Batches, BatchSettings
from components.training.metrics import Timer
from components.training.parallelize import World
from components.training.stop import StopRequested, StopSignal

STEPS = 6
WAIT_S = 10.0


class Tasks(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return Task(id=str(index), domain="d", split="train")


class Run:
    """A trainer without a model: a step takes a batch and raises the version."""

    def __init__(self, *, k, play_s=0.0, world=None, resume=None, gate=None, max_refills=0):
        self.engine = SimpleNamespace(version=0, busy=False, synced=[], threads=set())
        self.play_s, self.gate, self.drawn, self.fail = play_s, gate, {}, {}
        self.stop = StopSignal()
        loader = task_loader(Tasks(), tasks_per_step=1, seed=3)
        self.step = 0
        if resume is not None:
            self.step, state = resume
            loader.load_state_dict(state)
            self.engine.version = self.step
        self.batches = Batches(
            loader,
            play=self.play,
            sync=self.sync,
            settings=BatchSettings(
                num_groups=2,
                group_size=2,
                temperature=1.0,
                max_refills=max_refills,
                max_staleness=k,
                num_steps=STEPS,
            ),
            step=self.step,
            stop=self.stop,
            world=world or World.alone(),
        )

    def play(self, tasks, first_group, *, group_size, phase, temperature, apart):
        assert not self.engine.busy, "two batches at once"
        self.engine.busy = True
        self.engine.threads.add(threading.current_thread() is threading.main_thread())
        version, number = self.engine.version, int(phase.removeprefix("train/"))
        try:
            with (apart or self.stop_apart)() as check:
                deadline = time.monotonic() + self.play_s
                while time.monotonic() < deadline or (self.gate and not self.gate.is_set()):
                    check()
                    time.sleep(0.005)
            if number in self.fail:
                raise self.fail[number]
        finally:
            self.engine.busy = False
        self.drawn[number] = [task.id for task in tasks]
        rollouts = []
        for spec in group_specs(
            [(t.domain, t.id) for t in tasks], group_size=group_size, seed=0, phase=phase
        ):
            ledger = Ledger()
            ledger.append_rendered([1], [1])
            ledger.append_sampled([3, 4], [-0.5, -0.5], policy_version=version)
            rollouts.append(
                Rollout(spec=spec, tokens=ledger.freeze(), status="completed", reward=1.0)
            )
        return rollouts

    def stop_apart(self):
        return self.stop.apart(World.alone())

    def sync(self):
        assert not self.engine.busy, "weights changed under a batch"
        self.engine.version = self.step
        self.engine.synced.append(self.step)
        return {"sync/step": float(self.step)}

    def train(self, train_s=0.0, until=STEPS):
        """Staleness of each step's tokens, and the tasks that each trained."""
        found = []
        while self.step < until:
            timer = Timer()
            batch = self.batches.take(timer)
            assert self.batches.versions == (batch.policy_version, self.step)
            time.sleep(train_s)
            self.step += 1
            self.batches.finish(self.step, timer)
            staleness = staleness_metrics(batch.rollouts, version=self.step - 1)
            tasks = [r.spec.task_id for r in batch.rollouts[::2]]
            found.append((staleness["rollout/staleness_mean"], tasks))
        return found


@pytest.fixture
def make():
    runs = []

    def start(**settings):
        runs.append(Run(**settings))
        return runs[-1]

    yield start
    for run in runs:
        if run.gate:
            run.gate.set()
        run.batches.close()


ORDER = [tasks for _, tasks in Run(k=0).train()]
"""Of the tasks, as they are drawn without staleness."""


def test_without_staleness_everything_is_played_here_by_the_current_weights(make):
    run = make(k=0)
    found = run.train()
    assert [staleness for staleness, _ in found] == [0.0] * STEPS
    assert [tasks for _, tasks in found] == ORDER
    assert run.engine.threads == {True}  # no thread
    assert run.engine.synced == [1, 2, 3, 4, 5, 6]
    assert len({task for step in ORDER for task in step}) == 2 * STEPS  # none twice


@pytest.mark.parametrize(("play_s", "train_s"), [(0.0, 0.03), (0.03, 0.0), (0.01, 0.01)])
def test_one_step_ahead_is_one_step_old_whoever_is_quick(make, play_s, train_s):
    run = make(k=1, play_s=play_s)
    found = run.train(train_s)
    assert [staleness for staleness, _ in found] == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert [tasks for _, tasks in found] == ORDER
    assert run.engine.threads == {False}
    assert sorted(run.drawn) == [1, 2, 3, 4, 5, 6]  # nothing is played beyond the last step


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(("play_s", "train_s"), [(0.0, 0.02), (0.02, 0.0), (0.01, 0.01)])
def test_the_bound_holds_and_the_order_is_kept(make, k, play_s, train_s):
    found = make(k=k, play_s=play_s).train(train_s)
    assert all(staleness <= k for staleness, _ in found)
    assert [tasks for _, tasks in found] == ORDER


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_slow_trainer_lets_it_run_ahead_to_the_bound_and_no_further(make, k):
    run = make(k=k)
    run.batches.take(Timer())
    allowed = list(range(1, k + 2))  # the next one would be k + 1 steps old
    deadline = time.monotonic() + WAIT_S
    while sorted(run.drawn) != allowed and time.monotonic() < deadline:
        time.sleep(0.01)  # the trainer is at work: nothing is asked of Batches
    time.sleep(0.1)
    assert sorted(run.drawn) == allowed


@pytest.mark.parametrize("k", [1, 2])
def test_a_settled_engine_has_the_current_weights_and_stays_still(make, k):
    run = make(k=k, play_s=0.02)
    for step in (1, 2, 3):
        run.train(until=step)
        run.batches.settle()
        assert run.engine.version == step
        drawn = dict(run.drawn)
        time.sleep(0.05)
        assert run.drawn == drawn
        assert not run.engine.busy
    assert [tasks for _, tasks in run.train()] == ORDER[3:]


def test_a_resumed_run_draws_what_was_in_flight_again(make):
    first = make(k=1, play_s=0.01)
    trained = first.train(until=3)
    deadline = time.monotonic() + WAIT_S
    first.batches.settle()  # the fourth batch is played, and never trained
    while 4 not in first.drawn and time.monotonic() < deadline:
        time.sleep(0.01)
    state = first.batches.loader_state
    first.batches.close()
    second = make(k=1, resume=(3, state))
    rest = second.train()
    assert [tasks for _, tasks in trained + rest] == ORDER  # nothing lost, nothing twice
    assert [staleness for staleness, _ in rest] == [0.0, 1.0, 1.0]
    assert sorted(second.drawn) == [4, 5, 6]


@pytest.mark.parametrize("number", [1, 3])
def test_an_error_of_the_thread_is_raised_where_its_batch_is_waited_for(make, number):
    run = make(k=1)
    run.fail[number] = FloatingPointError("logits are not finite for rollout x")
    with pytest.raises(FloatingPointError, match="rollout x"):
        run.train()
    assert run.step == number - 1  # what had been sampled before it was trained


def test_ctrl_c_ends_the_wait_and_the_thread(make):
    run = make(k=1, gate=threading.Event())
    threading.Timer(0.1, lambda: setattr(run.stop, "requested", True)).start()
    begin = time.monotonic()
    with pytest.raises(StopRequested):
        run.train()
    run.batches.close()
    assert time.monotonic() - begin < WAIT_S
    assert run.step == 0
    assert all(thread.name != "rollouts" for thread in threading.enumerate())


def test_closing_ends_a_batch_in_flight_and_brings_the_engine_up_to_date(make):
    gate = threading.Event()
    gate.set()
    run = make(k=2, gate=gate)
    run.train(until=1)
    gate.clear()  # whatever is played from here on would never end
    run.stop.requested = True
    run.batches.close()
    run.batches.settle()  # as before the last checkpoint: no StopRequested, and no wait
    assert run.engine.version == 1


def test_the_wait_and_the_sync_are_timed_apart(make):
    run = make(k=1, play_s=0.05)
    timer = Timer()
    run.batches.take(timer)
    assert timer.seconds["rollout"] >= 0.05
    assert "sync" not in timer.seconds
    run.step = 1
    assert run.batches.finish(1, timer) == {}
    timer = Timer()
    run.batches.take(timer)
    assert run.engine.synced == [1]
    assert "sync" in timer.seconds
    run.step = 2
    assert run.batches.finish(2, timer) == {"sync/step": 1.0}


class TwoRanks(World):
    """One of two ranks. The thread may not ask the other one anything."""

    def max(self, values):
        assert threading.current_thread() is threading.main_thread()
        return list(values)

    def sum(self, values):
        raise AssertionError("no sums are needed")


@pytest.mark.parametrize("k", [1, 2])
def test_the_thread_makes_no_collectives(make, k):
    two = TwoRanks(rank=0, size=2, device=torch.device("cpu"))
    found = make(k=k, play_s=0.01, world=two).train()
    assert [tasks for _, tasks in found] == ORDER


def test_refills_with_several_ranks_are_refused(make):
    two = TwoRanks(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"dynamic_sampling.max_refills = 2: with 2 ranks"):
        make(k=1, world=two, max_refills=2)
    make(k=0, world=two, max_refills=2)
    make(k=1, max_refills=2)
