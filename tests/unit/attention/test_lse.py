"""The algebra of sinks and merges against hand values and the definition."""

import math

import pytest
import torch

from components.attention.lse import apply_sink, merge, merge_, merge_weights, sink_gate


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(1, 1, -1)


@pytest.mark.parametrize(
    ("lse", "sink", "gate"),
    [(8.22, 11.625, 0.0321396), (1.0, 30.0, 2.54e-13), (0.0, 0.0, 0.5)],
)
def test_gate_values(lse, sink, gate):
    got, with_sink = sink_gate(column(lse), torch.tensor([sink], dtype=torch.float64))
    assert got.item() == pytest.approx(gate, rel=2e-3 if gate < 1e-6 else 2e-6)
    assert with_sink.item() == pytest.approx(math.log(math.exp(lse) + math.exp(sink)), rel=1e-12)


def test_gate_far_sinks_fp32():
    gate, lse = sink_gate(column(1.0, 1.0).float(), torch.tensor([100.0]))
    assert torch.isfinite(gate).all()
    assert gate.max() < 1e-42
    assert lse[0, 0, 0].item() == 100.0
    gate, lse = sink_gate(column(1.0).float(), torch.tensor([-100.0]))
    assert (gate.item(), lse.item()) == (1.0, 1.0)


def test_masked_row_gives_all_mass_to_the_sink():
    out, lse = apply_sink(torch.zeros(1, 1, 1, 3), column(-torch.inf), torch.tensor([0.5]))
    assert (out == 0).all()
    assert lse.item() == 0.5


def test_sink_minus_infinity_is_no_sink_and_nothing_is_nan():
    out = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[[-torch.inf, 0.3, 2.0]]], dtype=torch.float64, requires_grad=True)
    sinks = torch.tensor([-torch.inf], dtype=torch.float64, requires_grad=True)
    got, with_sink = apply_sink(out, lse, sinks)
    torch.testing.assert_close(got[:, :, 1:], out[:, :, 1:])
    assert with_sink.tolist() == lse.tolist()
    grads = torch.autograd.grad((got.sum(), with_sink[..., 1:].sum()), (out, lse, sinks))
    assert all(torch.isfinite(g).all() for g in grads)
    assert grads[2].item() == 0.0


def test_masked_row_gradients_are_finite():
    out = torch.zeros(1, 2, 1, 2, requires_grad=True)
    lse = torch.full((1, 2, 1), -torch.inf, requires_grad=True)
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    got, _ = apply_sink(out, lse, sinks)
    grads = torch.autograd.grad(got.sum(), (out, lse, sinks))
    assert all((g == 0).all() for g in grads)


def test_apply_sink_gradients_by_finite_differences():
    out = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(apply_sink, (out, lse, sinks))


def test_the_product_is_rounded_once():
    out = torch.randn(1, 4, 64, 16).bfloat16()
    lse, sinks = torch.randn(1, 4, 64) * 4 + 8, torch.full((4,), 9.0)
    exact = out.double() * torch.sigmoid(lse.double() - 9.0).unsqueeze(-1)
    got, with_sink = apply_sink(out, lse, sinks)
    assert got.dtype == torch.bfloat16
    assert with_sink.dtype == torch.float32
    # Half a unit in the last place of bf16; a gate or an LSE rounded to bf16 is off by more.
    assert ((got.double() - exact).abs() <= exact.abs() * (2**-8 + 1e-6)).all()


def test_two_shards_and_one_sink_share_equally():
    """Scores 0, a key in each shard, s = 0: each weight is 1/3 (with the sink twice, 1/4)."""
    one, zero = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, 1).double()
    sink = torch.zeros(1, dtype=torch.float64)
    for a, b in [(one, zero), (zero, one)]:
        out, lse = apply_sink(*merge(a, column(0.0), b, column(0.0)), sink)
        assert out.item() == pytest.approx(1 / 3)
        assert lse.item() == pytest.approx(math.log(3))


def test_two_equal_scores_and_a_sink():
    out, _ = apply_sink(torch.ones(1, 1, 1, 1), column(math.log(2)), torch.zeros(1))
    assert out.item() == pytest.approx(2 / 3)


def test_merge_equals_attention_over_the_union():
    x, v = torch.randn(1, 2, 5, 7).double(), torch.randn(1, 2, 7, 3).double()
    parts = [
        (x[..., c].softmax(-1) @ v[:, :, c], x[..., c].logsumexp(-1))
        for c in (slice(3), slice(3, 7))
    ]
    out, lse = merge(*parts[0], *parts[1])
    torch.testing.assert_close(out, x.softmax(-1) @ v, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, x.logsumexp(-1), rtol=0, atol=1e-14)


def test_merge_with_empty_sides():
    weights = merge_weights(
        column(-torch.inf, 1.0, -torch.inf), column(2.0, -torch.inf, -torch.inf)
    )
    assert weights[0][..., :2].tolist() == [[[0.0, 1.0]]]
    assert weights[1][..., :2].tolist() == [[[1.0, 0.0]]]
    assert weights[2].tolist() == [[[2.0, 1.0, -torch.inf]]]
    assert torch.isfinite(weights[0]).all()
    assert torch.isfinite(weights[1]).all()


def test_merging_in_place_fills_views_with_the_same_bits():
    torch.manual_seed(0)
    out, new = torch.randn(2, 3, 8, 4, dtype=torch.float64), torch.randn(2, 3, 5, 4).double()
    lse, lse_new = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 5).double()
    lse[0, 0, 3] = lse_new[0, 0, 1] = lse[1, 1, 2] = lse_new[1, 1, 0] = -torch.inf
    rows = slice(2, 7)
    expected, expected_lse = merge(out[:, :, rows], lse[:, :, rows], new, lse_new)
    kept = out.clone(), lse.clone()
    merge_(out[:, :, rows], lse[:, :, rows], new, lse_new)
    torch.testing.assert_close(out[:, :, rows], expected, rtol=0, atol=1e-15)
    assert torch.equal(lse[:, :, rows], expected_lse)
    assert torch.equal(out[:, :, :2], kept[0][:, :, :2])
    assert torch.equal(lse[:, :, 7:], kept[1][:, :, 7:])
