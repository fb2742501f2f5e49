"""A real server that plays the user, and what went to it and came back."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from components.models.paths import model_dir
from tools.serve_vllm import ROOT, VllmServer

MAX_NEW_TOKENS = 64
REQUEST = "Please check your status bar."
CALL = '<tool_call>\n{"name": "check_status_bar", "arguments": {}}\n</tool_call>'


def one_sentence_model(directory: Path) -> Path:
    """SmolLM2, whose answers end with their first sentence: alone it talks until it is cut.

    The weights and the tokenizer are links; only generation_config.json differs.
    """
    source = model_dir("smollm2-135m-instruct")
    directory.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "generation_config.json":
            (directory / path.name).symlink_to(path)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ends = [tokenizer.token_to_id(text) for text in ("<|im_end|>", ".", "!", "?")]
    assert None not in ends
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory


def template_with_examples(path: Path) -> Path:
    """Our chat template, and another prompt where the agent says REQUEST: nothing but examples.

    SmolLM2 calls no tool that it is only told of, but it goes on with a pattern. What it writes is
    sampled and read by the server like any other answer.
    """
    examples = f"<|im_start|>user\n{REQUEST}<|im_end|>\n<|im_start|>assistant\n"
    prompt = f"{examples}{CALL}<|im_end|>\n" * 4 + examples
    asked = f"messages[-1].role == 'user' and messages[-1].content == {json.dumps(REQUEST)}"
    usual = (ROOT / "tools/chatml_tools.jinja").read_text(encoding="utf-8")
    path.write_text(
        f"{{%- if {asked} %}}{{{{- {json.dumps(prompt)} }}}}{{%- else %}}{usual}{{%- endif %}}"
    )
    return path


def user_server(directory: Path, *, template: Path, log: Path) -> VllmServer:
    """A server for users with tools (telecom); not started."""
    return VllmServer(
        directory,
        log=log,
        start_timeout_s=600.0,
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},  # GiB: 46,000 tokens of SmolLM2
        args=(
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--chat-template", str(template)),
            *("--override-generation-config", json.dumps({"max_new_tokens": MAX_NEW_TOKENS})),
        ),
    )


class Witness(ThreadingHTTPServer):
    """Passes requests on to a server and keeps them, with the answers.

    Attributes:
        seen: for each request its body, its headers and the answer's body.
    """

    daemon_threads = True

    def __init__(self, server: VllmServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = server.url.removesuffix("/v1")
        self.seen: list[tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = []
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> Witness:
        self.thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    def said(self) -> list[str]:
        """The texts that the server answered."""
        replies = [answer["choices"][0]["message"] for _, _, answer in self.seen]
        return [reply["content"] for reply in replies if not reply.get("tool_calls")]


class _Handler(BaseHTTPRequestHandler):
    server: Witness

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = urllib.request.Request(
            self.server.target + self.path, body, {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=600) as reply:
                answer = reply.read()
        except urllib.error.HTTPError as error:
            self.send_error(error.code)
            return
        except OSError:
            self.send_error(502)
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append((json.loads(body), headers, json.loads(answer)))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass
