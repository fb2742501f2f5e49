"""flex.py on a CPU: FlexAttention's eager path with its device check patched out."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from components.attention.flex import flex_attention_sink
from components.attention.plan import MaskPlan
from components.attention.reference import reference_attention

from .cases import inputs, oracle, random_tree, visible

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@pytest.fixture
def differentiable(monkeypatch):
    """Let the eager path differentiate on a CPU, which torch forbids because it is O(T^2)."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    monkeypatch.setattr("components.attention.flex.check_trainable", lambda *args: None)


@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (9, 0), (9, 4)])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_values_and_gradients_through_the_lse(differentiable, window, prefix, with_sinks):
    tree = random_tree(2, num_nodes=6, max_len=20)
    q, k, v, s, grad = inputs(len(tree), batch=2, dtype=torch.float32)
    sinks = s if with_sinks else None
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    out = flex_attention_sink(
        q,
        k,
        v,
        plan=MaskPlan.from_tree(tree),
        window=window,
        prefix=prefix,
        sinks=sinks,
        scale=0.3,
    )
    expected = oracle(q, k, v, sinks, visible(tree, window=window, prefix=prefix), 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    got = torch.autograd.grad(out, leaves, grad)
    want = torch.autograd.grad(expected, leaves, grad.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sink", [-torch.inf, 20.0, 100.0, -100.0])
def test_extreme_sinks(differentiable, sink):
    q, k, v, s, grad = inputs(30, dtype=torch.float32, sink=sink)
    settings = {"plan": MaskPlan.causal(30), "window": 5, "prefix": 0, "scale": None, "sinks": s}
    out = flex_attention_sink(q, k, v, **settings)
    grads = torch.autograd.grad(out, (q, k, v, s), grad)
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    expected = reference_attention(q.double(), k.double(), v.double(), **settings)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-6)


def test_forward_needs_no_patch():
    q, k, v, s = (x.detach() for x in inputs(40, dtype=torch.float32)[:4])
    settings = {"plan": MaskPlan.causal(40), "window": None, "prefix": 0, "scale": None, "sinks": s}
    with torch.no_grad():
        out = flex_attention_sink(q, k, v, **settings)
        expected = reference_attention(q, k, v, **settings)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_training_on_a_cpu_is_refused_by_name():
    q, k, v, s, _ = inputs(4, dtype=torch.float32)
    settings = {"plan": MaskPlan.causal(4), "window": None, "prefix": 0, "scale": None}
    with pytest.raises(ValueError, match="use backend='folded'"):
        flex_attention_sink(q, k, v, sinks=s, **settings)
    with pytest.raises(ValueError, match="cannot train on a CPU"):
        flex_attention_sink(*(x.detach() for x in (q, k, v)), sinks=s, **settings)


def test_another_length_is_an_error():
    q, k, v = (x.detach() for x in inputs(4, dtype=torch.float32)[:3])
    settings = {"plan": MaskPlan.causal(5), "window": None, "prefix": 0, "scale": None}
    with torch.no_grad(), pytest.raises(ValueError, match="plan is for 5 tokens"):
        flex_attention_sink(q, k, v, sinks=None, **settings)


@pytest.mark.parametrize("with_sinks", [True, False])
def test_a_soft_cap_and_its_gradients(differentiable, with_sinks):
    """Against tanh written out in fp64, the sink added after the cap."""
    tree, cap, scale = random_tree(2, num_nodes=6, max_len=20), 0.8, 0.7
    q, k, v, s, grad = inputs(len(tree), batch=2, dtype=torch.float32)
    sinks = s if with_sinks else None
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    settings = {"window": 9, "prefix": 4}

    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = cap * torch.tanh(q.double() @ wide_k.transpose(-1, -2) * scale / cap)
    scores = scores.masked_fill(~visible(tree, **settings), -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    expected = torch.softmax(scores, -1)[..., : k.shape[2]] @ wide_v
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())

    plan = MaskPlan.from_tree(tree)
    for attend in (flex_attention_sink, reference_attention):
        out = attend(q, k, v, plan=plan, sinks=sinks, scale=scale, softcap=cap, **settings)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
        for got, wanted in zip(torch.autograd.grad(out, leaves, grad), expected_grads, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
