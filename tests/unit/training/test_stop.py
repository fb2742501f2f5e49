"""Ctrl-C and SIGTERM become a flag."""

import os
import signal

import pytest

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
