"""SmolLM2 behind a real vLLM server is the policy that is trained."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from components.attention.plan import MaskPlan
from components.models.smollm2 import lora_smollm2, smollm2
from components.policy.vllm import VLLMEngine
from components.rollout.types import SampleFailure, SampleRequest, SampleResult
from tests.recipes.runs import played, rows
from tests.vllm.policy_runs import BOUND, policy_server, run
from tools.serve_vllm import VllmServer

pytestmark = pytest.mark.vllm

MODULES = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    adapters = ("--enable-lora", "--max-lora-rank", "8")
    with policy_server(tmp_path_factory.mktemp("vllm") / "log", *adapters) as running:
        print(f"{running.url} after {running.start_s:.0f} s")
        yield running


def make(model: Any, server: VllmServer, **settings: Any) -> VLLMEngine:
    return VLLMEngine(model, max_tokens=2048, max_batch_size=8, addresses=[server.url], **settings)


def requests(temperature: float, *, num: int = 4) -> list[SampleRequest]:
    """Prompts whose answers are long enough to compare."""
    return [
        SampleRequest(
            rollout_id=f"r{i}",
            context=(1, 4093, 198, 2683, 359, 260, 100 + i),
            shared_len=3,
            max_new_tokens=24,
            stop_ids=frozenset({2}),
            temperature=temperature,
            seed=i,
        )
        for i in range(num)
    ]


@torch.no_grad()
def gap(model: Any, asked: SampleRequest, turn: SampleResult | SampleFailure) -> float:
    """Mean |server - trainer| over a turn, under the tempered distribution."""
    assert isinstance(turn, SampleResult)
    ids = torch.tensor([*asked.context, *turn.ids])
    positions = torch.arange(len(ids))
    logits = model(
        ids[None], mask=MaskPlan.causal(len(ids)), input_pos=positions[None], index=positions
    ).float()
    start = len(asked.context)
    trained = F.log_softmax(logits.view(len(ids), -1)[start - 1 : -1] / asked.temperature, -1)
    trained = trained.gather(1, ids[start:, None]).squeeze(1)
    return float((trained - torch.tensor(turn.logprobs)).abs().mean())


@torch.no_grad()
def step(model: torch.nn.Module, share: float) -> None:
    """Noise on every trained matrix but the embeddings, as a share of its spread."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() == 2 and "embed" not in name:
            size = share * (float(parameter.std()) or 0.02)
            parameter.add_(torch.randn_like(parameter), alpha=size)


def test_full_weights_and_tempered_log_probabilities(server):
    model = smollm2(server.directory, dtype=torch.bfloat16)
    engine = make(model, server)
    for version, share in enumerate((0.0, 0.1)):
        step(model, share)
        metrics = engine.sync(version)
        assert metrics["sync/gap"] < BOUND
        for temperature in (0.5, 1.0, 2.0):
            turns = engine.generate(requests(temperature))
            gaps = [gap(model, *pair) for pair in zip(requests(temperature), turns, strict=True)]
            print(f"version {version}, temperature {temperature}: {gaps}, {metrics}")
            assert max(gaps) < BOUND, (temperature, gaps)
    assert metrics["sync/change"] > 2 * BOUND, "the old weights are far away"
    engine.generate(requests(1.0))
    first = engine.generate(requests(1.0))
    second = engine.generate(requests(1.0))
    assert [t.ids for t in first] == [t.ids for t in second]  # type: ignore[union-attr]

    server.kill()  # and what it was sent is lost with it
    lost = engine.generate(requests(1.0, num=1))
    assert isinstance(lost[0], SampleFailure)
    server.start()
    turns = engine.generate(requests(1.0))
    assert max(gap(model, *pair) for pair in zip(requests(1.0), turns, strict=True)) < BOUND
    metrics = engine.sync(2)
    assert (metrics["engine/renewed_servers"], metrics["engine/lost_turns"]) == (1, 1)


def test_adapters_alone(server):
    base = smollm2(server.directory, dtype=torch.bfloat16)
    make(base, server)  # the base as it is on disk: the test before has sent another
    model = lora_smollm2(
        server.directory, dtype=torch.bfloat16, lora_rank=8, lora_alpha=16.0, lora_modules=MODULES
    )
    engine = make(model, server)
    for version, share in ((1, 1.0), (2, 0.5)):
        step(model, share)
        metrics = engine.sync(version)
        print(metrics)
        assert metrics["sync/gap"] < BOUND
        turns = engine.generate(requests(1.0))
        gaps = [gap(model, *pair) for pair in zip(requests(1.0), turns, strict=True)]
        assert max(gaps) < BOUND
        assert max(gap(base, *pair) for pair in zip(requests(1.0), turns, strict=True)) > BOUND


def test_three_steps_of_mock(server, tmp_path):
    run(tmp_path / "run", server.url, eval="null")
    log = [row for row in rows(tmp_path / "run") if "time/step_s" in row]
    assert [row["step"] for row in log] == [1, 2, 3]
    moved = [row for row in log if row["pack/trained_tokens"]]
    assert moved, "no step had anything to learn from"
    for row in log:
        print({k: v for k, v in row.items() if k.startswith(("sync/", "engine/", "mismatch/"))})
        assert row["rollout/error_frac"] == 0
        assert 0 < row["sync/gap"] < BOUND
        assert (row["sync/trainer_change"] > 0) == (row["pack/trained_tokens"] > 0)
        assert (row["sync/change"] > 0) == (row["sync/trainer_change"] > 0)
        assert row["engine/lost_turns"] == row["engine/renewed_servers"] == 0
    for row in moved:
        assert 0 <= row["mismatch/kl"] < 0.01
    records = played(tmp_path / "run")
    assert {record["step"] for record in records} == {1, 2, 3}
    for record in records:
        assert record["turns"]
        for turn in record["turns"]:
            assert turn["policy_version"] == record["step"] - 1
            assert len(turn["ids"]) == len(turn["logprobs"])


def test_old_weights_stop_the_run(server, tmp_path):
    """The server says that it has loaded what the first step made, and has not."""
    with Deaf(server, hears=2) as deaf:
        err = run(
            tmp_path / "run",
            deaf.url,
            code=None,
            checker="components.envs.seeded_share.SeededShare",
            checker__seed=1,
            checker__size=0.5,
            eval="null",
        )
    assert "still serves the old weights" in err
    assert deaf.num_loads == 3
    assert deaf.sampled_after == 0, "no token was sampled from them"
    assert not (tmp_path / "run" / "step_2").exists()


class Deaf(ThreadingHTTPServer):
    """Passes requests on to a server, but for weights: after some it only says that it did.

    Attributes:
        num_loads: how often it was sent weights.
        sampled_after: turns that were asked for after it stopped listening.
    """

    daemon_threads = True

    def __init__(self, server: VllmServer, *, hears: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.hears = server.url.removesuffix("/v1"), hears
        self.num_loads = self.sampled_after = 0
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> Deaf:
        self.thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Deaf

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/collective_rpc":
            self.server.num_loads += 1
            if self.server.num_loads > self.server.hears:
                self._reply(200, "application/json", b'{"results": [null]}')
                return
        asked = json.loads(body) if body else {}
        if "seed" in asked.get("sampling_params", {}):
            self.server.sampled_after += self.server.num_loads > self.server.hears
        self._pass_on(body)

    def _pass_on(self, body: bytes | None) -> None:
        request = urllib.request.Request(
            self.server.target + self.path,
            body,
            {"Content-Type": "application/json"},
            method=self.command,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=600) as answer:
                self._reply(answer.status, answer.headers["Content-Type"], answer.read())
        except urllib.error.HTTPError as error:
            self._reply(error.code, error.headers["Content-Type"], error.read())

    def _reply(self, status: int, kind: str | None, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
