"""Compiled layers are eager layers: one graph each, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from components.attention.plan import MaskPlan
from components.models.gpt_oss import gpt_oss

from . import tiny

IDS = torch.randint(0, tiny.VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def directory(tmp_path):
    return tiny.write(tmp_path / "tiny")


def step(model, num_tokens=40):
    positions = torch.arange(num_tokens)[None]
    logits = model(IDS[:, :num_tokens], mask=MaskPlan.causal(num_tokens), input_pos=positions)
    logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return logits.detach(), gradients


def build(directory, *, dtype=torch.float32, **settings):
    return gpt_oss(directory, dtype=dtype, backend="folded", **settings)


def assert_close(got, expected, *, tolerance):
    assert (got[0] - expected[0]).norm() <= tolerance * expected[0].norm()
    for name, gradient in got[1].items():
        wanted = expected[1][name]
        assert (gradient - wanted).norm() <= tolerance * wanted.norm(), name


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_is_one_graph_with_the_numbers_of_eager(directory, recompute):
    expected = step(build(directory))
    model = build(directory, checkpoint_activations=recompute)
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert_close(step(model), expected, tolerance=1e-5)
    assert all(int(layer.mlp.load.sum()) == 80 * (1 + recompute) for layer in model.layers)


def test_other_lengths_and_loads_do_not_compile_anew(directory):
    model = build(directory)
    torch._dynamo.reset()
    counter = CompileCounter()
    layer = torch.compile(model.layers[0], backend=counter, fullgraph=True)
    generator = torch.Generator().manual_seed(1)
    for num_tokens in (40, 33, 27, 21, 36):  # every length routes to other experts
        x = torch.randn(1, num_tokens, tiny.WIDTH, generator=generator)
        positions = torch.arange(num_tokens)[None]
        layer(x, mask=MaskPlan.causal(num_tokens), input_pos=positions)
    assert counter.frame_count <= 2  # one for the first length, one for all others


def test_grouped_products_compile_in_bfloat16_and_say_so_in_fp32(directory):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 40, tiny.WIDTH, generator=generator).to(torch.bfloat16)
    moe = build(directory, dtype=torch.bfloat16, experts="grouped").layers[0].mlp
    expected = moe(x).detach()
    torch._dynamo.reset()
    got = torch.compile(moe, backend="aot_eager", fullgraph=True)(x).detach()
    assert (got - expected).norm() <= 2**-7 * expected.norm()
    moe = build(directory, experts="grouped").layers[0].mlp
    with pytest.raises(Exception, match=r"compiled code has none for torch\.float32"):
        torch.compile(moe, backend="aot_eager", fullgraph=True)(x.float())


@pytest.mark.slow
def test_inductor_gives_the_numbers_of_eager(directory):
    expected = step(build(directory))
    model = build(directory)
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(fullgraph=True)
    assert_close(step(model), expected, tolerance=1e-4)
