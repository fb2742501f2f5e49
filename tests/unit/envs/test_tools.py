"""The environment around tools of one's own: a small bank whose every move is known."""

import datetime
import enum
import json
import random
import warnings
from dataclasses import replace
from typing import Literal

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from components.envs.base import Message, Reward, Task, ToolCall, UserError
from components.envs.check import check_env
from components.envs.tool_functions import ToolFunctions
from components.envs.tool_game import EndState, FinalState, GameTasks
from components.envs.tools import ToolEnv
from components.rollout.agent_loop import Limits, run_episode
from components.rollout.recorder import Recorder, read_rollouts
from components.rollout.replay import ReplayError, rescored
from tests.unit.rollout.fakes import FakeEngine, make_renderer, spec

ACCOUNTS = {"ana": 10, "ben": 0}


class Bank:
    """The user asks for a payment, says the sum when asked, and leaves at the second answer."""

    def __init__(self) -> None:
        self.tasks = {
            name: Task(id=name, domain="bank", split=split)
            for name, split in (("pay-4", "train"), ("pay-6", "train"), ("pay-0", "test"))
        }
        self.tools = (self.balance, self.pay, self.explode)
        self.open, self.heard, self.answer = 0, [], None

    def start(self, task_id, *, seed):
        self.open += 1
        self.amount, self.accounts, self.heard = int(task_id[4:]), dict(ACCOUNTS), []
        greeting = random.Random(seed).choice(["Hello", "Good day"])
        return "Pay what is asked.", f"{greeting}, please pay Ben."

    def balance(self, name: str) -> dict[str, int]:
        """Look up a balance."""
        return {name: self._find(name)}

    def pay(self, to: str, amount: int, note: str = "") -> str:
        """Move money from Ana.

        No account may go below 0.

        Args:
            to: who gets it.
            amount: whole euros.
        """
        self._find(to)
        if not 0 < amount <= self.accounts["ana"]:
            raise ValueError(f"amount = {amount}: must be 1 to {self.accounts['ana']}")
        self.accounts["ana"] -= amount
        self.accounts[to] += amount
        return f"paid {amount}{note}"

    def explode(self) -> str:
        """Have a fault."""
        raise KeyError("a fault")

    def _find(self, name):
        if name not in self.accounts:
            raise ValueError(f"there is no account {name!r}")
        return self.accounts[name]

    def say(self, text):
        self.heard.append(text)
        if self.answer is not None:
            return self.answer
        return ("Bye.", True) if len(self.heard) > 1 else (f"{self.amount} euros.", False)

    def end_state(self):
        return EndState(state=self.accounts, expected={"ana": 10 - self.amount, "ben": self.amount})

    def close(self):
        self.open -= 1


def make(**settings):
    return ToolEnv(game=Bank(), checker=FinalState(), **settings)


@pytest.fixture
def env():
    env = make()
    yield env
    env.close()
    assert env.game.open == 0  # every start was closed, and once only


def calls(*named, text=""):
    """A turn of calls: (name, arguments) each, with the ids c0, c1..."""
    return Message(
        role="assistant",
        content=text,
        tool_calls=tuple(
            ToolCall(name=name, arguments=arguments, id=f"c{i}")
            for i, (name, arguments) in enumerate(named)
        ),
    )


def pay(amount, to="ben"):
    return calls(("pay", {"to": to, "amount": amount}))


# ---------------------------------------------------------------- the checks of others


@pytest.mark.parametrize("turns", [("Hello.",), (pay(4), "Done."), (pay(400), "Sorry.")])
def test_it_passes_our_check(env, turns):
    check_env(env, task_id="pay-4", turns=turns)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_passes_the_check_of_gymnasium(env):
    gymnasium_check(env, skip_render_check=True)


# ---------------------------------------------------------------- an episode


def test_an_episode(env):
    observation, info = env.reset(seed=3, options={"task_id": "pay-4"})
    hello = ["Hello", "Good day"][random.Random(3).randrange(2)]
    assert json.loads(observation) == [{"role": "user", "content": f"{hello}, please pay Ben."}]
    assert info["system_prompt"] == "Pay what is asked."
    assert [tool.name for tool in info["tools"]] == ["balance", "pay", "explode"]
    assert info["task"] == Task(id="pay-4", domain="bank", split="train")
    observation, *rest, info = env.step("How much?")
    assert json.loads(observation) == [{"role": "user", "content": "4 euros."}]
    assert rest == [0.0, False, False]
    *_, info = env.step(calls(("pay", {"to": "ben", "amount": 4}), ("balance", {"name": "ben"})))
    assert info["messages"] == (
        Message(role="tool", content="paid 4", tool_call_id="c0", tool_name="pay"),
        Message(role="tool", content='{"ben": 4}', tool_call_id="c1", tool_name="balance"),
    )
    observation, *rest, info = env.step("Done.")
    assert rest == [1.0, True, False]
    trajectory = info["trajectory"]
    assert trajectory.official == EndState(
        state={"ana": 6, "ben": 4}, expected={"ana": 6, "ben": 4}
    )
    assert (trajectory.termination_reason, trajectory.num_steps) == ("user_stop", 6)
    assert trajectory.num_tool_errors == 0
    roles = ["user", "assistant", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [message.role for message in trajectory.messages] == roles
    assert info["reward"] == Reward(value=1.0, breakdown={"official": 1.0, "strict": 1.0})


@pytest.mark.parametrize(
    ("task_id", "paid", "reward"),
    [
        ("pay-4", (4,), 1.0),
        ("pay-4", (3, 1), 1.0),
        ("pay-4", (3,), 0.0),
        ("pay-4", (4, 4), 0.0),
        ("pay-4", (), 0.0),
        ("pay-0", (), 1.0),
        ("pay-0", (1,), 0.0),
    ],
)
def test_the_state_at_the_end_is_the_reward(env, task_id, paid, reward):
    env.reset(options={"task_id": task_id})
    for amount in paid:
        env.step(pay(amount))
    env.step("Hello.")
    assert env.step("Done.")[1:4] == (reward, True, False)


def test_equal_seeds_and_turns_give_equal_episodes(env):
    def episode(seed):
        shown = [env.reset(seed=seed, options={"task_id": "pay-4"})[0]]
        return shown + [env.step(turn)[:4] for turn in (pay(4), "Hello.", pay(7), "Bye.")]

    played = [episode(seed) for seed in range(8)]
    assert played == [episode(seed) for seed in range(8)]
    assert len({shown[0] for shown in played}) == 2  # the seed reaches the game
    assert ACCOUNTS == {"ana": 10, "ben": 0}


def test_a_text_beside_a_call_is_not_heard_and_a_blank_turn_is_refused(env):
    env.reset(options={"task_id": "pay-4"})
    env.step(calls(("balance", {"name": "ana"}), text="One moment."))
    observation, *rest, info = env.step(" \n")
    assert rest == [0.0, False, False]
    assert "the message is empty" in info["refused"]
    assert (info["num_steps"], info["num_tool_errors"], env.game.heard) == (2, 0, [])
    assert json.loads(observation)[0]["error"] is True


def test_many_seeds_draw_every_task(env):
    assert {env.reset(seed=seed)[1]["task"].id for seed in range(30)} == set(env.game.tasks)


def test_step_needs_an_episode(env):
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
        env.step("hello")
    env.reset(options={"task_id": "pay-4"})
    env.step("hello")
    assert env.step("hello")[2]
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset first"):
        env.step("hello")


def test_an_unknown_task_leaves_the_episode_alone(env):
    env.reset(options={"task_id": "pay-4"})
    with pytest.raises(ValueError, match=r"task_id = 'pay-5': must be one of 3, e\.g\. 'pay-4'"):
        env.reset(options={"task_id": "pay-5"})
    assert env.step("hello")[4]["messages"][0].content == "4 euros."


# ---------------------------------------------------------------- mistakes and faults


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("send", {}, "there is no tool 'send'; must be one of balance, pay, explode"),
        ("pay", {"to": "ben"}, "pay: amount: Field required. It takes (to: str, amount: int, "),
        ("pay", {"to": "ben", "amount": "4"}, "pay: amount: Input should be a valid integer"),
        ("pay", {"to": "ben", "amount": True}, "pay: amount: Input should be a valid integer"),
        ("pay", {"to": "ben", "amount": 4.0}, "pay: amount: Input should be a valid integer"),
        ("pay", {"to": None, "amount": 4}, "pay: to: Input should be a valid string"),
        ("pay", {"to": "ben", "amount": 1, "at": 2}, "pay: at: Extra inputs are not permitted"),
        ("pay", {"to": "eve", "amount": 4}, "there is no account 'eve'"),
        ("pay", {"to": "ben", "amount": 11}, "amount = 11: must be 1 to 10"),
    ],
)
def test_a_mistake_is_told_counted_and_changes_nothing(env, name, arguments, told):
    env.reset(options={"task_id": "pay-4"})
    *rest, info = env.step(calls((name, arguments), ("balance", {"name": "ana"})))
    wrong, right = info["messages"]
    assert (wrong.error, right.error) == (True, False)
    assert wrong.content.startswith(f"Error: {told}")
    assert (wrong.tool_call_id, right.content) == ("c0", '{"ana": 10}')
    assert (info["num_tool_errors"], info["num_steps"], info["refused"]) == (1, 2, "")
    env.step(pay(4))
    env.step("Hello.")
    *rest, info = env.step("Done.")
    assert (rest[1], info["trajectory"].num_tool_errors) == (1.0, 1)


def test_any_other_exception_is_a_fault_and_ends_the_episode(env):
    env.reset(options={"task_id": "pay-4"})
    with pytest.raises(KeyError, match="a fault"):
        env.step(calls(("explode", {})))
    assert env.game.open == 0
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello.")


@pytest.mark.parametrize("result", [{1, 2}, float("nan"), object()])
def test_a_result_that_is_not_json_is_a_fault(result):
    def give():
        """Give it."""
        return result

    with pytest.raises(TypeError, match="tool give must return a text or JSON: "):
        ToolFunctions([give]).call(ToolCall(name="give", arguments={}))


def test_a_user_who_says_nothing_and_stays_has_failed(env):
    env.reset(options={"task_id": "pay-4"})
    env.game.answer = ("", False)
    with pytest.raises(UserError, match="neither says anything nor leaves"):
        env.step("Hello.")


def test_a_user_may_leave_without_a_word(env):
    env.reset(options={"task_id": "pay-0"})
    env.game.answer = ("", True)
    observation, reward, terminated, *_ = env.step("Hello.")
    assert (observation, reward, terminated) == ("[]", 1.0, True)


# ---------------------------------------------------------------- limits


def test_an_episode_is_cut_after_max_steps():
    env = make(max_steps=4)
    env.reset(options={"task_id": "pay-4"})
    assert env.step("Hello.")[2:4] == (False, False)
    observation, reward, terminated, truncated, info = env.step(pay(4))
    assert (reward, terminated, truncated) == (0.0, False, True)  # as expected, but not ended
    assert info["trajectory"].official.state == {"ana": 6, "ben": 4}
    assert info["trajectory"].termination_reason == "max_steps"
    assert json.loads(observation)[0]["content"] == "paid 4"


def test_a_user_who_leaves_at_the_last_step_was_not_cut():
    env = make(max_steps=4)
    env.reset(options={"task_id": "pay-0"})
    env.step("Hello.")
    *rest, info = env.step("Bye.")
    assert rest[1:] == [1.0, True, False]
    assert info["trajectory"].termination_reason == "user_stop"


def test_an_episode_is_cut_after_max_errors():
    env = make(max_errors=3)
    env.reset(options={"task_id": "pay-0"})
    assert env.step(calls(("send", {}), ("send", {}), ("balance", {"name": "ana"})))[3] is False
    *rest, info = env.step(pay(11))
    assert rest[1:] == [0.0, False, True]
    assert info["trajectory"].termination_reason == "too_many_errors"
    assert info["trajectory"].num_tool_errors == 3


@pytest.mark.parametrize("name", ["max_steps", "max_errors", "max_text_chars"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"{name}: 0 must be above 0"):
        make(**{name: 0})


# ---------------------------------------------------------------- what the agent is told


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


def order(
    item: str,
    size: Size,
    counts: list[int],
    colour: Literal["red", "blue"] = "red",
    day: datetime.date | None = None,
) -> str:
    """Order an item.

    It comes the next day. Nothing is paid.

    Args:
        item: what is ordered.
        counts: how many of
            each kind.
    """
    return f"{item} {size.name} {sum(counts)} {colour} {day and day.year}"


@pytest.mark.parametrize("function", [order, Bank().pay, Bank().explode])
def test_tools_are_described_as_tau2_describes_them(function):
    from tau2.environment.tool import as_tool

    (ours,) = ToolFunctions([function]).specs
    theirs = as_tool(function).openai_schema["function"]
    assert (ours.name, ours.description) == (theirs["name"], theirs["description"])
    # theirs lets other arguments pass to the function, which then fails
    assert ours.parameters == {**theirs["parameters"], "additionalProperties": False}


def test_arguments_reach_the_function_as_its_types():
    tools = ToolFunctions([order])
    arguments = {"item": "tea", "size": "large", "counts": [1, 2], "day": "2024-02-29"}
    reply = tools.call(ToolCall(name="order", arguments=arguments, id="x"))
    assert (reply.content, reply.error) == ("tea LARGE 3 red 2024", False)
    many = tools.call(ToolCall(name="order", arguments=arguments | {"counts": ["1"] * 9})).content
    assert "counts.2: Input should be a valid integer; and 6 more. It takes (item: str" in many
    for wrong in ({"size": "huge"}, {"counts": [1, "2"]}, {"colour": "green"}, {"day": "soon"}):
        reply = tools.call(ToolCall(name="order", arguments=arguments | wrong))
        assert reply.error
        assert f"order: {next(iter(wrong))}" in reply.content


def test_names_that_pydantic_has_itself_are_arguments_like_others():
    def send(copy: float, json: bool = False) -> list:
        """Send."""
        return [copy, json]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tools = ToolFunctions([send])
    reply = tools.call(ToolCall(name="send", arguments={"json": True, "copy": 2}))
    assert (json.loads(reply.content), reply.error) == ([2, True], False)


def test_half_a_character_is_a_mistake_of_the_agent(env):
    env.reset(options={"task_id": "pay-4"})
    *_, info = env.step(calls(("balance", {"name": "\ud800"})))
    assert info["messages"][0].error
    assert "balance: arguments: Invalid JSON" in info["messages"][0].content


def test_annotations_may_be_strings():
    """As those of a module with ``from __future__ import annotations`` are."""

    def choose(size: "Size") -> "str":
        """Choose."""
        return size.name

    tools = ToolFunctions([choose])
    assert tools.specs[0].parameters["$defs"]["Size"]["enum"] == ["small", "large"]
    assert tools.call(ToolCall(name="choose", arguments={"size": "small"})).content == "SMALL"


def undescribed(a: int):
    return a


def untyped(a):
    """Do it."""


def starred(*a: int):
    """Do it."""


def strange(a: Bank):
    """Do it."""


def hidden(_a: int):
    """Do it."""


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ([undescribed], "undescribed has no docstring"),
        ([untyped], "untyped: argument a has no type, e.g. str"),
        ([starred], r"starred: \*a: .*int.* cannot be named in a call"),
        ([strange], "strange: its arguments cannot be described: "),
        ([hidden], "hidden: its arguments cannot be described: "),
        ([order, order], "order is there twice"),
        ([7], "7 has no name; must be a function or method"),
        ([lambda: 0], "<lambda>.* has no name"),
    ],
)
def test_functions_that_cannot_be_tools(functions, said):
    with pytest.raises(ValueError, match=f"tools: .*{said}|tools: {said}"):
        ToolFunctions(functions)


def test_a_task_needs_a_prompt_and_words(env):
    env.game.start = lambda task_id, *, seed: ("Pay.", " ")
    env.game.open += 1
    with pytest.raises(ValueError, match="'pay-4': start must give a system prompt and words"):
        env.reset(options={"task_id": "pay-4"})


def test_the_tasks_of_a_game_are_a_dataset():
    train, test, every = (GameTasks(game=Bank(), split=s) for s in ("train", "test", "all"))
    assert [task.id for task in train.tasks] == ["pay-4", "pay-6"]
    assert [task.id for task in test] == ["pay-0"]
    assert len(every) == 3
    with pytest.raises(ValueError, match=r"split = dev: .* must be one of all, test, train"):
        GameTasks(game=Bank(), split="dev")


# ---------------------------------------------------------------- in the rollout engine


def play(turns, task_id="pay-4", env=None):
    """A rollout in which the policy says these turns."""
    renderer, ordered = make_renderer(), spec(task_id)
    engine = FakeEngine({ordered.rollout_id: [renderer.render_assistant(turn) for turn in turns]})
    limits = Limits(max_turns=8, max_turn_tokens=200, max_tokens=4000, max_refused=2)
    loop = run_episode(env or make(), renderer, ordered, limits=limits, temperature=1.0)
    request = next(loop)
    try:
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as stop:
        return stop.value


def text(words):
    return Message(role="assistant", content=words)


def test_a_recorded_rollout_is_scored_again(tmp_path):
    turns = [text(" "), text("How much?"), pay(400), pay(4), text("Done.")]
    rollout = play(turns)
    assert (rollout.status, rollout.reward) == ("completed", 1.0)
    stats = {"tool_calls": 2, "tool_errors": 1, "refused": 1}
    assert {name: rollout.stats[name] for name in stats} == stats
    with Recorder(tmp_path / "rollouts.jsonl") as recorder:
        recorder.write(1, [rollout])
    (record,) = read_rollouts(tmp_path / "rollouts.jsonl")
    assert rescored(make(), record.rollout) == Reward(
        value=1.0, breakdown={"official": 1.0, "strict": 1.0}
    )

    def errorless(trajectory):
        reward = FinalState()(trajectory)
        return replace(reward, value=reward.value - 0.5 * trajectory.num_tool_errors)

    again = ToolEnv(game=Bank(), checker=errorless)
    assert rescored(again, record.rollout) == Reward(
        value=0.5, breakdown={"official": 1.0, "strict": 1.0}
    )
    assert again.game.open == 0
    changed = ToolEnv(game=Bank(), checker=FinalState())
    changed.game.say = lambda said: ("Five euros.", False)
    with pytest.raises(ReplayError, match="the replay differs from the record"):
        rescored(changed, record.rollout)


def test_a_fault_of_a_tool_is_no_reward_of_the_agent():
    rollout = play([text("How much?"), calls(("explode", {}))])
    assert (rollout.status, rollout.reward) == ("error_infra", None)
    assert "a fault" in rollout.error


def test_limits_are_statuses_of_the_rollout():
    assert play([pay(11)], env=make(max_errors=1)).status == "truncated_errors"
    assert play([pay(4)], env=make(max_steps=2)).status == "truncated_max_steps"
