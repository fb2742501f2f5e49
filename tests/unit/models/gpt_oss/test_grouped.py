import logging

import pytest
import torch

from components.models.gpt_oss import grouped
from components.models.gpt_oss.grouped import Gather, Scatter, group, grouped_product


def chosen(num_tokens, k, num_experts, *, seed=0, without=()):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[:, list(without)] = -1
    return scores.topk(k, dim=-1).indices


def test_rows_are_sorted_by_expert_and_found_again():
    choice = chosen(50, 3, 8, without=[2, 7])
    groups = group(choice, num_experts=8)
    assert groups.counts.tolist() == [(choice == e).sum() for e in range(8)]
    assert groups.ends.tolist() == groups.counts.cumsum(0).tolist()
    assert groups.ends.dtype == torch.int32
    assert (groups.expert.diff() >= 0).all()
    assert torch.equal(groups.expert[groups.inverse], choice)
    assert torch.equal(choice.flatten()[groups.order], groups.expert)


@pytest.mark.parametrize("method", ["grouped", "loop", "auto"])
@pytest.mark.parametrize("without", [(), (0,), (3, 7), (1, 2, 4, 5, 6, 7)])
def test_each_row_meets_its_experts_weight(method, without):
    """Against one product per row in fp64, gradients too; experts without rows get zeros."""
    torch.manual_seed(0)
    groups = group(chosen(37, 2, 8, without=without), num_experts=8)
    rows = torch.randn(74, 24, requires_grad=True)
    weight = torch.randn(8, 24, 40, requires_grad=True)
    grad = torch.randn(74, 40)
    out = grouped_product(rows, weight, groups, method=method)
    out.backward(grad)

    exact_rows = rows.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    exact = torch.einsum("sd,sdf->sf", exact_rows, exact_weight[groups.expert])
    exact.backward(grad.double())
    assert torch.allclose(out.double(), exact, atol=1e-5)
    assert torch.allclose(rows.grad.double(), exact_rows.grad, atol=1e-5)
    assert torch.allclose(weight.grad.double(), exact_weight.grad, atol=1e-5)
    assert all(weight.grad[e].count_nonzero() == 0 for e in without)


def test_the_methods_agree_in_bfloat16():
    torch.manual_seed(0)
    groups = group(chosen(40, 2, 4), num_experts=4)
    rows = torch.randn(80, 64).to(torch.bfloat16)
    weight = torch.randn(4, 64, 32).to(torch.bfloat16)
    one, other = (
        grouped_product(rows, weight, groups, method=m).float() for m in ("grouped", "loop")
    )
    exact = torch.einsum("sd,sdf->sf", rows.double(), weight.double()[groups.expert])
    for got in (one, other):
        assert (got - exact).abs().max() <= exact.abs().max() * 2**-8


def test_the_loop_skips_experts_that_nobody_uses():
    groups = group(torch.tensor([[1], [1], [1]]), num_experts=4)
    weight = torch.full((4, 2, 2), torch.nan)
    weight[1] = torch.eye(2)
    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(grouped_product(rows, weight, groups, method="loop"), rows)


def test_grouped_where_it_cannot_run_is_an_error_and_auto_says_what_it_does(caplog, monkeypatch):
    monkeypatch.setattr(grouped, "_logged", set())
    groups = group(torch.tensor([[0], [1]]), num_experts=2)
    rows, weight = torch.ones(2, 8).double(), torch.ones(2, 8, 8).double()
    with pytest.raises(ValueError, match=r"'grouped' cannot run here: .*float64.*use 'loop'"):
        grouped_product(rows, weight, groups, method="grouped")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            grouped_product(rows, weight, groups, method="auto")
    assert caplog.text.count("experts on cpu in torch.float64: loop (auto), torch has none") == 1
    with pytest.raises(ValueError, match=r"rows of 3 torch\.float32 are no multiple of 16 bytes"):
        grouped_product(torch.ones(2, 3), torch.ones(2, 3, 4), groups, method="grouped")
    with pytest.raises(ValueError, match="must be one of auto, grouped, loop, not 'groped'"):
        grouped_product(rows, weight, groups, method="groped")


def test_scatter_and_gather_by_finite_differences():
    torch.manual_seed(0)
    groups = group(chosen(5, 2, 4), num_experts=4)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x, weights):
        rows = Scatter.apply(x, groups.order, groups.inverse)
        return Gather.apply(rows.sin(), weights, groups.order, groups.inverse)

    exact = weights.sum(1, keepdim=True) * x.sin()
    assert torch.allclose(there_and_back(x, weights), exact)
    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_each_choice_has_its_own_weight():
    """Rows that differ by expert, so that weights in another order would show."""
    choice = torch.tensor([[2, 0], [0, 1], [1, 2]])
    groups = group(choice, num_experts=3)
    weights = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.9, 0.1]])
    rows = 10.0 ** groups.expert[:, None].float()
    out = Gather.apply(rows, weights, groups.order, groups.inverse)
    assert out.flatten().tolist() == pytest.approx([70.3, 4.6, 19.0])
