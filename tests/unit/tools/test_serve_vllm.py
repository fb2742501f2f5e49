"""Starting and ending a server: a small stand-in, for what vLLM itself shows only by chance."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools import serve_vllm
from tools.serve_vllm import HOST, VllmServer, free_port, vllm_command

STAND_IN = """
import json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill")
words = [word for word in sys.argv[1:] if word not in FLAGS]
arguments = dict(zip(words[::2], words[1::2]))
if "--die" in arguments:
    sys.exit("no such model here")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if "--ill" not in arguments else 503)
        self.end_headers()

print("child", child.pid, json.dumps(arguments), os.environ.get("PYTHONPATH"), flush=True)
HTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path):
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return (sys.executable, str(path))


def server(stand_in, tmp_path, **settings) -> VllmServer:
    return VllmServer(tmp_path / "some-model", log=tmp_path / "log", command=stand_in, **settings)


def gone(pid: int) -> bool:
    """Ended, be it not yet reaped by init."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pid_of_child(tmp_path: Path) -> int:
    log = (tmp_path / "log").read_text()
    return int(log.split("child ")[1].split()[0])


def test_it_serves_the_loopback_address_and_ends_with_its_children(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(stand_in, tmp_path, args=("--dtype", "float32")) as running:
        assert running.healthy()
        assert running.url == f"http://127.0.0.1:{running.port}/v1"
        log = (tmp_path / "log").read_text()
        assert f'"--model": "{tmp_path}/some-model", "--host": "127.0.0.1"' in log
        assert '"--served-model-name": "some-model"' in log
        assert '"float32"} None' in log  # the caller's dtype, and no path of ours
        child = pid_of_child(tmp_path)
        assert not gone(child)
    assert gone(child)
    assert not running.healthy()
    with socket.socket() as listener:  # the port is free again
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, running.port))


def test_a_restart_keeps_the_port(stand_in, tmp_path):
    with server(stand_in, tmp_path) as running:
        port = running.port
        running.kill()
        assert not running.healthy()
        running.kill()  # nothing to do
        running.start()
        assert running.healthy()
        assert running.port == port


def test_a_port_that_is_taken_is_not_ours(stand_in, tmp_path):
    with server(stand_in, tmp_path) as running:
        with pytest.raises(RuntimeError, match=rf"port = {running.port}: another server listens"):
            server(stand_in, tmp_path, port=running.port).start()
        assert running.healthy()


def test_a_start_that_fails_says_why_and_leaves_nothing(stand_in, tmp_path):
    with pytest.raises(RuntimeError, match=r"exit code 1; the end of .*(?s:.*)no such model here"):
        server(stand_in, tmp_path, args=("--die", "1")).start()
    with pytest.raises(RuntimeError, match="not healthy within start_timeout_s=2"):
        server(stand_in, tmp_path, args=("--ill", "1"), start_timeout_s=2).start()
    assert gone(pid_of_child(tmp_path))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_tool_takes_its_server_with_it(stand_in, tmp_path, signum):
    code = (
        "import sys; from tools import serve_vllm as s; "
        f"s.vllm_command = lambda: {stand_in!r}; "
        f"sys.exit(s.main(['--model', {str(tmp_path)!r}, '--log', {str(tmp_path / 'log')!r}]))"
    )
    (tmp_path / "config.json").write_text("{}")
    tool = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=serve_vllm.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(serve_vllm.ROOT)},
    )
    assert tool.stdout is not None
    assert f"{tmp_path.name} at http://127.0.0.1:" in tool.stdout.readline()
    child = pid_of_child(tmp_path)
    tool.send_signal(signum)
    assert tool.wait(20) == (143 if signum == signal.SIGTERM else 0)
    assert gone(child)
    tool.stdout.close()


def test_without_the_environment_the_command_that_makes_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_VENV", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="`make vllm` makes"):
        vllm_command()
    (tmp_path / "config.json").write_text("{}")
    assert serve_vllm.main(["--model", str(tmp_path)]) == 1
    assert "make vllm" in capsys.readouterr().err


def test_free_ports_can_be_bound():
    port = free_port()
    with socket.socket() as listener:
        listener.bind((HOST, port))
