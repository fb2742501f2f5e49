"""PolicyModel as the root of FSDP2: two gloo ranks against one process."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.attention.plan import MaskPlan
from components.models.from_hf import policy
from components.models.lora import adapters
from components.models.smollm2 import lora_smollm2, smollm2
from components.models.weights import hf_state

from . import tiny

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])
INDEX = torch.tensor([1, 4, 5])


def build(directory: Path, *, kind: str):
    settings = {"dtype": torch.float32, "backend": "folded", "checkpoint_activations": True}
    if kind == "sinks":
        return policy(directory, sinks=0.5, window=[2, None], prefix=1, **settings)
    if kind == "full":
        return smollm2(directory, **settings)
    torch.manual_seed(0)
    model = lora_smollm2(
        directory, lora_rank=4, lora_alpha=8, lora_modules=["q_proj", "w2"], **settings
    )
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_b.weight.normal_()
    return model


def step(model):
    logits = model(TOKENS, mask=MaskPlan.causal(7), input_pos=torch.arange(7)[None], index=INDEX)
    logits.square().mean().backward()
    return logits.detach()


def run_rank(rank: int, directory: Path, store: str, kind: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = build(directory, kind=kind)
    expected = step(alone)
    model = build(directory, kind=kind)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert isinstance(model.tok_embeddings.weight, DTensor)
    assert torch.allclose(step(model), expected, atol=1e-6)
    whole = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            grad = parameter.grad.full_tensor()  # the mean of two equal ranks
            assert torch.allclose(grad, whole[name].grad, atol=1e-5), name
    # a gathered state dict is what is exported
    state = {name: t.full_tensor() for name, t in model.state_dict().items()}
    exported, wanted = hf_state(model, state=state), hf_state(alone)
    assert all(torch.equal(exported[name], wanted[name]) for name in wanted)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora", "sinks"])
def test_two_ranks_equal_one(tmp_path, kind):
    directory = tiny.write(tmp_path / "tiny")
    if kind == "sinks":
        directory = tiny.write_narrow(tmp_path / "narrow")
    mp.spawn(run_rank, args=(directory, str(tmp_path / "store"), kind), nprocs=2)
