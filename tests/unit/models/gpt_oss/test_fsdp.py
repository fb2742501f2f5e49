"""gpt-oss sharded by components.training.parallelize over two gloo ranks, against one process."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.attention.plan import MaskPlan
from components.models.gpt_oss import gpt_oss, lora_gpt_oss
from components.models.lora import adapters
from components.models.weights import hf_state
from components.training.model_metrics import model_metrics
from components.training.parallelize import World, clip_grad_norm, full_tensor, refresh, shard
from components.training.precision import MasterWeights
from tests.unit.rl.ledgers import item

from . import tiny

IDS = torch.randint(0, tiny.VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))


def build(directory, *, lora: bool):
    settings = {"dtype": torch.float32, "backend": "folded", "checkpoint_activations": True}
    if not lora:
        return gpt_oss(directory, **settings)
    torch.manual_seed(0)
    names = ["q_proj", "gate_up_proj", "down_proj"]
    model = lora_gpt_oss(directory, lora_rank=4, lora_alpha=8, lora_modules=names, **settings)
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_b.weight.normal_(std=0.1)
    return model


def step(model):
    logits = model(IDS, mask=MaskPlan.causal(24), input_pos=torch.arange(24)[None])
    logits.square().mean().backward()
    return logits.detach()


def run_rank(rank: int, directory, store: str, lora: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(rank=rank, size=2, device=torch.device("cpu"))
    alone = build(directory, lora=lora)
    expected = step(alone)
    model = build(directory, lora=lora)
    shard(model, world, dtype=torch.float32)
    assert torch.allclose(step(model), expected, atol=1e-4)
    assert model.step_metrics() == pytest.approx(alone.step_metrics())
    whole = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = full_tensor(parameter.grad)  # the mean of two equal ranks
            wanted = whole[name].grad
            assert torch.allclose(grad, wanted, atol=1e-4 * float(wanted.abs().max())), name

    # a step of the optimizer, the engine's copy refreshed, what is exported
    for one in (alone, model):
        masters = MasterWeights(one)
        clip_grad_norm(masters.parameters(), 1.0)
        torch.optim.SGD(masters.parameters(), lr=0.1).step()
        masters.publish()
    copy = build(directory, lora=lora)
    refresh(copy, model)
    exported, wanted = hf_state(copy), hf_state(alone)
    assert exported.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(exported[name], value, atol=1e-5), name
    gathered = hf_state(model, state={n: full_tensor(t) for n, t in model.state_dict().items()})
    assert all(torch.equal(gathered[name], exported[name]) for name in exported)

    # computing in bfloat16, as the recipe does: sinks and the router among the cast parameters
    half = build(directory, lora=lora)
    shard(half, world, dtype=torch.bfloat16)
    logits = step(half)
    assert (logits - expected).norm() < 0.2 * expected.norm()
    assert all(p.grad.dtype == torch.float32 for p in half.parameters() if p.requires_grad)
    items = [item("a", [9, 8, 7, 6], [5, 4, 3])] if rank == 0 else []  # one rank has none
    metrics = model_metrics(half, copy, items, world)
    assert 0 <= metrics["mismatch/route_frac"] <= metrics["mismatch/route_token_frac"] <= 1
    assert metrics["moe/load_max_frac"] <= 0.5
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_equal_one(tmp_path, lora):
    directory = tiny.write(tmp_path / "tiny")
    mp.spawn(run_rank, args=(directory, str(tmp_path / "store"), lora), nprocs=2)
