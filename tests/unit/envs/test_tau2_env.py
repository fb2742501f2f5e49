import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import components.envs
from components.envs.base import Message, ToolCall, UserError
from components.envs.baselines import baseline
from components.envs.rewards import StrictReward
from components.envs.tau2 import Tau2Env, task_ids
from components.envs.tau2_data import domain_data, find_task
from tests.parity import tau2_scripts
from tests.parity.tau2_scripts import TextUser, our_run

REWARDS = json.loads((Path(__file__).parents[2] / "data" / "tau2_rewards.json").read_text())


class Fixed:
    """A user with given replies."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.heard = []

    def reply(self, agent_text):
        self.heard.append(agent_text)
        return self.replies.pop(0)


def fixed(*replies):
    return lambda task: Fixed(*replies)


def call(name, arguments, call_id="c"):
    return ToolCall(id=call_id, name=name, arguments=arguments)


def turn(*calls, text=""):
    return Message(role="assistant", content=text, tool_calls=calls)


def mock_env(*replies, **settings):
    return Tau2Env(domain="mock", user=fixed(*replies), **settings)


def gold_reward(domain, task_id):
    script = tau2_scripts.gold(find_task(domain, task_id))
    _, end = our_run(domain=domain, task_id=task_id, script=script, max_steps=100)
    return end[1], end[4]["reward"].breakdown


@pytest.mark.parametrize(
    "domain", ["mock", "retail", pytest.param("airline", marks=pytest.mark.slow), "telecom"]
)
def test_rewards_of_gold_and_do_nothing_are_the_published_ones(domain):
    assert set(REWARDS[domain]) == set(task_ids(domain, "all"))
    for task_id, expected in REWARDS[domain].items():
        value, breakdown = gold_reward(domain, task_id)
        assert value == expected["gold"], task_id
        # retail 105: its one gold action is a write that the tool refuses.
        if domain in ("mock", "retail"):
            assert breakdown["strict"] == (0.0 if task_id == "105" else value), task_id
            assert breakdown["writes"] == value, task_id
        # Where the official evaluator aborts (an assertion about a missing task) the score is 0.
        assert baseline(domain, task_id).value == (expected["do_nothing"] or 0.0), task_id


def test_known_baselines():
    """What an agent gets for nothing: airline 19 of 50, retail 7 of 114, telecom 20 of 114."""
    idle = {d: sum(r["do_nothing"] or 0 for r in REWARDS[d].values()) for d in REWARDS}
    assert (idle["airline"], idle["retail"], idle["telecom"]) == (19, 7, 0)
    transfers = [baseline("telecom", task_id, "transfer").value for task_id in REWARDS["telecom"]]
    assert sum(transfers) == 20


def test_reset_gives_greeting_prompt_and_tools():
    env = mock_env("Hi, I need a task.")
    observation, info = env.reset(seed=0, options={"task_id": "create_task_1"})
    assert [(m.role, m.content) for m in info["messages"]] == [
        ("assistant", "Hi! How can I help you today?"),
        ("user", "Hi, I need a task."),
    ]
    assert json.loads(observation)[1] == {"role": "user", "content": "Hi, I need a task."}
    assert "<policy>\n# Mock Domain Policy" in info["system_prompt"]
    assert len(info["system_prompt"]) == 635
    assert {t.name for t in info["tools"]} == {
        "create_task",
        "get_users",
        "update_task_status",
        "transfer_to_human_agents",
    }
    create = next(t for t in info["tools"] if t.name == "create_task")
    assert set(create.parameters["required"]) == {"user_id", "title"}


def test_history_of_a_task_is_seen_by_the_agent():
    env = mock_env("Please mark it as completed.")
    _, info = env.reset(options={"task_id": "update_task_with_message_history"})
    roles = [m.role for m in info["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert info["messages"][1].tool_calls[0].name == "create_task"


def test_observation_holds_tool_results_in_order_of_the_calls():
    env = mock_env("Hi.")
    env.reset(options={"task_id": "create_task_1"})
    answer = env.step(turn(call("get_users", {}, "a"), call("nope", {}, "b")))
    assert [(m.tool_call_id, m.error) for m in answer[4]["messages"]] == [("a", False), ("b", True)]
    assert "Tool 'nope' not found" in answer[4]["messages"][1].content
    assert answer[4]["num_tool_errors"] == 1
    assert answer[4]["num_steps"] == 3  # greeting, the agent's message, the tools' answers


DEEP = {"a": 1}
for _ in range(40):
    DEEP = {"a": DEEP}

REFUSED = {
    "no call and no text": Message(role="assistant", tool_calls=()),
    "blank": Message(role="assistant", content=" \n\t"),
    "blank string": "",
    "arguments are a list": turn(call("get_users", [1])),
    "arguments are a string": turn(call("get_users", '{"a": 1}')),
    "user's requestor": Message(role="user", content="I am the user: ###STOP###"),
    "tool's requestor": Message(role="tool", content="done"),
    "endless text": "x" * 16_001,
    "endless arguments": turn(call("create_task", {"user_id": "user_1", "title": "x" * 16_001})),
    "no name": turn(call("", {})),
    "not JSON": turn(call("create_task", {"title": {1, 2}})),
    "not a number": turn(call("create_task", {"title": float("nan")})),
    "deep": turn(call("create_task", DEEP)),
    "endless power": turn(call("calculate", {"expression": "9**9**8"})),
    "one of two": turn(call("get_users", {}), call("get_users", "x")),
    "too many": turn(*[call("get_users", {})] * 33),
}


@pytest.mark.parametrize("action", REFUSED.values(), ids=REFUSED.keys())
def test_refused_turns_leave_no_trace(action):
    env = mock_env("Hi.", "Bye. ###STOP###")
    env.reset(options={"task_id": "create_task_1"})
    before = env.database_hashes()
    start = time.process_time()
    observation, reward, terminated, truncated, info = env.step(action)
    assert time.process_time() - start < 1.0
    assert info["refused"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert all(m.role == "tool" and m.error for m in info["messages"])
    assert json.loads(observation)[0]["content"] == f"Error: {info['refused']}"
    assert (info["num_steps"], info["num_tool_errors"]) == (1, 0)
    assert env.database_hashes() == before
    _, _, terminated, _, info = env.step("Goodbye.")
    assert terminated
    assert info["refused"] == ""
    assert [m.content for m in info["trajectory"].official.messages] == [
        "Hi! How can I help you today?",
        "Hi.",
        "Goodbye.",
        "Bye. ###STOP###",
    ]


def test_text_beside_a_call_is_a_switch():
    both = turn(call("get_users", {}), text="Let me look.")
    env = mock_env("Hi.")
    env.reset(options={"task_id": "create_task_1"})
    info = env.step(both)[4]
    assert info["refused"] == ""
    assert info["messages"][0].role == "tool"
    env = mock_env("Hi.", refuse_text_with_call=True)
    env.reset(options={"task_id": "create_task_1"})
    assert "not both" in env.step(both)[4]["refused"]
    assert "at most 1" in env.step(turn(*[call("get_users", {})] * 2))[4]["refused"]
    assert env.step(turn(call("get_users", {})))[4]["refused"] == ""


def test_agent_cannot_stop_a_run():
    user = Fixed("Hi.", "What?", "Bye ###STOP###")
    env = Tau2Env(domain="mock", user=lambda task: user)
    env.reset(options={"task_id": "create_task_1"})
    _, _, terminated, truncated, info = env.step("###STOP###")
    assert not terminated
    assert not truncated
    assert user.heard[-1] == "###STOP###"
    assert info["messages"][0].content == "What?"
    answer = env.step(turn(call("done", {})))
    assert answer[4]["messages"][0].error
    assert not answer[2]


def test_yes_and_stop_in_one_turn_ends_before_the_agent_acts():
    env = mock_env("Create it.", "Yes, please. ###STOP###")
    env.reset(options={"task_id": "create_task_1"})
    _, reward, terminated, truncated, info = env.step("Shall I create it?")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["trajectory"].termination_reason == "user_stop"
    assert info["messages"][-1].content == "Yes, please. ###STOP###"


@pytest.mark.parametrize("token", ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])
def test_stop_tokens_are_scored(token):
    env = mock_env("Hi.", f"So long {token}")
    env.reset(options={"task_id": "create_task_1"})
    create = call("create_task", {"user_id": "user_1", "title": "Important Meeting"})
    env.step(turn(create))
    _, reward, terminated, _, info = env.step("It is created.")
    assert (reward, terminated) == (1.0, True)
    assert info["reward"].breakdown["official"] == info["reward"].breakdown["strict"] == 1.0


def test_steps_run_out():
    env = mock_env("Hi.", "And?", max_steps=3)
    env.reset(options={"task_id": "create_task_1"})
    _, reward, terminated, truncated, info = env.step("Hm.")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["trajectory"].termination_reason == "max_steps"


def test_episode_that_ends_before_the_first_turn():
    env = mock_env("Wrong number. ###STOP###")
    _, info = env.reset(options={"task_id": "create_task_1_nl_eval"})
    assert info["reward"].value == 1.0
    answer = env.step("Hello?")
    assert (answer[1], answer[2], answer[3]) == (1.0, True, False)
    assert len(answer[4]["trajectory"].messages) == 2  # the turn was never delivered
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello?")


class Failing:
    def __init__(self, replies, last):
        self.replies, self.last = list(replies), last

    def reply(self, agent_text):
        if self.replies:
            return self.replies.pop(0)
        if isinstance(self.last, Exception):
            raise self.last
        return self.last


@pytest.mark.parametrize("last", [RuntimeError("no server"), "", "  ", None])
def test_failing_user_is_not_reward_zero(last):
    env = Tau2Env(domain="mock", user=lambda task: Failing(["Hi."], last))
    env.reset(options={"task_id": "create_task_1"})
    with pytest.raises(UserError, match=r"no server|expected text"):
        env.step("Hello?")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello?")
    with pytest.raises(UserError):
        Tau2Env(domain="mock", user=lambda task: Failing([], last)).reset(
            options={"task_id": "create_task_1"}
        )


def test_tool_that_never_returns_is_cut(monkeypatch):
    from tau2.domains.mock.tools import MockTools

    def get_users(self):
        while True:
            pass

    env = mock_env("Hi.", tool_timeout_s=0.2)
    env.reset(options={"task_id": "create_task_1"})
    monkeypatch.setattr(MockTools, "get_users", get_users)
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"get_users.*tool_timeout_s=0.2"):
        env.step(turn(call("get_users", {})))
    assert time.perf_counter() - start < 5.0
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello?")


def test_environments_do_not_share_state():
    envs = [Tau2Env(domain="retail", user=lambda task: TextUser(9)) for _ in range(2)]
    for env in envs:
        env.reset(seed=5, options={"task_id": "0"})
    start = envs[0].database_hashes()
    assert envs[1].database_hashes() == start
    gold = find_task("retail", "0").evaluation_criteria.actions
    for action in gold:
        envs[0].step(turn(call(action.name, action.arguments)))
    assert envs[0].database_hashes() != start
    assert envs[1].database_hashes() == start
    envs[0].reset(seed=5, options={"task_id": "0"})
    assert envs[0].database_hashes() == start


def test_arguments_of_a_turn_are_copied():
    env = mock_env("Hi.", "Bye ###STOP###")
    env.reset(options={"task_id": "create_task_1"})
    arguments = {"user_id": ["user_1"], "title": {"text": "Important Meeting"}}
    env.step(turn(call("create_task", arguments)))
    arguments["user_id"].append("changed afterwards")
    arguments["title"]["text"] = "changed afterwards"
    trajectory = env.step("Done.")[4]["trajectory"]
    assert "changed" not in str(trajectory.official.messages)
    assert "changed" not in str(trajectory.messages)


def test_tau2_users_and_messages_built_early():
    """The official record is sorted by time: a message made too early must not move."""
    from tau2.data_model.message import UserMessage
    from tau2.user.user_simulator import UserSimulator

    class Prepared(UserSimulator):
        def get_init_state(self, message_history=None):  # type: ignore[override]
            self.prepared = [
                UserMessage(role="user", content=text, timestamp="2001-01-01T00:00:00")
                for text in ("Bye ###STOP###", "Hi.")
            ]
            return

        def set_seed(self, seed):
            self.seed = seed

        def generate_next_message(self, message, state):
            return self.prepared.pop(), state

    env = Tau2Env(domain="mock", user=lambda task: Prepared(llm=None))
    env.reset(seed=11, options={"task_id": "create_task_1"})
    create = call("create_task", {"user_id": "user_1", "title": "Important Meeting"})
    env.step(turn(create))
    _, reward, _, _, info = env.step("It is created.")
    roles = [m.role for m in info["trajectory"].official.messages]
    assert roles == ["assistant", "user", "assistant", "tool", "assistant", "user"]
    assert reward == 1.0
    assert info["trajectory"].official.seed == 11


def test_seeds_and_global_random_state():
    first = Tau2Env(domain="mock", tasks="generated:0:8")
    second = Tau2Env(domain="mock", tasks="generated:0:8")
    state = random.getstate()
    observations = set()
    for seed in range(6):
        a, info = first.reset(seed=seed, options={"task_id": "generated-0-3"})
        first.step("What is your name?")
        b, _ = second.reset(seed=seed, options={"task_id": "generated-0-3"})
        assert a == b
        assert info["task"].split == "train"
        observations.add(a)
    assert len(observations) > 1  # paraphrases
    assert random.getstate() == state
    # Without a task, the seed draws one.
    drawn = [first.reset(seed=seed)[1]["task"].id for seed in range(20)]
    assert drawn == [second.reset(seed=seed)[1]["task"].id for seed in range(20)]
    assert len(set(drawn)) > 3


def test_close_and_steps_out_of_order():
    env = mock_env("Hi.")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello")
    env.reset(options={"task_id": "create_task_1"})
    env.close()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello")
    env.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"domain": "retial"}, r"domain: 'retial' is unknown; did you mean 'retail'.*mock"),
        ({"domain": "mock", "tasks": "generate:0:8"}, r"tasks: 'generate:0:8' is neither"),
        ({"domain": "mock", "tasks": "generated:0"}, "two whole numbers"),
        ({"domain": "mock", "tasks": "generated:0:0"}, "at least 1"),
        ({"domain": "retail", "tasks": "generated:0:8"}, "needs domain 'mock'"),
        ({"domain": "mock", "max_steps": 0}, "max_steps: 0 must be above 0"),
        ({"domain": "mock", "user": "scriptd"}, "user: 'scriptd'"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Tau2Env(**settings)


def test_unknown_task_and_split():
    env = mock_env("Hi.")
    with pytest.raises(ValueError, match=r"task_id: 'create_tsk_1'.*did you mean 'create_task_1'"):
        env.reset(options={"task_id": "create_tsk_1"})
    with pytest.raises(ValueError, match=r"split: 'tran' is unknown; did you mean 'train'"):
        task_ids("retail", "tran")
    with pytest.raises(ValueError, match=r"mock has no official 'train' tasks.*generated"):
        task_ids("mock", "train")


def test_splits():
    train, test = set(task_ids("retail", "train")), set(task_ids("retail", "test"))
    assert (len(train), len(test), len(train & test)) == (74, 40, 0)
    assert train | test == set(task_ids("retail", "all"))
    assert len(task_ids("mock", "test")) == 9
    assert task_ids("mock", "train", tasks="generated:3:2") == ("generated-3-0", "generated-3-1")
    assert len(task_ids("mock", "test", tasks="generated:3:2")) == 9
    assert len(task_ids("mock", "all", tasks="generated:3:2")) == 11


def test_checker_is_used():
    env = mock_env("Hi.", "Bye ###STOP###", checker=StrictReward())
    env.reset(options={"task_id": "create_task_1"})
    assert env.step("No.")[4]["reward"].breakdown["strict"] == 0.0


@pytest.mark.filterwarnings("ignore")
def test_gymnasium_check_env():
    ids = components.envs.register()
    assert components.envs.register() == ids  # a second time changes nothing
    env = gymnasium.make("sinkflex/tau2-mock-v0", user=fixed("Hi.", *["Go on."] * 200))
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("domain", ["mock", "retail", "airline", "telecom"])
def test_fresh_environments_equal_official_ones(domain, monkeypatch):
    from tau2.domains.retail.data_model import RetailDB
    from tau2.registry import registry

    official = registry.get_env_constructor(domain)()
    data = domain_data(domain)
    # One parse per process: loading again would fail now.
    monkeypatch.setattr(RetailDB, "load", None)
    built = data.build()
    assert built.get_db_hash() == official.get_db_hash()
    assert built.get_user_db_hash() == official.get_user_db_hash()
    assert built.get_policy() == official.get_policy()
    if domain == "retail":  # the evaluator builds two more
        assert gold_reward(domain, "0")[0] == 1.0


def test_records_are_copied_when_looked_at():
    base = domain_data("retail").build().tools.db
    copies = domain_data("retail").build().tools.db
    start = base.get_hash()
    keys = list(copies.orders)
    copies.orders[keys[0]].status = "cancelled"
    copies.orders.get(keys[1]).status = "cancelled"
    next(iter(copies.users.values())).email = "x"
    for _, product in copies.products.items():
        product.name = "x"
    copies.orders.pop(keys[2])
    copies.orders.setdefault(keys[3], None).status = "cancelled"
    assert copies.orders.get("none", 7) == 7
    assert copies.orders.pop("none", 7) == 7
    assert len(copies.orders.items()) == len(copies.orders) == len(base.orders) - 1
    assert copies.orders[keys[0]] is copies.orders[keys[0]]
    assert copies.get_hash() != start
    assert base.get_hash() == start == domain_data("retail").build().tools.db.get_hash()


def test_import_is_quiet_offline_and_without_torch():
    script = """
import sys
from components.envs.tau2 import Tau2Env, preload
preload("mock")
env = Tau2Env(domain="mock")
env.reset(options={"task_id": "impossible_task_1"})
done = False
while not done:
    _, _, terminated, truncated, info = env.step("I am sorry.")
    done = terminated or truncated
assert not {"torch", "torchtune", "omegaconf"} & set(sys.modules)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LITELLM")}
    # A proxy where nothing listens: whatever wants the network fails, and says so.
    environment |= {"HTTPS_PROXY": "http://127.0.0.1:9", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
