"""Attention with sinks under FSDP2, compiled and checkpointed: two gloo ranks against one alone."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.checkpoint import checkpoint

from components.attention.plan import MaskPlan

from .cases import random_tree
from .test_sink_attention import build, hidden


def run_rank(rank: int, store: str, compiled: bool, checkpointed: bool) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tree = random_tree(3, num_nodes=8, max_len=30)
    call = {"mask": MaskPlan.from_tree(tree), "input_pos": tree.position[None]}
    x = hidden(len(tree))
    whole = build(window=13, backend="folded")
    expected = whole(x, **call)
    expected.square().sum().backward()
    x_grad, x.grad = x.grad, None
    module = build(window=13, backend="folded")
    if compiled:
        module.compile(fullgraph=True, backend="aot_eager")
    fully_shard(module)
    if checkpointed:
        out = checkpoint(module, x, **call, use_reentrant=False)
    else:
        out = module(x, **call)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, x_grad, rtol=1e-5, atol=1e-5)
    assert isinstance(module.sinks, DTensor)
    for (name, got), want in zip(module.named_parameters(), whole.parameters(), strict=True):
        assert want.grad.abs().max() > 0, name
        # the mean of two equal ranks
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_two_ranks_equal_one(tmp_path, compiled, checkpointed):
    mp.spawn(run_rank, args=(str(tmp_path / "store"), compiled, checkpointed), nprocs=2)
