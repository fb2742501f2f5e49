"""Ctrl-C and SIGTERM become a flag."""

import os
import signal

import pytest
import torch

from components.training.parallelize import World
from components.training.stop import StopRequested, StopSignal


@pytest.fixture
def stop():
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    stop = StopSignal()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def test_nothing_happens_without_a_signal(stop):
    stop.check()
    assert not stop.requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noticed_at_the_next_safe_point(stop, number):
    os.kill(os.getpid(), number)
    assert stop.requested
    with pytest.raises(StopRequested):
        stop.check()


def test_a_second_ctrl_c_interrupts_at_once(stop):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_does_not(stop):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested


ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class TwoRanks(World):
    """One of two ranks; the other was asked to stop."""

    def max(self, values):
        return [1.0 for _ in values]


TWO = TwoRanks(rank=0, size=2, device=torch.device("cpu"))


def test_all_ranks_leave_when_another_was_asked(stop):
    stop.check_together(ALONE)
    with pytest.raises(StopRequested):
        stop.check_together(TWO)


def test_work_apart_is_finished_before_all_leave(stop):
    done = []

    def work():
        with stop.apart(TWO) as check:
            check()  # this rank was not asked: its own work goes on
            done.append("work")

    with pytest.raises(StopRequested):
        work()
    assert done == ["work"]


def test_work_apart_ends_early_where_the_signal_came(stop):
    done = []

    def work():
        with stop.apart(ALONE) as check:
            os.kill(os.getpid(), signal.SIGINT)
            check()
            done.append("work")

    with pytest.raises(StopRequested):
        work()
    assert done == []


def test_work_apart_without_a_signal(stop):
    with stop.apart(ALONE) as check:
        check()


def test_other_errors_leave_work_apart_as_they_are(stop):
    with pytest.raises(KeyError), stop.apart(TWO):
        raise KeyError("x")
