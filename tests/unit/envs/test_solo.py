"""Solo mode: a ticket, the tools of both sides, no user."""

import dataclasses

import gymnasium
import pytest

from components.envs.base import Message, ToolCall
from components.envs.rewards import score
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, find_task, task_ids
from components.envs.tau2_solo import solo_ids
from tests.parity import tau2_scripts


def turn(*names, text="", **arguments):
    calls = tuple(ToolCall(id=f"c{i}", name=n, arguments=arguments) for i, n in enumerate(names))
    return Message(role="assistant", content=text, tool_calls=calls)


@pytest.fixture
def env():
    return Tau2Env(domain="telecom", solo=True)


def test_gold_scores_one_on_every_task():
    ids = solo_ids("telecom")
    assert set(ids) == set(task_ids("telecom", "all"))
    for task_id in ids:
        script = tau2_scripts.gold(find_task("telecom", task_id), solo=True)
        _, end = tau2_scripts.our_run(
            domain="telecom", task_id=task_id, script=script, max_steps=100
        )
        assert end[1] == 1.0, task_id
        assert end[4]["reward"].breakdown["strict"] == 1.0
        assert end[4]["trajectory"].termination_reason == "agent_stop"


def test_the_agent_reads_a_ticket_and_has_all_tools(env):
    task_id = solo_ids("telecom")[0]
    observation, info = env.reset(seed=0, options={"task_id": task_id})
    assert (observation, info["messages"]) == ("[]", ())
    ticket = find_task("telecom", task_id).ticket
    assert f"<ticket>\n{ticket}\n</ticket>" in info["system_prompt"]
    assert "You cannot communicate with the user" in info["system_prompt"]
    names = [tool.name for tool in info["tools"]]
    assert len(names) == len(set(names)) == 13 + 30 + 1
    assert {"enable_roaming", "toggle_roaming", "done"} <= set(names)
    answer = env.step(turn("check_status_bar"))
    assert answer[4]["messages"][0].content.startswith("Status Bar:")
    assert not answer[2]


def test_a_built_solo_environment_equals_the_official_one():
    from tau2.registry import registry

    for domain in ("telecom", "mock"):
        official = registry.get_env_constructor(domain)(solo_mode=True)
        built = domain_data(domain).build(solo_mode=True)
        assert built.solo_mode is official.solo_mode is True
        assert built.get_policy() == official.get_policy()
        assert built.get_policy() != domain_data(domain).build().get_policy()
        assert built.get_db_hash() == official.get_db_hash()


def test_text_ends_an_episode_unscored(env):
    env.reset(seed=0, options={"task_id": solo_ids("telecom")[0]})
    _, reward, terminated, truncated, info = env.step("I am on it.")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["trajectory"].termination_reason == "agent_error"


def test_a_stop_beside_a_call_is_refused(env):
    """The official run would end with a call on its way, and raise."""
    env.reset(seed=0, options={"task_id": solo_ids("telecom")[0]})
    answer = env.step(turn("check_status_bar", text="###STOP###"))
    assert "done" in answer[4]["refused"]
    assert answer[4]["num_steps"] == 0
    assert env.step(turn("check_status_bar", "done"))[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"domain": "retail"}, r"solo: retail has no solo mode \(allowed: telecom, mock\)"),
        ({"domain": "telecom", "user": lambda task: None}, "no user in solo mode"),
        ({"domain": "mock", "tasks": "generated:0:4"}, "generated tasks have no ticket"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Tau2Env(solo=True, **settings)


def test_a_task_with_a_conversation_cannot_be_played_solo():
    env = Tau2Env(domain="mock", solo=True)
    with pytest.raises(ValueError, match="cannot be played solo"):
        env.reset(options={"task_id": "update_task_with_message_history"})
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello?")
    drawn = {env.reset(seed=seed)[1]["task"].id for seed in range(30)}
    assert drawn == set(solo_ids("mock"))


def test_replaying_the_record_gives_the_same_score(env):
    task_id = solo_ids("telecom")[3]
    for script in (
        tau2_scripts.gold(find_task("telecom", task_id), solo=True),
        tau2_scripts.nothing(solo=True),
    ):
        _, end = tau2_scripts.our_run(
            domain="telecom", task_id=task_id, script=script, max_steps=100
        )
        trajectory = end[4]["trajectory"]
        assert score(dataclasses.replace(trajectory, outcome=None)) == score(trajectory)
