"""The language model as user, at an endpoint that misbehaves: what is asked again, what is lost."""

import json
import pickle
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from types import SimpleNamespace

import pytest

from components.envs import users_llm
from components.envs.base import UserError
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data
from tests.unit.envs.endpoint import HELLO, SECRET, STOP, answer, llm_user, lost, play


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
    error = lost(play(endpoint, (429, {"Retry-After": "600"}, "{}")))
    assert time.monotonic() - start < 25
    assert len(endpoint.requests) == 1
    assert "timeout_s=30" in error
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
    for _ in range(600):
        connection.write(b" ")
        connection.flush()
        time.sleep(0.05)


@pytest.mark.parametrize("slow", [lambda connection: time.sleep(30), trickle])
def test_a_slow_answer_ends_at_the_timeout(endpoint, slow):
    endpoint.script = [(200, {}, slow)]
    env = Tau2Env(domain="mock", user=llm_user(endpoint, timeout_s=0.5))
    domain_data("mock")
    start = time.monotonic()
    with pytest.raises(UserError, match=r"timeout_s=0\.5"):
        env.reset(seed=1, options={"task_id": "create_task_1"})
    assert 0.4 < time.monotonic() - start < 20
    assert len(endpoint.requests) == 1


def test_slow_counts_as_lost(endpoint):
    error = lost(play(endpoint, HELLO, (200, {}, lambda c: time.sleep(30)), timeout_s=3.0))
    assert "timeout_s=3" in error
