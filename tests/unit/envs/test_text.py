"""The environment around a game of texts, with a game whose every move is known."""

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from components.envs.base import Message, Reward, Task, ToolCall
from components.envs.check import check_env
from components.envs.text import TextEnv


class Countdown:
    """Ends after as many turns as the task's id says; a turn's reward is its length."""

    def __init__(self) -> None:
        self.tasks = {n: Task(id=n, domain="countdown", split="train") for n in ("1", "3")}
        self.open, self.heard, self.first = 0, [], Message(role="system", content="Count.")

    def start(self, task_id):
        self.left, self.heard = int(task_id), []
        self.open += 1
        return [self.first, Message(role="user", content=f"{task_id} to go")]

    def say(self, text):
        self.left -= 1
        self.heard.append(text)
        over = self.left == 0
        return [Message(role="user", content="Over." if over else "Go on.")], len(text), over

    def close(self):
        self.open -= 1


def total(trajectory):
    value = float(sum(trajectory.official))
    return Reward(value=value, breakdown={"official": value, "strict": value})


@pytest.fixture
def env():
    env = TextEnv(game=Countdown(), checker=total)
    yield env
    env.close()
    assert env.game.open == 0  # every start was closed, and once only


@pytest.mark.parametrize("task_id", ["1", "3"])
def test_it_passes_our_check(env, task_id):
    check_env(env, task_id=task_id)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_passes_the_check_of_gymnasium(env):
    gymnasium_check(env, skip_render_check=True)


def test_an_episode(env):
    observation, info = env.reset(seed=0, options={"task_id": "3"})
    assert observation == '[{"role": "user", "content": "3 to go"}]'
    assert (info["system_prompt"], info["tools"], info["task"].id) == ("Count.", (), "3")
    assert env.step("ab")[1:4] == (0.0, False, False)
    assert env.step(Message(role="assistant", content="abc"))[1:4] == (0.0, False, False)
    observation, reward, terminated, truncated, info = env.step("a")
    assert (reward, terminated, truncated) == (6.0, True, False)
    assert observation == '[{"role": "user", "content": "Over."}]'
    trajectory = info["trajectory"]
    assert trajectory.official == (2.0, 3.0, 1.0)
    assert (trajectory.num_steps, trajectory.termination_reason) == (3, "game_over")
    said = [message.content for message in trajectory.messages]
    assert said == ["3 to go", "ab", "Go on.", "abc", "Go on.", "a", "Over."]


def test_a_refused_turn_is_not_heard(env):
    env.reset(options={"task_id": "1"})
    calls = (ToolCall(name="a", arguments={}, id="x"), ToolCall(name="b", arguments={}, id="y"))
    for turn in (" \n", Message(role="assistant", content="text too", tool_calls=calls)):
        *answer, info = env.step(turn)
        assert answer[1:] == [0.0, False, False]
        assert "there is no tool to call" in info["refused"]
    assert [message.tool_call_id for message in info["messages"]] == ["x", "y"]
    assert env.game.heard == []
    assert env.step("at last")[1] == 7.0


def test_the_seed_draws_a_task(env):
    drawn = [env.reset(seed=seed)[1]["task"].id for seed in range(20)]
    assert set(drawn) == {"1", "3"}
    assert drawn == [env.reset(seed=seed)[1]["task"].id for seed in range(20)]


def test_step_needs_an_episode(env):
    for _ in range(2):
        with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
            env.step("hello")
        env.reset(options={"task_id": "1"})
        env.step("hello")


def test_an_unknown_task_leaves_the_episode_alone(env):
    env.reset(options={"task_id": "1"})
    with pytest.raises(ValueError, match=r"task_id = '2': must be one of 2, e\.g\. '1'"):
        env.reset(options={"task_id": "2"})
    assert env.step("hello")[1] == 5.0


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_game_without_a_system_message_is_refused(env, role):
    env.game.first = Message(role=role, content="Hello." if role == "user" else "")
    with pytest.raises(ValueError, match="'1': its first message must be a text of the system"):
        env.reset(options={"task_id": "1"})
