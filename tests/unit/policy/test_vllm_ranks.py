"""Two gloo ranks, one server or two: who sends what, and that all ranks stop together."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.policy.engine import EngineError
from components.policy.vllm import VLLMEngine
from tests.unit.models import tiny
from tests.unit.policy.test_vllm import full_model, request, sampled, step, trainer_logprobs
from tests.unit.policy.vllm_fake import RELOAD, FakeVLLM


def run_rank(rank: int, directory: Path, store: str, addresses: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = full_model(directory)
    engine = VLLMEngine(
        model, max_tokens=64, max_batch_size=4, addresses=addresses, probe_bound=1e-4
    )
    torch.manual_seed(7)
    step(model, 0.05)
    metrics = engine.sync(1)
    asked = request(f"rank{rank}", context=(40 + rank, 8, 9), temperature=1.0)
    (turn,) = map(sampled, engine.generate([asked]))
    expected = trainer_logprobs(model, asked.context, turn, 1.0)
    assert list(turn.logprobs) == pytest.approx(expected, abs=1e-4)
    assert turn.policy_version == 1
    (directory / f"rank{rank}.json").write_text(json.dumps(metrics))
    dist.barrier()
    if rank == 0:
        open(f"{store}.deaf", "w").close()
    step(model, 0.05)
    # The servers are told to be deaf by the parent; both ranks see the one error.
    while not Path(f"{store}.ready").exists():
        time.sleep(0.05)
    try:
        engine.sync(2)
    except EngineError as error:
        (directory / f"error{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


@pytest.mark.parametrize("num_servers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks(num_servers, tmp_path):
    tiny.write_narrow(tmp_path, max_position_embeddings=64)
    store = str(tmp_path / "store")
    servers = [FakeVLLM(tmp_path) for _ in range(num_servers)]
    for server in servers:
        server.__enter__()
    try:
        context = mp.spawn(
            run_rank,
            args=(tmp_path, store, [server.address for server in servers]),
            nprocs=2,
            join=False,
        )
        while not Path(f"{store}.deaf").exists():
            assert not context.join(timeout=0.1)
        servers[-1].deaf.add(RELOAD)  # one of two says that it has the weights and has not
        Path(f"{store}.ready").touch()
        while not context.join(timeout=1.0):
            pass
    finally:
        for server in servers:
            server.__exit__()
    loads = [sum(path == RELOAD and body is not None for path, body in s.seen) for s in servers]
    assert loads == [3] * num_servers, "each server is sent its weights once per sync"
    sampled_by = [{context[0] for context in s.rollout_contexts()} for s in servers]
    assert sampled_by == ([{40, 41}] if num_servers == 1 else [{40}, {41}])
    metrics = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert metrics[0] == metrics[1]
    errors = {(tmp_path / f"error{rank}.txt").read_text() for rank in range(2)}
    assert len(errors) == 1
    assert servers[-1].address in errors.pop()
