"""The warm start when a stop is asked for: given up whole, or finished and kept."""

import pytest
import torch

from components.data.demonstrations import Demonstrations
from components.training.precision import MasterWeights
from components.training.stop import StopRequested, StopSignal
from components.training.warm_cache import cache_file, read_cache
from components.training.warm_start import warm_start
from tests.unit.policy.tiny import tiny_model
from tests.unit.training.test_supervised import ALONE, DEMONSTRATIONS, settings

KEY = {"settings": "of this test"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SINKFLEX_HOME", str(tmp_path))


@pytest.fixture
def warm():
    """Two steps of two rows each. ``run()`` gives the lines it says but for the first."""
    return Warm()


class Warm:
    def __init__(self):
        self.stop, self.model = StopSignal(), tiny_model()
        self.masters = MasterWeights(self.model)
        self.optimizer = torch.optim.SGD(self.masters.parameters(), lr=0.1)
        self.said = []

    def run(self):
        warm_start(
            self.model,
            self.masters,
            self.optimizer,
            demonstrate=lambda: Demonstrations(
                rollouts=tuple(DEMONSTRATIONS), dropped={}, num_cut=0
            ),
            settings=settings(num_steps=2, tokens_per_batch=16),
            key=KEY,
            world=ALONE,
            stop=self.stop,
            say=self.said.append,
        )


def ask(stop):
    """A hook that asks for a stop as the signal's handler does."""

    def hook(*_):
        stop.requested = True

    return hook


def test_a_stop_in_a_step_gives_it_up_and_nothing_is_kept(warm):
    warm.model.register_forward_pre_hook(ask(warm.stop))
    before = [p.detach().clone() for p in warm.model.parameters()]
    with pytest.raises(StopRequested):
        warm.run()
    assert [line for line in warm.said if "loss" in line] == []
    assert all(torch.equal(a, b) for a, b in zip(before, warm.model.parameters(), strict=True))
    assert read_cache(cache_file(KEY, num_ranks=1)) is None


def test_a_stop_between_steps_takes_no_further_one(warm):
    warm.optimizer.register_step_post_hook(ask(warm.stop))
    with pytest.raises(StopRequested):
        warm.run()
    (line,) = (line for line in warm.said if "loss" in line)
    assert line.startswith("warm start   1/2")
    assert read_cache(cache_file(KEY, num_ranks=1)) is None


def test_a_stop_after_the_last_step_keeps_the_result(warm):
    done = []

    def after_step(*_):
        done.append(1)
        warm.stop.requested = len(done) == 2

    warm.optimizer.register_step_post_hook(after_step)
    warm.run()
    found = read_cache(cache_file(KEY, num_ranks=1))
    assert isinstance(found, dict)
    for name, weight in warm.masters.named_parameters():
        assert torch.equal(found[name], weight), name
