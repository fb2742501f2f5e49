"""The fast pointwise modules against torchtune's and against the formulas in float64."""

import pytest
import torch
import torchtune.modules as tune
from torch import nn

from components.models.layers import FeedForward, RMSNorm, with_fast_layers


def rel(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_the_formula_in_float64(dtype):
    torch.manual_seed(0)
    x = (torch.randn(2, 7, 24) * 3).to(dtype).requires_grad_()
    norm = RMSNorm(24, eps=1e-5)
    norm.scale.data = (1 + torch.randn(24)).to(dtype)
    upstream = torch.randn(2, 7, 24).to(dtype)

    wide = x.detach().double().requires_grad_()
    scale = norm.scale.detach().double().requires_grad_()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
    grads = torch.autograd.grad(expected, [wide, scale], upstream.double())

    out = norm(x)
    out.backward(upstream)
    # computed in float32 and rounded once: half a unit in the last place of the dtype
    limit = 1e-6 if dtype == torch.float32 else 2**-8
    assert out.dtype == dtype
    assert rel(out, expected) < limit
    assert rel(x.grad, grads[0]) < limit
    assert rel(norm.scale.grad, grads[1]) < limit


def test_rms_norm_of_bfloat16_is_rounded_once_as_torchtune_does():
    torch.manual_seed(0)
    ours, theirs = RMSNorm(64, eps=1e-5), tune.RMSNorm(64, eps=1e-5)
    ours.scale.data = theirs.scale.data = 1 + torch.randn(64)
    x = torch.randn(500, 64).bfloat16()
    differing = (ours(x) != theirs(x)).float().mean()
    assert differing < 1e-3  # sums in another order, seen after rounding in a few places


def test_rms_norm_leaves_a_frozen_scale_alone():
    norm = RMSNorm(8)
    norm.scale.requires_grad_(False)
    x = torch.randn(3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert norm.scale.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feed_forward_equals_torchtunes(dtype):
    torch.manual_seed(0)
    parts = {
        name: nn.Linear(*shape, bias=False).to(dtype)
        for name, shape in [
            ("gate_proj", (24, 40)),
            ("up_proj", (24, 40)),
            ("down_proj", (40, 24)),
        ]
    }
    ours, theirs = FeedForward(**parts), tune.FeedForward(**parts)
    x = torch.randn(5, 24).to(dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = ours(a), theirs(b)
    assert torch.equal(out, expected)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    grads = {name: part.weight.grad.clone() for name, part in parts.items()}
    for part in parts.values():
        part.weight.grad = None
    expected.backward(upstream)
    limit = 1e-6 if dtype == torch.float32 else 2**-8
    assert rel(a.grad, b.grad) < limit
    for name, part in parts.items():
        assert rel(grads[name], part.weight.grad) < limit


def kept_bytes(module, x):
    """Bytes of distinct storages that the graph keeps for the backward pass, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    assert out.requires_grad
    return sum(size for size, _ in kept.values())


def test_less_is_kept_for_the_backward_pass():
    x = torch.randn(512, 64).bfloat16().requires_grad_()
    x_bytes = 512 * 64 * 2
    norm = RMSNorm(64).bfloat16()
    assert kept_bytes(norm, x) == x_bytes + 512 * 4
    linears = [nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)]
    mlp = FeedForward(
        gate_proj=linears[0], up_proj=linears[1], down_proj=nn.Linear(128, 64, bias=False)
    ).bfloat16()
    wide = 512 * 128 * 2
    assert kept_bytes(mlp, x) == x_bytes + 3 * wide  # gate, up and their product


@pytest.mark.slow
def test_compiled_layers_agree_with_eager_ones():
    torch.manual_seed(0)
    norm = RMSNorm(16)

    x = torch.randn(1, 12, 16)
    assert torch.allclose(torch.compile(norm)(x), norm(x), atol=1e-5)


def test_torchtunes_modules_are_replaced_with_their_parameters():
    def gated(activation: nn.Module) -> tune.FeedForward:
        linears = [nn.Linear(8, 8) for _ in range(3)]
        parts = dict(zip(("gate_proj", "down_proj", "up_proj"), linears, strict=True))
        return tune.FeedForward(**parts, activation=activation)

    model = nn.Sequential(tune.RMSNorm(8, eps=1e-3), gated(nn.SiLU()), gated(nn.GELU()))
    nn.init.normal_(model[0].scale)
    x = torch.randn(5, 8)
    expected, names = model(x), dict(model.named_parameters())
    assert with_fast_layers(model) is model
    assert [type(module) for module in model] == [RMSNorm, FeedForward, tune.FeedForward]
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)
    assert all(p is names[name] for name, p in model.named_parameters())
