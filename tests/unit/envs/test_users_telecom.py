"""The scripted user of telecom, played by an agent that asks for the gold actions in words."""

import pytest

from components.envs.base import Message, ToolCall
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import find_task, task_ids
from components.envs.telecom_cues import phone_requests
from components.envs.users_telecom import TelecomUser

# How an agent might put it: by the tool's name, and in plain words.
PLAIN = {
    "toggle_airplane_mode": "Please turn airplane mode off.",
    "toggle_data": "Could you turn on mobile data?",
    "toggle_roaming": "Please enable data roaming.",
    "toggle_data_saver_mode": "Please switch data saver off.",
    "toggle_wifi_calling": "Please turn off Wi-Fi calling.",
    "set_network_mode_preference": "Please change the network mode to 4G/5G preferred.",
    "reseat_sim_card": "Please remove the SIM card and insert it again.",
    "reset_apn_settings": "Please reset your APN settings.",
    "reboot_device": "Now restart your phone.",
    "disconnect_vpn": "Please disconnect from the VPN.",
    "make_payment": "Please make the payment.",
}


def a_task(kind):
    return next(task_id for task_id in task_ids("telecom", "all") if kind in task_id)


def ask(action, words):
    if words == "names":
        given = ", ".join(f"{k}={v!r}" for k, v in action.arguments.items())
        return f"Please run {action.name}({given})."
    if action.name == "grant_app_permission":
        return f"Please grant the messaging app the {action.arguments['permission']} permission."
    return PLAIN[action.name]


def play(task_id, words, env):
    """The oracle: its own gold calls, and the user's asked for one by one."""
    _, info = env.reset(seed=0, options={"task_id": task_id})
    for number, action in enumerate(find_task("telecom", task_id).evaluation_criteria.actions):
        turn: str | Message
        if action.requestor == "user":
            turn = ask(action, words)
        else:
            call = ToolCall(id=f"c{number}", name=action.name, arguments=action.arguments)
            turn = Message(role="assistant", tool_calls=(call,))
        _, reward, terminated, truncated, info = env.step(turn)
        if terminated or truncated:
            return reward, info
        if action.name == "transfer_to_human_agents":
            return env.step("YOU ARE BEING TRANSFERRED TO A HUMAN AGENT.")[1::3]
    for _ in range(5):
        _, reward, terminated, truncated, info = env.step("Is it working now?")
        if terminated or truncated:
            return reward, info
    raise AssertionError(f"no end: {info['messages']}")


def solved(ids, words):
    env = Tau2Env(domain="telecom")
    rewards = {task_id: play(task_id, words, env)[0] for task_id in ids}
    assert [task_id for task_id, reward in rewards.items() if reward != 1.0] == []


@pytest.mark.parametrize("words", ["names", "plain"])
def test_an_oracle_scores_one(words):
    solved(task_ids("telecom", "all")[::10], words)


@pytest.mark.tau2
@pytest.mark.parametrize("words", ["names", "plain"])
def test_an_oracle_scores_one_on_every_task(words):
    solved(task_ids("telecom", "all"), words)


def test_the_agent_sees_what_the_user_says_alone():
    env = Tau2Env(domain="telecom")
    _, info = env.reset(seed=1, options={"task_id": a_task("mobile_data_issue")})
    assert "my mobile data is not working properly" in info["messages"][-1].content.lower()
    _, _, _, _, info = env.step("What is your name and your phone number?")
    assert info["messages"][-1].content == "I am John Smith with phone number 555-123-2002."
    _, _, _, _, info = env.step("Please check your status bar and run a speed test.")
    (said,) = info["messages"]
    assert said.role == "user"
    assert "Status Bar:" in said.content
    assert "Speed test failed" in said.content
    assert info["num_steps"] == 1 + 2 + 1 + 5  # a call and its answer each


def test_a_switch_is_flipped_back_when_it_went_the_wrong_way():
    (request,) = phone_requests("Please turn mobile data on.")
    user = TelecomUser(find_task("telecom", a_task("mobile_data_issue")).user_scenario, seed="0")
    user.act("Hi!")
    assert user.act("Please turn mobile data on.") == [request.call]
    assert user.act(["Mobile Data is now OFF."]) == [request.call]
    assert user.act(["Mobile Data is now ON."])[0].name == "run_speed_test"  # has it helped?
    assert "Speed test failed" in user.act(["Speed test failed: no connection."])


def test_a_user_that_is_not_helped_leaves():
    env = Tau2Env(domain="telecom")
    _, info = env.reset(seed=1, options={"task_id": a_task("mobile_data_issue")})
    done, turns = False, 0
    while not done:
        _, reward, done, truncated, info = env.step("I am sorry to hear that.")
        turns += 1
        assert not truncated
    assert turns <= 5
    assert reward == 0.0
    assert info["trajectory"].termination_reason == "user_stop"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Please run `toggle_airplane_mode` to turn it off.",
            [("toggle_airplane_mode", {}, False)],
        ),
        ("Is airplane mode on?", []),
        ("Check your SIM status, then restart.", ["check_sim_status", "reboot_device"]),
        ("Please turn off Wi-Fi calling.", [("toggle_wifi_calling", {}, False)]),
        ("Please turn on Wi-Fi.", [("toggle_wifi", {}, True)]),
        ("Check whether data saver is on.", ["check_data_restriction_status"]),
        ("Use check_vpn_status().", ["check_vpn_status"]),
        (
            "Set the network mode preference to 4g_5g_preferred.",
            [("set_network_mode_preference", {"mode": "4g_5g_preferred"}, None)],
        ),
        ("Change your network preference.", []),
        (
            "Allow storage and SMS permissions for messaging.",
            [
                ("grant_app_permission", {"app_name": "messaging", "permission": "storage"}, None),
                ("grant_app_permission", {"app_name": "messaging", "permission": "sms"}, None),
            ],
        ),
        ("I sent you a bill. Please pay the bill.", ["make_payment"]),
        ("I will enable roaming on the line now.", []),
        ("Thank you for your patience.", []),
    ],
)
def test_what_is_read_in_a_text(text, expected):
    wanted = [e if isinstance(e, tuple) else (e, {}, None) for e in expected]
    found = [(r.call.name, dict(r.call.arguments), r.wanted) for r in phone_requests(text)]
    assert found == wanted
