"""Fixtures of the tests of environments."""

import threading

import pytest

from components.envs import users_llm
from tests.unit.envs.endpoint import Endpoint


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
