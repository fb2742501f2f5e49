"""The reference against hand values, finite differences and torch."""

import pytest
import torch
from torch.nn import functional as F

from components.attention.plan import MaskPlan
from components.attention.reference import reference_attention, softmax_with_sink

from .cases import inputs

PLAIN = {"window": None, "prefix": 0, "scale": None}


def test_without_sinks_it_is_torchs_attention():
    q, k, v, _, _ = inputs(33, batch=2, heads=6, kv_heads=3)
    got = reference_attention(q, k, v, plan=MaskPlan.causal(33), sinks=None, **PLAIN)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_gradients_by_finite_differences():
    q, k, v, s, _ = inputs(5, heads=4, kv_heads=2, head_dim=3)
    plan = MaskPlan.causal(5)

    def attend(q, k, v, s):
        return reference_attention(q, k, v, plan=plan, window=2, prefix=1, sinks=s, scale=0.7)

    assert torch.autograd.gradcheck(attend, (q, k, v, s))


def test_a_row_that_sees_nothing():
    q, k, v, s, _ = inputs(4, sink=0.5)
    mask = torch.ones(4, 4).tril().bool()
    mask[2] = False
    for sinks in (None, s, torch.full_like(s, -torch.inf).requires_grad_()):
        out = softmax_with_sink(q, k, v, visible=mask, sinks=sinks, scale=None)
        assert (out[:, :, 2] == 0).all()
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.isfinite(g).all() for g in grads)


def test_another_length_is_an_error():
    q, k, v, _, _ = inputs(4)
    with pytest.raises(ValueError, match="plan is for 5 tokens, the queries have 4"):
        reference_attention(q, k, v, plan=MaskPlan.causal(5), sinks=None, **PLAIN)
