"""A local OpenAI-compatible endpoint that behaves as told, and an episode played against it."""

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from components.envs.tau2 import Tau2Env
from components.envs.users_llm import LLMUser
from components.rollout.agent_loop import Limits, run_episode
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


def llm_user(endpoint, **settings):
    return LLMUser(**{"base_url": endpoint.url, "model": "org/model", "timeout_s": 30.0} | settings)


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
