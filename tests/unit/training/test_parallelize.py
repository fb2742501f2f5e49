"""FSDP2 over two gloo ranks: what is written into the shards is what the next forward uses."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.attention.plan import MaskPlan
from components.models.smollm2 import smollm2
from components.training.parallelize import World, refresh, shard
from components.training.reference import ReferencePolicy
from tests.unit.models import tiny

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])


def logits(model):
    return model(TOKENS, mask=MaskPlan.causal(7), input_pos=torch.arange(7)[None])


def run_rank(rank: int, directory: Path, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(rank=rank, size=2, device=torch.device("cpu"))
    model, plain, start = (smollm2(directory, dtype=torch.float32) for _ in range(3))
    shard(model, world, dtype=torch.float32)
    reference = ReferencePolicy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        logits(model).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            refresh(plain, model)
            moved = logits(plain)
            assert not torch.allclose(moved, logits(start), atol=1e-4)  # the step did something
            assert torch.allclose(logits(model), moved, atol=1e-5)
            with reference.swapped_in():
                assert torch.allclose(logits(model), logits(start), atol=1e-5)
        # with the graph, right after the swap back: the policy again
        assert torch.allclose(logits(model), moved, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_swapped_in_reference_is_seen_by_every_forward(tmp_path):
    directory = tiny.write(tmp_path / "model")
    mp.spawn(run_rank, args=(directory, str(tmp_path / "store")), nprocs=2)
