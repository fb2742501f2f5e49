"""The language model as user, against a local endpoint that misbehaves as told."""

import json
import pickle
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from components.envs import users_llm
from components.envs.base import Message, ToolCall, UserError
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, find_task
from components.envs.users_llm import LLMUser
from components.rollout.agent_loop import Limits, run_episode
from components.training.component import check_component, partial
from tests.unit.rollout.fakes import FakeEngine, make_renderer, spec

SECRET = "sk-very-secret-0123456789"
LIMITS = Limits(max_turns=4, max_turn_tokens=200, max_tokens=40_000, max_refused=1)


def answer(content=None, *, calls=(), finish="stop"):
    """The body of a sound chat completion."""
    tool_calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": finish, "message": message}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }
    )


HELLO = (200, {}, answer("Hello, please help."))
STOP = (200, {}, answer("Thanks. ###STOP###"))


class Endpoint(ThreadingHTTPServer):
    """Answers the n-th request with the n-th (status, headers, body) of a script.

    A body may be a callable that writes to the connection by itself.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.requests, self.times, self.keys = [], [], [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self):
        self.server.times.append(time.monotonic())
        self.server.keys.append(self.headers["Authorization"])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body)))
        status, headers, body = self.server.script.pop(0)
        text = b"x" * 1000 if callable(body) else body.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        try:
            if callable(body):
                body(self.wfile)
            else:
                self.wfile.write(text)
        except OSError:
            pass  # the client has hung up

    def log_message(self, format, *args):
        pass


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(users_llm, "FIRST_WAIT_S", 0.01)
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
    users_llm._client.cache_clear()


def llm_user(endpoint, **settings):
    return LLMUser(**{"base_url": endpoint.url, "model": "org/model", "timeout_s": 5.0} | settings)


def play(endpoint, *script, turns=("Anything else?",), **settings):
    """One episode of mock's first task with the agent's texts, as a rollout."""
    endpoint.script = list(script)
    env = Tau2Env(domain="mock", user=llm_user(endpoint, **settings))
    order = spec("create_task_1")
    engine = FakeEngine({order.rollout_id: turns})
    loop = run_episode(env, make_renderer(), order, limits=LIMITS, temperature=1.0)
    try:
        request = next(loop)
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as stop:
        return stop.value


def lost(rollout):
    """The error of a rollout that its user lost: no reward."""
    assert rollout.status == "error_user"
    assert rollout.reward is None
    return rollout.error


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


def test_failures_that_pass_are_asked_again_and_leave_no_trace(endpoint):
    broken = (500, {}, "oops")
    rollout = play(endpoint, HELLO, broken, (200, {}, HELLO[2][:70]), (200, {}, answer("")), STOP)
    assert rollout.status == "completed"
    assert len(endpoint.requests) == 5
    bodies = [body for _, body in endpoint.requests]
    assert bodies[1] == bodies[2] == bodies[3] == bodies[4]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        ((500, {}, "oops"), "InternalServerError"),
        ((503, {}, "{}"), "ServiceUnavailableError"),
        ((200, {}, HELLO[2][:70]), "Unterminated string"),
        ((200, {}, ""), "Expecting value"),
        ((200, {}, answer("")), "neither text nor calls"),
        ((200, {}, answer(None)), "neither text nor calls"),
        ((200, {}, answer("I want to", finish="length")), "cut at the endpoint's limit"),
        ((200, {}, answer(calls=[("f", '{"a": ')])), "Expecting value"),
        ((200, {}, '{"id": "x", "choices": []}'), "an answer that cannot be used"),
        ((429, {}, "{}"), "RateLimitError"),
    ],
)
def test_failures_that_stay_use_up_the_retries(endpoint, reply, text):
    error = lost(play(endpoint, *[reply] * 9, retries=2))
    assert len(endpoint.requests) == 3
    assert "failed 3 times (retries=2)" in error
    assert text in error


def test_a_user_that_fails_late_costs_the_reward_too(endpoint):
    error = lost(play(endpoint, HELLO, (500, {}, ""), retries=0))
    assert "failed 1 times (retries=0)" in error
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_named_and_not_shown(endpoint, monkeypatch, status):
    monkeypatch.setenv("MY_KEY", SECRET)
    body = json.dumps({"error": {"message": f"bad key {SECRET}"}})
    error = lost(play(endpoint, (status, {}, body), api_key_env="MY_KEY"))
    assert len(endpoint.requests) == 1
    assert endpoint.keys == [f"Bearer {SECRET}"]
    assert "api_key_env" in error
    assert f"refused the key with {status} (it came from MY_KEY)" in error
    assert SECRET not in error


def test_the_key_is_in_no_message_pickle_or_log(endpoint, monkeypatch, caplog, capfd):
    monkeypatch.setenv("MY_KEY", SECRET)
    user = llm_user(endpoint, api_key_env="MY_KEY", retries=1)
    assert SECRET.encode() not in pickle.dumps(user)
    echo = json.dumps({"error": {"message": f"bad header Bearer {SECRET}"}})
    with caplog.at_level("DEBUG"):
        for reply, found in (((500, {}, echo), "failed 2 times"), ((400, {}, echo), "status 400")):
            error = lost(play(endpoint, reply, reply, api_key_env="MY_KEY", retries=1))
            assert found in error
            assert SECRET not in error
    assert set(endpoint.keys) == {f"Bearer {SECRET}"}
    assert SECRET not in caplog.text + "".join(capfd.readouterr())


def test_a_wrong_model_is_not_asked_for_again(endpoint):
    body = json.dumps({"error": {"message": "The model does not exist."}})
    error = lost(play(endpoint, (404, {}, body)))
    assert len(endpoint.requests) == 1
    assert "'org/model' with status 404" in error
    assert "does not exist" in error


def test_no_endpoint_at_all(endpoint):
    endpoint.server_close()  # nobody listens there
    error = lost(play(endpoint, retries=1))
    assert f"base_url {endpoint.url} failed 2 times" in error


def test_a_rate_limit_is_waited_for_and_takes_no_retry(endpoint):
    limit = (429, {"Retry-After": "0.3"}, "{}")
    rollout = play(endpoint, limit, limit, HELLO, STOP, retries=0)
    assert rollout.status == "completed"
    assert len(endpoint.requests) == 4
    for first, second in ((0, 1), (1, 2)):
        assert endpoint.times[second] - endpoint.times[first] >= 0.3


def test_a_rate_limit_beyond_the_timeout_is_not_waited_for(endpoint):
    start = time.monotonic()
    error = lost(play(endpoint, (429, {"Retry-After": "60"}, "{}"), timeout_s=4.0))
    assert time.monotonic() - start < 3.5
    assert len(endpoint.requests) == 1
    assert "timeout_s=4" in error
    assert "RateLimitError" in error


def test_retry_after_is_read_as_seconds_and_as_a_date():
    def read(value):
        headers = {} if value is None else {"retry-after": value}
        return users_llm._retry_after_s(SimpleNamespace(litellm_response_headers=headers))

    later = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=40), usegmt=True)
    assert read("2") == 2.0
    assert 38 < read(later) <= 40
    assert read("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert [read(value) for value in ("soon", "nan", "inf", None)] == [None] * 4
    assert users_llm._retry_after_s(ValueError()) is None


def trickle(connection):
    for _ in range(100):
        connection.write(b" ")
        connection.flush()
        time.sleep(0.05)


@pytest.mark.parametrize("slow", [lambda connection: time.sleep(2), trickle])
def test_a_slow_answer_ends_at_the_timeout(endpoint, slow):
    endpoint.script = [(200, {}, slow)]
    env = Tau2Env(domain="mock", user=llm_user(endpoint, timeout_s=0.5))
    domain_data("mock")
    start = time.monotonic()
    with pytest.raises(UserError, match=r"timeout_s=0\.5"):
        env.reset(seed=1, options={"task_id": "create_task_1"})
    assert 0.4 < time.monotonic() - start < 1.5
    assert len(endpoint.requests) == 1


def test_slow_counts_as_lost(endpoint):
    error = lost(play(endpoint, HELLO, (200, {}, lambda c: time.sleep(1)), timeout_s=0.5))
    assert "timeout_s=0.5" in error


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
