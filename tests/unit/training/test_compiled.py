"""Compiled layers: the same numbers, one graph for all layers and lengths, a clear refusal."""

import logging
import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from components.attention.plan import MaskPlan
from components.models.smollm2 import smollm2
from components.training import compiled
from components.training.compiled import compile_layers
from components.training.parallelize import World, build_policy
from tests.unit.attention.cases import random_tree
from tests.unit.models import tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counter(monkeypatch):
    """Traces as usual, makes no machine code, counts the graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled.torch, "compile", partial(torch.compile, backend=counter))
    return counter


def loss(model, seed: int):
    """Of a packed row whose shape and length depend on the seed."""
    tree = random_tree(seed, num_nodes=1 + seed % 5, max_len=5 + seed % 3)
    tokens = torch.arange(len(tree))[None] * 7 % 50
    position = tree.position[None] % 32
    return model(tokens, mask=MaskPlan.from_tree(tree), input_pos=position).square().mean()


def gradients(model, seed: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model, seed).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_twenty_rows_make_no_further_graph(tmp_path, counter, checkpointed):
    """Two captures at the first row, then none; the gradients are the eager ones."""
    directory = tiny.write(tmp_path / "model")
    build = partial(smollm2, directory, dtype=torch.float32, checkpoint_activations=checkpointed)
    eager, model = build(), build()
    assert compile_layers(model, compile=True, device=CPU)
    for seed in range(20):
        if seed == 1:
            assert 1 <= counter.frame_count <= 2
            counter.frame_count = 0
        expected, found = gradients(eager, seed), gradients(model, seed)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)
    assert counter.frame_count == 0
    assert not counters["graph_break"]


@pytest.mark.compile
def test_machine_code_gives_the_eager_gradients(tmp_path):
    directory = tiny.write(tmp_path / "model")
    eager, model = (smollm2(directory, dtype=torch.float32) for _ in range(2))
    compile_layers(model, compile=True, device=CPU)
    for seed in (0, 3, 4):
        expected, found = gradients(eager, seed), gradients(model, seed)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_weights_keep_their_names(tmp_path, counter):
    directory = tiny.write(tmp_path / "model")
    eager, model = (smollm2(directory, dtype=torch.float32) for _ in range(2))
    compile_layers(model, compile=True, device=CPU)
    assert eager.state_dict().keys() == model.state_dict().keys()


def test_auto_stays_eager_on_a_cpu_and_says_so(tmp_path, counter, caplog):
    model = smollm2(tiny.write(tmp_path / "model"), dtype=torch.float32)
    with caplog.at_level(logging.INFO):
        assert not compile_layers(model, compile="auto", device=CPU)
    assert "compile on cpu: false (auto)" in caplog.text
    loss(model, 0)
    assert counter.frame_count == 0


def test_true_without_a_compiler_is_an_error(tmp_path, monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def nothing_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nothing_found)
    model = smollm2(tiny.write(tmp_path / "model"), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"compile: true, but no C\+\+ compiler .*compile: false"):
        compile_layers(model, compile=True, device=CPU)
    assert not compile_layers(model, compile=False, device=CPU)


def run_rank(rank: int, directory: Path, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(rank=rank, size=2, device=CPU)
    counter = CompileCounterWithBackend("aot_eager")
    compiled.torch.compile = partial(torch.compile, backend=counter)
    eager = smollm2(directory, dtype=torch.float32)
    model, _ = build_policy(partial(smollm2, directory), world, dtype=torch.float32, compile=True)
    for seed in range(5):
        if seed == 1:
            assert 1 <= counter.frame_count <= 2
            counter.frame_count = 0
        expected = gradients(eager, seed)
        for name, gradient in gradients(model, seed).items():
            torch.testing.assert_close(gradient.full_tensor(), expected[name], atol=1e-6, rtol=1e-5)
    assert counter.frame_count == 0
    assert not counters["graph_break"]
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_layers_are_one_graph_too(tmp_path):
    """FSDP2's hooks stay outside the graph: they would break it."""
    directory = tiny.write(tmp_path / "model")
    mp.spawn(run_rank, args=(directory, str(tmp_path / "store")), nprocs=2)
