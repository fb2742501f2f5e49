import pytest

from components.envs.base import Message, Reward
from components.envs.check import check_env
from components.envs.tau2 import Tau2Env
from tests.parity.tau2_scripts import TextUser


class Broken:
    """The mock environment with one promise broken."""

    def __init__(self, fault):
        self.env = Tau2Env(domain="mock", user=lambda task: TextUser(4))
        self.fault = fault
        self.num_resets = 0

    def reset(self, *, seed=None, options=None):
        self.num_resets += 1
        if self.fault == "unknown task" and (options or {})["task_id"] == "no such task":
            options = {"task_id": "create_task_1"}
        observation, info = self.env.reset(seed=seed, options=options)
        if self.fault == "seed" and self.num_resets == 2:
            observation = observation.replace("help", "serve")
        if self.fault == "tools":
            info["tools"] = [t.name for t in info["tools"]]
        if self.fault == "prompt":
            del info["system_prompt"]
        return observation, info

    def step(self, action):
        if self.fault == "refusal" and action == "":
            action = "Hm."
        observation, reward, terminated, truncated, info = self.env.step(action)
        ended = terminated or truncated
        if self.fault == "observation" and not info["refused"]:
            observation = "[]"
        if self.fault == "early reward" and not ended:
            reward = 0.5
        if self.fault == "int reward":
            reward = int(reward)
        if ended and self.fault == "reward object":
            info["reward"] = reward
        if ended and self.fault == "no strict":
            info["reward"] = Reward(value=reward, breakdown={"official": 0.0})
        return observation, reward, terminated, truncated, info

    def close(self):
        self.env.close()


def test_our_environment_passes():
    env = Tau2Env(domain="mock", user=lambda task: TextUser(4))
    check_env(env, task_id="create_task_1", turns=("Hm.", Message(role="assistant", content="So?")))


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("seed", "same first observation"),
        ("tools", "a tuple of ToolSpec"),
        ("prompt", "system_prompt"),
        ("unknown task", "ValueError for an unknown task_id"),
        ("refusal", "info\\['refused'\\]"),
        ("observation", "the JSON of info"),
        ("early reward", "reward 0 before the end, found 0.5"),
        ("int reward", "a float reward"),
        ("reward object", "a Reward"),
        ("no strict", "'strict'"),
    ],
)
def test_broken_promises_are_found(fault, expected):
    with pytest.raises(ValueError, match=expected):
        check_env(Broken(fault), task_id="create_task_1")
