"""A server with the endpoints of vLLM 0.32 that the engine uses, and faults on order.

It serves real weights, which it reads from the files that it is sent, with transformers: nothing of
ours computes its answers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

GENERATE = "/inference/v1/generate"
RELOAD = "/collective_rpc"
LOAD_LORA = "/v1/load_lora_adapter"

Fault = Callable[["Handler"], bool]
"""Does something with a request; whether that was all of the answer."""


def status(code: int) -> Fault:
    def answer(handler: Handler) -> bool:
        handler.reply({"error": {"message": "broken on order"}}, code=code)
        return True

    return answer


def text(body: str) -> Fault:
    def answer(handler: Handler) -> bool:
        handler.reply(body)
        return True

    return answer


def hang_up(handler: Handler) -> bool:
    handler.close_connection = True
    handler.connection.close()
    return True


def slow(seconds: float) -> Fault:
    def wait(handler: Handler) -> bool:
        time.sleep(seconds)
        return False

    return wait


def held(event: threading.Event) -> Fault:
    def wait(handler: Handler) -> bool:
        assert event.wait(30.0)
        return False

    return wait


class FakeVLLM(ThreadingHTTPServer):
    """One server.

    Attributes:
        faults: by path, taken one by one; None stands for a sound answer.
        seen: path and body of each request.
        missing: endpoints that are not there.
        deaf: paths that answer as if all were well and do nothing.
        config: what ``/server_info`` says of it.
    """

    daemon_threads = True

    def __init__(self, directory: Path, *, context: int = 64) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.directory, self.context = directory, context
        self.faults: dict[str, list[Fault | None]] = {}
        self.seen: list[tuple[str, Any]] = []
        self.missing: set[str] = set()
        self.deaf: set[str] = set()
        self.scale_out, self.dense_lock = True, threading.Lock()
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.config: dict[str, Any] = {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "scheduler_config": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            "device_config": {"device": "cpu"},
            "lora_config": {"max_lora_rank": 16},
        }
        self.restart()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def restart(self) -> None:
        """Forget everything that it was sent, as a server that was started anew."""
        self.base = load_file(self.directory / "model.safetensors")
        self.models = {"base": self._model(self.base)}
        self.version = "default"
        self.cached = False
        self.resets = 0

    def _model(self, state: dict[str, torch.Tensor]) -> Any:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.directory))
        problems = model.load_state_dict(state, strict=False)
        assert not problems.unexpected_keys
        assert set(problems.missing_keys) <= {"lm_head.weight"}
        model.tie_weights()
        return model.eval()

    def reload(self, directory: Path) -> None:
        self.base = load_file(directory / "model.safetensors")
        self.models["base"] = self._model(self.base)

    def load_adapter(self, name: str, directory: Path) -> None:
        """W + alpha / r * B A, the definition of LoRA."""
        config = json.loads((directory / "adapter_config.json").read_text())
        state = dict(self.base)
        tensors = load_file(directory / "adapter_model.safetensors")
        for key, a in tensors.items():
            if ".lora_A." not in key:
                continue
            b = tensors[key.replace(".lora_A.", ".lora_B.")]
            target = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            state[target] = state[target] + config["lora_alpha"] / config["r"] * (b @ a)
        self.models[name] = self._model(state)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    def rollout_contexts(self) -> list[tuple[int, ...]]:
        """Token ids of the requests that sampled a turn."""
        return [
            tuple(body["token_ids"])
            for path, body in self.seen
            if path == GENERATE and "seed" in body["sampling_params"]
        ]

    def __enter__(self) -> FakeVLLM:
        self.thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()

    @torch.no_grad()
    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        version = self.version  # before the weights: never a name newer than they are
        model = self.models.get(body["model"])
        if model is None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        ids, params = list(body["token_ids"]), body["sampling_params"]
        if max(ids) >= model.config.vocab_size:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        prompt_logprobs = None
        with self.dense_lock:
            if params.get("prompt_logprobs") == 0:
                rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
                pairs = zip(ids[1:], rows, strict=False)
                given = [{str(i): {"logprob": float(row[i]), "rank": 1}} for i, row in pairs]
                prompt_logprobs = [None, *given]
            generator = torch.Generator().manual_seed(params.get("seed", 0))
            out, logprobs, reason = [], [], "length"
            while len(out) < params["max_tokens"]:
                row = model(torch.tensor([[*ids, *out]])).logits[0, -1].float()
                row = torch.log_softmax(row / (params["temperature"] or 1.0), -1)
                token = int(row.argmax())
                if params["temperature"]:
                    token = int(torch.multinomial(row.exp(), 1, generator=generator))
                out.append(token)
                logprobs.append({"token_id": token, "logprob": float(row[token])})
                if token in params.get("stop_token_ids", ()):
                    reason = "stop"
                    break
        choice = {
            "index": 0,
            "finish_reason": reason,
            "token_ids": out,
            "logprobs": {"content": logprobs} if "logprobs" in params else None,
            "weight_versions": [{"version": version, "start": 0, "end": len(out)}],
        }
        self.cached = True
        return 200, {"choices": [self.change(choice)], "prompt_logprobs": prompt_logprobs}


class Handler(BaseHTTPRequestHandler):
    server: FakeVLLM
    protocol_version = "HTTP/1.1"  # connections are kept, as vLLM's server does

    def do_GET(self) -> None:
        self.serve(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.serve(json.loads(body) if body else None)

    def serve(self, body: Any) -> None:
        server, path = self.server, self.path.split("?")[0]
        server.seen.append((path, body))
        if path in server.missing:
            self.reply({"detail": "Not Found"}, code=404)
            return
        fault = (server.faults.get(path) or [None]).pop(0)
        if fault is not None and fault(self):
            return
        posted = (GENERATE, RELOAD, LOAD_LORA, "/reset_prefix_cache", "/update_weight_version")
        if self.command == "GET" and path in posted:
            self.reply({"detail": "Method Not Allowed"}, code=405)
        elif path == "/v1/models":
            card = {"id": "base", "parent": None, "max_model_len": server.context}
            self.reply({"data": [card]})
        elif path == "/weight_info":
            self.reply({"weight_version": server.version})
        elif path == "/server_info":
            self.reply({"vllm_config": server.config})
        elif path == GENERATE:
            code, answer = server.generate(body) if server.scale_out else (403, {"error": "off"})
            self.reply(answer, code=code)
        elif path == "/reset_prefix_cache":
            server.cached, server.resets = False, server.resets + 1
            self.reply({"success": True})
        elif path == "/update_weight_version":
            server.version = body["new_version"]
            self.reply({"success": True})
        elif path == "/v1/unload_lora_adapter":
            found = server.models.pop(body["lora_name"], None)
            self.reply({}, code=200 if found else 404)
        elif path == RELOAD and body["method"] == "reload_weights":
            if path not in server.deaf:
                server.reload(Path(body["kwargs"]["weights_path"]))
            self.reply({"results": [None]})
        elif path == LOAD_LORA:
            if path in server.deaf:  # the new name for what it has already
                server.models[body["lora_name"]] = list(server.models.values())[-1]
            else:
                server.load_adapter(body["lora_name"], Path(body["lora_path"]))
            self.reply("Success", kind="text/plain")
        else:
            self.reply({"detail": "Not Found"}, code=404)

    def reply(self, answer: Any, *, code: int = 200, kind: str = "application/json") -> None:
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        try:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the client has hung up

    def log_message(self, format: str, *args: Any) -> None:
        pass
