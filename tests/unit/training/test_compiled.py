"""Compiled layers: the same numbers, one graph for all layers and lengths, a clear refusal."""

import logging
import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex

from components.attention import flex
from components.attention.plan import MaskPlan
from components.models.conversion import from_hf
from components.models.smollm2 import smollm2
from components.rl.forward import packed_logprobs
from components.rl.losses import GRPOLoss
from components.rl.packing import PackedBatch, PackItem, pack
from components.training import compiled
from components.training.compiled import compile_layers
from components.training.parallelize import World, build_policy
from tests.unit.models import tiny
from tests.unit.rl.ledgers import item
from tests.unit.training import dense_loss

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


def drawn(seed: int) -> list[PackItem]:
    """One to three groups of two rollouts with two sampled turns each."""
    rng = random.Random(seed)

    def ids(most: int) -> list[int]:
        return [rng.randrange(50) for _ in range(rng.randint(1, most))]

    items, system = [], ids(4)
    for group in range(1 + seed % 3):
        task = ids(4)
        for member in (0, 1):
            prompt, turns = [*system, *task], [ids(6), ids(3), ids(6)]
            num_tokens = len(prompt) + sum(map(len, turns))
            # ratios of exp(-4) to exp(4): the clip acts on both sides
            logprobs = [min(rng.gauss(-4, 1.5), -0.01) for _ in range(num_tokens)]
            advantage = (1.0, -0.5)[member]
            items.append(
                item(f"{group}/{member}", prompt, *turns, advantage=advantage, logprobs=logprobs)
            )
    return items


def row(seed: int) -> PackedBatch:
    """Its length depends on the seed."""
    (batch,) = pack(drawn(seed), tokens_per_batch=200)
    return batch


def loss(model, seed: int) -> torch.Tensor:
    """GRPO's, with the clip and the KL term, of a packed row; the reference is 0.9 of the sampler's
    log-probabilities."""
    batch = row(seed)
    logprobs, _ = packed_logprobs(
        model,
        batch,
        plan=MaskPlan.from_tree(batch.tree),
        temperature=dense_loss.TEMPERATURE,
        chunk_size=7,
    )
    out = GRPOLoss(beta=0.1)(
        logprobs,
        old_logprobs=batch.generator_logprobs,
        advantages=batch.advantages,
        denominator=logprobs.numel(),
        ref_logprobs=0.9 * batch.generator_logprobs,
    )
    return out.loss


def gradients(model, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and its gradients."""
    model.zero_grad()
    value = loss(model, seed)
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def close(found, expected) -> None:
    """Loss and gradients to 1e-5, of the largest entry where that is above 1; none is zero."""
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5, abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        largest = float(gradient.abs().max())
        assert largest > 0
        apart = float((found[1][name].double() - gradient.double()).abs().max())
        assert apart <= 1e-5 * max(1.0, largest), name


@pytest.mark.parametrize("checkpointed", [False, True])
def test_twenty_rows_make_no_further_graph(tmp_path, counter, checkpointed):
    """Two captures at the first row, then none; loss and gradients are the eager ones."""
    directory = tiny.write(tmp_path / "model")
    build = partial(smollm2, directory, dtype=torch.float32, checkpoint_activations=checkpointed)
    eager, model = build(), build()
    assert compile_layers(model, compile=True, device=CPU)
    assert len({len(row(seed).tokens) for seed in range(20)}) >= 15
    for seed in range(20):
        if seed == 1:
            assert 1 <= counter.frame_count <= 2
            counter.frame_count = 0
        close(gradients(model, seed), gradients(eager, seed))
    assert counter.frame_count == 0
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_layers_are_one_graph_too(tmp_path, counter, monkeypatch):
    """Two captures for both layers and all twenty rows, and the loss and gradients of dense layers.

    FlexAttention trains on a CPU only when torch's check of the device is gone.
    """
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    monkeypatch.setattr(flex, "check_trainable", lambda *args: None)
    directory = tiny.write(tmp_path / "model")
    eager, model = (
        smollm2(directory, dtype=torch.float32, backend=name) for name in ("reference", "flex")
    )
    assert compile_layers(model, compile=True, device=CPU)
    for seed in range(20):
        close(gradients(model, seed), gradients(eager, seed))
    assert 1 <= counter.frame_count <= 2
    assert not counters["graph_break"]


def dense(seed: int, config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same of transformers' model: each rollout alone, fp64."""
    items, theirs = drawn(seed), dense_loss.llama(tiny.tensors())
    generators = dense_loss.generators(items)
    value = dense_loss.dense_loss(
        dense_loss.tables(theirs, items),
        generators,
        [0.9 * logprobs for logprobs in generators],
        items,
        {"ratio": "generator", "beta": 0.1},
    )
    assert value is not None
    value.backward()
    grads = {n: p.grad for n, p in theirs.named_parameters() if n != "lm_head.weight"}
    return value.detach(), from_hf(grads, config)


@pytest.mark.compile
def test_machine_code_gives_the_eager_loss_and_gradients(tmp_path):
    """And those of the dense oracle, so that not both are wrong."""
    directory = tiny.write(tmp_path / "model")
    eager, model = (smollm2(directory, dtype=torch.float32) for _ in range(2))
    compile_layers(model, compile=True, device=CPU)
    for seed in range(20):
        found = gradients(model, seed)
        close(found, gradients(eager, seed))
        close(found, dense(seed, model.config))
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
        value, shards = gradients(model, seed)
        found = value, {name: gradient.full_tensor() for name, gradient in shards.items()}
        close(found, gradients(eager, seed))
    assert counter.frame_count == 0
    assert not counters["graph_break"]
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_layers_are_one_graph_too(tmp_path):
    """FSDP2's hooks stay outside the graph: they would break it."""
    directory = tiny.write(tmp_path / "model")
    mp.spawn(run_rank, args=(directory, str(tmp_path / "store")), nprocs=2)
