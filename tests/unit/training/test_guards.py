"""Each guard on both sides of its limit, each of its actions, and its memory."""

import json
import math

import pytest

from components.training.guards import (
    EntropyCollapse,
    FlatReward,
    GradSpike,
    Guards,
    GuardStop,
    MismatchLimit,
    guards_from,
)

GOOD = {"loss/total": 0.1, "train/grad_norm": 1.0, "policy/entropy": 0.5, "mismatch/kl": 1e-4}


def guards(**settings):
    lines = []
    return Guards(say=lines.append, **settings), lines


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss/total", "train/grad_norm"])
def test_not_finite(name, value):
    stopping, _ = guards()
    assert stopping.allow(GOOD)
    with pytest.raises(GuardStop, match=name):
        stopping.allow(GOOD | {name: value})
    skipping, lines = guards(non_finite="skip")
    assert not skipping.allow(GOOD | {name: value})
    assert name in lines[0]
    assert "skip" in lines[0]
    assert skipping.allow(GOOD)


def test_a_spike_is_measured_against_the_median_of_a_full_window():
    guard, lines = guards(grad_spike=GradSpike(factor=3.0, window=3, action="skip"))
    for norm in (1.0, 100.0, 2.0):  # no window yet: nothing is a spike
        assert guard.allow(GOOD | {"train/grad_norm": norm})
    assert guard.allow(GOOD | {"train/grad_norm": 6.0})  # 3 x the median of 1, 100, 2
    # Now 100, 2, 6: the median is 6.
    assert guard.allow(GOOD | {"train/grad_norm": 18.0})
    assert not guard.allow(GOOD | {"train/grad_norm": 18.1})  # of 2, 6, 18
    assert not guard.allow(GOOD | {"train/grad_norm": 18.1})  # the skipped one is not remembered
    assert len(lines) == 2


@pytest.mark.parametrize("action", ["stop", "skip", "warn"])
@pytest.mark.parametrize(
    ("setting", "good", "bad"),
    [
        (
            {"entropy_collapse": lambda a: EntropyCollapse(below=0.01, action=a)},
            {"policy/entropy": 0.01},
            {"policy/entropy": 0.0099},
        ),
        (
            {"mismatch": lambda a: MismatchLimit(above=0.05, action=a)},
            {"mismatch/kl": 0.05},
            {"mismatch/kl": 0.051},
        ),
    ],
)
def test_limits_and_actions(setting, good, bad, action):
    guard, lines = guards(**{name: make(action) for name, make in setting.items()})
    assert guard.allow(GOOD | good)
    assert lines == []
    if action == "stop":
        with pytest.raises(GuardStop, match=next(iter(bad))):
            guard.allow(GOOD | bad)
    else:
        assert guard.allow(GOOD | bad) == (action == "warn")
    assert len(lines) == 1
    assert action in lines[0]


def test_too_many_skips_in_a_row_stop_the_run():
    guard, _ = guards(non_finite="skip", max_skips=2)
    bad = GOOD | {"loss/total": math.nan}
    for _ in range(3):  # a good one between them sets the count back
        assert not guard.allow(bad)
        assert not guard.allow(bad)
        assert guard.allow(GOOD)
    assert not guard.allow(bad)
    assert not guard.allow(bad)
    with pytest.raises(GuardStop, match="max_skips = 2"):
        guard.allow(bad)


def test_flat_reward():
    guard, lines = guards(flat_reward=FlatReward(steps=3, action="warn"))
    for reward in (0.0, 0.0, 0.1, 0.1):
        guard.after_step({"reward/mean": reward})
    assert lines == []
    guard.after_step({"reward/mean": 0.1})
    assert len(lines) == 1
    guard.after_step({"reward/mean": 0.1})
    assert len(lines) == 1  # once per stretch
    stopping, _ = guards(flat_reward=FlatReward(steps=2, action="stop", tolerance=0.05))
    stopping.after_step({"reward/mean": 0.5})
    with pytest.raises(GuardStop, match="2 steps"):
        stopping.after_step({"reward/mean": 0.54})


def test_a_restored_guard_decides_alike():
    settings = {
        "grad_spike": GradSpike(factor=2.0, window=2, action="skip"),
        "flat_reward": FlatReward(steps=3, action="stop"),
        "non_finite": "skip",
        "max_skips": 1,
    }
    first, _ = guards(**settings)
    for norm in (1.0, 1.5):
        first.allow(GOOD | {"train/grad_norm": norm})
        first.after_step({"reward/mean": 0.2})
    assert not first.allow(GOOD | {"train/grad_norm": 9.0})
    second, _ = guards(**settings)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for guard in (first, second):
        with pytest.raises(GuardStop, match="max_skips"):
            guard.allow(GOOD | {"train/grad_norm": 9.0})
        with pytest.raises(GuardStop, match="3 steps"):
            guard.after_step({"reward/mean": 0.2})


def test_from_a_config():
    section = {
        "non_finite": "skip",
        "grad_spike": None,
        "entropy_collapse": {"below": 0.1, "action": "stop"},
        "mismatch": None,
        "flat_reward": None,
        "max_skips": 3,
    }
    guard = guards_from(section, say=lambda _: None)
    with pytest.raises(GuardStop, match=r"below 0\.1"):
        guard.allow(GOOD | {"policy/entropy": 0.05})
