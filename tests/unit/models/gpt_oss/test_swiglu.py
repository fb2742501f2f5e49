import pytest
import torch

from components.models.gpt_oss.swiglu import _plain, clamped_swiglu

SETTINGS = {"limit": 7.0, "alpha": 1.702}


def test_oracle_values():
    got = clamped_swiglu(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), **SETTINGS)
    assert got[0].tolist() == pytest.approx([2.5374, 14.9096], abs=5e-5)
    # gate above the limit, up below the other one
    assert float(clamped_swiglu(torch.tensor([[10.0, -10.0]]), **SETTINGS)) == pytest.approx(
        -41.9997, abs=5e-5
    )
    # gate has no lower bound: -20 is not taken for -7
    assert abs(float(clamped_swiglu(torch.tensor([[-20.0, 0.0]]), **SETTINGS))) < 1e-10


def test_gradients_by_finite_differences_inside_and_beyond_the_limits():
    torch.manual_seed(0)
    x = torch.randn(6, 10, dtype=torch.float64) * 12
    assert (x[:, 0::2] > 7).any()
    assert (x[:, 1::2].abs() > 7).any()
    assert (x[:, 0::2] < -7).any()
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clamped_swiglu(x, **SETTINGS), (x,))


def test_values_at_the_limits_still_get_gradients_as_torch_clamp_gives_them():
    x = torch.tensor([[7.0, 7.0], [7.0, -7.0]], requires_grad=True)
    y = x.detach().clone().requires_grad_()
    clamped_swiglu(x, **SETTINGS).sum().backward()
    _plain(y, 7.0, 1.702).sum().backward()
    assert torch.allclose(x.grad, y.grad)
    assert (x.grad != 0).all()


def test_bfloat16_is_rounded_once():
    torch.manual_seed(0)
    x = torch.randn(64, 32).mul_(3).to(torch.bfloat16)
    exact = clamped_swiglu(x.double(), **SETTINGS)
    got = clamped_swiglu(x, **SETTINGS)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.to(torch.bfloat16))


def test_only_the_input_is_kept_for_the_backward():
    x = torch.randn(8, 10, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        clamped_swiglu(x, **SETTINGS)
    assert [t.shape for t in kept] == [x.shape]
