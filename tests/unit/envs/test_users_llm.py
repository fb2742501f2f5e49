"""The language model as user: what it is asked, what it may do, what its settings refuse."""

import pickle

import pytest

from components.envs.base import Message, ToolCall
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, find_task
from components.envs.users_llm import LLMUser
from components.training.component import check_component, partial
from tests.unit.envs.endpoint import HELLO, SECRET, STOP, answer, llm_user, play


def test_a_whole_episode_is_what_tau2s_own_user_asks_for(endpoint):
    rollout = play(endpoint, HELLO, STOP, temperature=0.25)
    assert rollout.status == "completed"
    assert rollout.reward == 0.0  # nothing was done: a score, since the user did its part
    said = [m["content"] for m in rollout.messages if m["role"] == "user"]
    assert said == ["Hello, please help.", "Thanks. ###STOP###"]
    assert len(endpoint.requests) == 2
    from tau2.user.user_simulator import UserSimulator

    task = find_task("mock", "create_task_1")
    # mock's user has no tools in the benchmark either
    expected = UserSimulator(instructions=str(task.user_scenario), llm="m")
    for (path, body), roles in zip(
        endpoint.requests,
        (["system", "user"], ["system", "user", "assistant", "user"]),
        strict=True,
    ):
        assert path == "/v1/chat/completions"
        assert body["model"] == "org/model"
        assert (body["temperature"], body["seed"]) == (0.25, 5)
        assert [m["role"] for m in body["messages"]] == roles
        assert body["messages"][0]["content"] == expected.system_prompt
    assert endpoint.requests[1][1]["messages"][3]["content"] == "Anything else?"


@pytest.mark.parametrize("model", ["gpt-5.4", "o3", "openai/gpt-oss-20b"])
def test_the_models_name_changes_nothing(endpoint, model):
    assert play(endpoint, HELLO, STOP, model=model, temperature=0.5).status == "completed"
    for path, body in endpoint.requests:
        assert path == "/v1/chat/completions"
        assert (body["model"], body["temperature"], body["seed"]) == (model, 0.5, 5)


def test_temperature_can_be_left_to_the_endpoint(endpoint):
    assert play(endpoint, HELLO, STOP, temperature=None).status == "completed"
    assert "temperature" not in endpoint.requests[0][1]


def test_telecoms_user_acts_on_its_own_device(endpoint):
    """Dual control: the model calls tools of the user, sees what they gave, then speaks."""
    data = domain_data("telecom")
    endpoint.script = [
        HELLO,
        (200, {}, answer(calls=[("toggle_airplane_mode", "{}"), ("check_status_bar", "{}")])),
        (200, {}, answer("Done, it says airplane mode.")),
    ]
    env = Tau2Env(domain="telecom", user=llm_user(endpoint))
    _, info = env.reset(seed=3, options={"task_id": next(iter(data.tasks))})
    device = env.tau2_environment.user_tools.db.device
    before = device.airplane_mode
    _, _, terminated, truncated, info = env.step("Please toggle airplane mode.")
    assert not terminated
    assert not truncated
    assert [m.content for m in info["messages"]] == ["Done, it says airplane mode."]
    assert env.tau2_environment.user_tools.db.device.airplane_mode is not before
    first, _, last = (body for _, body in endpoint.requests)
    assert {tool["function"]["name"] for tool in first["tools"]} == {
        t.name for t in data.user_tools
    }
    assert [m["role"] for m in last["messages"][-3:]] == ["assistant", "tool", "tool"]
    assert [c["function"]["name"] for c in last["messages"][-3]["tool_calls"]] == [
        "toggle_airplane_mode",
        "check_status_bar",
    ]
    status = env.tau2_environment.use_user_tool("check_status_bar")
    assert last["messages"][-1]["content"] == status


def test_users_without_tools_are_offered_none(endpoint):
    endpoint.script = [HELLO]
    env = Tau2Env(domain="retail", user=llm_user(endpoint))
    env.reset(seed=3, options={"task_id": "0"})
    assert not endpoint.requests[0][1].get("tools")


def test_a_config_names_it(endpoint):
    endpoint.script = [HELLO, STOP]
    node = {
        "_component_": "components.envs.tau2.Tau2Env",
        "domain": "mock",
        "user": {
            "_component_": "components.envs.users_llm.LLMUser",
            "base_url": endpoint.url + "/",
            "model": "m",
        },
    }
    assert check_component(node, "env") == []
    wrong = {**node, "user": {**node["user"], "retires": 3}}
    assert "env.user.retires" in " ".join(check_component(wrong, "env"))
    env = pickle.loads(pickle.dumps(partial(node)))()
    _, info = env.reset(seed=1, options={"task_id": "create_task_1"})
    assert info["messages"][-1] == Message(role="user", content="Hello, please help.")
    call = ToolCall(id="c", name="get_users", arguments={})
    env.step(Message(role="assistant", tool_calls=(call,)))
    assert len(endpoint.requests) == 1  # the user is not told of the agent's calls
    assert env.step("Bye")[2]
    assert endpoint.keys == ["Bearer EMPTY"] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url: '127.0.0.1:8000' is not http"),
        ({"base_url": None}, "base_url: None"),
        ({"base_url": f"http://me:{SECRET}@host/v1"}, "base_url: no user, password or query"),
        ({"model": " "}, "model: ' '"),
        ({"temperature": -1}, "temperature: -1"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"timeout_s": 0}, "timeout_s: 0"),
        ({"timeout_s": float("inf")}, "timeout_s: inf"),
        ({"retries": -1}, "retries: -1"),
        ({"retries": 1.5}, r"retries: 1\.5"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "api_key_env: .* NOT_SET_ANYWHERE is not set"),
        ({"api_key_env": SECRET}, "api_key_env: must be the name"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_sent(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        LLMUser(**{"base_url": "http://127.0.0.1:1/v1", "model": "m"} | settings)
    assert SECRET not in str(caught.value)
