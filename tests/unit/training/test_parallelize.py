"""FSDP2 over two gloo ranks: what is written into the shards is what the next forward uses."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.attention.plan import MaskPlan
from components.models.smollm2 import smollm2
from components.training.parallelize import Sharding, World, build_policy, refresh, shard
from components.training.reference import ReferencePolicy
from tests.unit.models import tiny

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])


def logits(model):
    return model(TOKENS, mask=MaskPlan.causal(7), input_pos=torch.arange(7)[None])


def world(rank: int, size: int, device: str = "cpu") -> World:
    return World(rank=rank, size=size, device=torch.device(device))


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


def run_hybrid(rank: int, directory: Path, store: str) -> None:
    """Two copies of two shards: each rank its own tokens, gradients averaged over all four."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    everyone = world(rank, 4)
    make = partial(smollm2, directory)
    model, copy = build_policy(make, everyone, dtype=torch.float32, sharding=Sharding(shard_size=2))
    weight = model.layers[0].attn.q_proj.weight
    assert weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert weight.to_local().shape[0] == weight.shape[0] // 2

    def loss(of, number: int):
        tokens = TOKENS * (number + 1) % 50
        out = of(tokens, mask=MaskPlan.causal(7), input_pos=torch.arange(7)[None])
        return out.square().mean()

    (loss(model, rank) * everyone.size).backward()
    plain = smollm2(directory, dtype=torch.float32)
    sum(loss(plain, number) for number in range(4)).backward()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[name].grad, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    refresh(copy, model)
    for name, p in copy.named_parameters():
        assert torch.equal(p, expected[name] * 2.0)
    dist.destroy_process_group()


@pytest.mark.slow
def test_copies_of_shards_give_the_gradients_of_all_ranks_together(tmp_path):
    directory = tiny.write(tmp_path / "model")
    mp.spawn(run_hybrid, args=(directory, str(tmp_path / "store")), nprocs=4)


@pytest.mark.parametrize(
    ("sharding", "ranks", "device", "message"),
    [
        (Sharding(shard_size=1), 1, "cpu", r"sharding\.shard_size = 1: nothing is sharded"),
        (Sharding(shard_size=3), 4, "cpu", r"sharding\.shard_size = 3: must divide .* 4"),
        (Sharding(cpu_offload=True), 2, "cpu", r"cpu_offload = true: needs device cuda"),
        (Sharding(cpu_offload=True), 1, "cuda", r"cpu_offload = true: needs FSDP2"),
    ],
)
def test_a_sharding_that_does_not_fit_is_refused(sharding, ranks, device, message):
    with pytest.raises(ValueError, match=message):
        sharding.check(world(0, ranks, device))
    Sharding(shard_size=2).check(world(0, 4))


def test_an_engine_that_samples_meanwhile_has_trainable_weights_of_its_own(tmp_path):
    directory = tiny.write(tmp_path / "model")

    def make(dtype):
        model = smollm2(directory, dtype=dtype)
        model.layers[0].requires_grad_(False)
        return model

    model, copy = build_policy(make, World.alone(), dtype=torch.float32, engine_apart=True)
    trained = dict(model.named_parameters())
    for name, param in copy.named_parameters():
        shared = param is trained[name]
        assert shared == (not trained[name].requires_grad), name  # the frozen base is not doubled
    before = logits(copy)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.1
    assert torch.equal(logits(copy), before)
    assert not any(p.requires_grad for name, p in copy.named_parameters() if "layers.0" not in name)
    refresh(copy, model)
    assert torch.equal(logits(copy), logits(model))
    model, copy = build_policy(make, World.alone(), dtype=torch.float32)
    assert copy is model
    with pytest.raises(ValueError, match="compile = true: must be false"):
        build_policy(make, World.alone(), dtype=torch.float32, compile=True, engine_apart=True)
