"""Rewards that violations take away, and sums of rewards."""

import pickle

import pytest

from components.envs import rewards
from components.envs.base import Reward, Task, Trajectory
from components.envs.rewards import OfficialReward, PartialCredit, StrictReward
from components.envs.tau2 import Tau2Env
from components.envs.weighted import Part, WeightedSum
from components.safety.gate import SafetyGated
from tests.unit.envs.test_rewards import gold_calls, play
from tests.unit.safety.talk import LOGIN, ME, PENDING, calls, read, talk


class Fixed:
    """The same reward for everything."""

    def __init__(self, value):
        self.value = value

    def __call__(self, trajectory):
        return Reward(value=self.value, breakdown={"official": self.value, "strict": 0.0, "own": 7})


def trajectory(*parts, domain="retail"):
    return Trajectory(
        task=Task(id="0", domain=domain, split="train"),
        messages=talk(*parts, domain=domain).messages,
        termination_reason="user_stop",
        num_steps=1,
        num_tool_errors=0,
    )


SAFE = trajectory(LOGIN, read(PENDING))
UNSAFE = trajectory(calls(("get_user_details", {"user_id": ME}), text="Sure."))  # S1 and S7


def test_a_safe_run_keeps_its_reward():
    reward = SafetyGated(checker=Fixed(0.75))(SAFE)
    assert reward.value == reward.breakdown["ungated"] == 0.75
    assert reward.breakdown["safe"] == 1.0
    assert reward.breakdown["own"] == 7
    names = [name for name in reward.breakdown if name.startswith("safe_")]
    assert names == ["safe_S1", "safe_S2", "safe_S3", "safe_S4", "safe_S7"]


def test_a_violation_makes_it_zero():
    reward = SafetyGated(checker=Fixed(0.75))(UNSAFE)
    assert reward.value == reward.breakdown["safe"] == 0.0
    kept = {name: reward.breakdown[f"safe_{name}"] for name in ("S1", "S2", "S7")}
    assert kept == {"S1": 0.0, "S2": 1.0, "S7": 0.0}
    assert reward.breakdown["ungated"] == reward.breakdown["official"] == 0.75


def test_a_penalty_counts_each_check_once_and_stops_at_zero():
    gate = {"on_violation": "penalty", "penalty": 0.25}
    assert SafetyGated(checker=Fixed(0.75), **gate)(UNSAFE).value == 0.25
    twice = trajectory(calls(("get_user_details", {}), text="a"), calls(("x", {}), text="b"))
    assert SafetyGated(checker=Fixed(0.75), checks=["S7"], **gate)(twice).value == 0.5
    assert SafetyGated(checker=Fixed(0.25), **gate)(UNSAFE).value == 0.0
    assert SafetyGated(checker=Fixed(-0.5), **gate)(UNSAFE).value == -0.5  # never a gain
    assert SafetyGated(checker=Fixed(-0.5))(UNSAFE).value == -0.5


def test_only_the_checks_that_are_named():
    assert SafetyGated(checker=Fixed(1.0), checks=["S2", "S4"])(UNSAFE).value == 1.0
    assert SafetyGated(checker=Fixed(1.0), checks=["S7"])(UNSAFE).value == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checks": ["S5"]}, r"checks: 'S5' is not a check of a safety gate \(allowed: S1, S2"),
        ({"checks": []}, "name at least one of S1"),
        ({"on_violation": "nothing"}, "on_violation: 'nothing' is neither 'zero' nor 'penalty'"),
        ({"penalty": 0}, "penalty: 0 must be above 0"),
        ({"checker": 3}, "checker: 3 is not a callable"),
    ],
)
def test_settings_of_a_gate(settings, message):
    with pytest.raises(ValueError, match=message):
        SafetyGated(**settings)


def test_a_domain_without_the_check_is_refused_when_the_environment_is_made():
    with pytest.raises(ValueError, match="'S1' is not a check of domain 'mock'"):
        Tau2Env(domain="mock", checker=SafetyGated())
    Tau2Env(domain="mock", checker=SafetyGated(checks=("S7",)))
    part = {"only": Part(weight=1.0, checker=SafetyGated())}
    with pytest.raises(ValueError, match="'S1' is not a check of domain 'mock'"):
        Tau2Env(domain="mock", checker=WeightedSum(parts=part))


def test_a_gate_on_a_real_episode():
    """Gold calls of the mock domain solve the task; with text beside them they are unsafe."""
    task_id = "create_task_1"
    done = play("mock", task_id, gold_calls("mock", task_id))
    assert SafetyGated(checks=("S7",))(done).value == 1.0
    env = Tau2Env(domain="mock", checker=SafetyGated(checks=("S7",)))
    env.reset(options={"task_id": task_id}, seed=0)
    turn = calls(*gold_calls("mock", task_id), text="Doing it.")[0]
    info = env.step(turn)[4]
    while "reward" not in info:
        info = env.step("It is created. Is there anything else?")[4]
    assert (info["reward"].value, info["reward"].breakdown["ungated"]) == (0.0, 1.0)


# ---------------------------------------------------------------- weighted sums


def test_a_weighted_sum():
    parts = {
        "half": Part(checker=Fixed(0.5), weight=2.0),
        "one": Part(checker=Fixed(1.0), weight=-0.25),
        "gate": Part(checker=SafetyGated(checker=Fixed(1.0), checks=["S7"]), weight=1.0),
    }
    reward = WeightedSum(parts=parts)(UNSAFE)
    assert reward.value == pytest.approx(2 * 0.5 - 0.25 * 1.0 + 0.0)
    assert reward.breakdown == {
        "half": 0.5,
        "one": 1.0,
        "gate": 0.0,
        "official": 0.5,  # what every checker computes alike is kept once
        "strict": 0.0,
        "half_own": 7,
        "one_own": 7,
        "gate_own": 7,
        "gate_ungated": 1.0,
        "gate_safe": 0.0,
        "gate_safe_S7": 0.0,
    }


def test_the_benchmark_is_asked_once(monkeypatch):
    done = play("mock", "create_task_1", gold_calls("mock", "create_task_1"))
    expected = (StrictReward()(done).value, PartialCredit()(done).value)
    asked = []
    official = rewards._official
    monkeypatch.setattr(rewards, "_official", lambda t: asked.append(t) or official(t))
    parts = {
        "solved": Part(checker=StrictReward(), weight=0.5),
        "graded": Part(checker=PartialCredit(), weight=0.5),
    }
    reward = WeightedSum(parts=parts)(done)
    assert reward.value == pytest.approx(sum(expected) / 2)
    assert len(asked) == 1
    OfficialReward()(done)
    assert len(asked) == 2  # and again outside of a sum: nothing is remembered


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "needs at least one part"),
        ({"a": OfficialReward()}, r"parts.a: .* is not a Part"),
        ({"official": Part(checker=OfficialReward(), weight=1)}, "the name 'official' must be"),
        ({"a b": Part(checker=OfficialReward(), weight=1)}, "the name 'a b' must be a word"),
    ],
)
def test_parts_are_checked(parts, message):
    with pytest.raises(ValueError, match=message):
        WeightedSum(parts=parts)


def test_weights_are_checked():
    for weight in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a finite number other than 0"):
            Part(checker=OfficialReward(), weight=weight)
    with pytest.raises(ValueError, match="is not a callable"):
        Part(checker="official", weight=1)


def test_they_are_made_of_a_config_and_sent_to_workers():
    from components.training.component import build, check_component

    gate = {
        "_component_": "components.safety.gate.SafetyGated",
        "checks": ["S2", "S7"],
        "on_violation": "penalty",
        "penalty": 0.5,
        "checker": {"_component_": "components.envs.rewards.PartialCredit"},
    }
    node = {
        "_component_": "components.envs.weighted.WeightedSum",
        "parts": {
            "gated": {
                "_component_": "components.envs.weighted.Part", "weight": 0.5, "checker": gate,
            }
        },
    }  # fmt: skip
    assert check_component(node, "checker") == []
    made = build(node)
    assert made.parts["gated"].checker == SafetyGated(
        checks=("S2", "S7"), on_violation="penalty", penalty=0.5, checker=PartialCredit()
    )
    assert pickle.loads(pickle.dumps(made)) == made
    wrong = {**gate, "on_violation": "shrug"}
    assert "checker.on_violation = 'shrug': must be one of zero, penalty" in check_component(
        wrong, "checker"
    )
