"""Rotary embeddings against torchtune's and against rotation matrices."""

import pytest
import torch
from torchtune.modules import RotaryPositionalEmbeddings

from components.attention.rope import RotaryEmbedding


def pair(head_dim: int = 64):
    ours = RotaryEmbedding(head_dim, max_positions=300, base=100_000)
    return ours, RotaryPositionalEmbeddings(head_dim, 300, 100_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_positions", [True, False])
def test_equals_torchtune(dtype, with_positions):
    ours, theirs = pair()
    x = torch.randn(2, 70, 3, 64).to(dtype).requires_grad_()
    grad = torch.randn(2, 70, 3, 64).to(dtype)
    positions = torch.randint(0, 300, (2, 70)) if with_positions else None
    before = x.detach().clone()
    got, expected = ours(x, input_pos=positions), theirs(x, input_pos=positions)
    assert got.dtype == dtype
    assert torch.equal(x, before)
    atol = 1e-6 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    g, e = (torch.autograd.grad(y, x, grad)[0] for y in (got, expected))
    # In bf16 torchtune adds two products rounded to fp32 in another order.
    torch.testing.assert_close(g, e, rtol=0 if dtype == torch.float32 else 2**-7, atol=1e-6)


def test_one_row_of_positions_serves_the_batch():
    ours, _ = pair(8)
    x, positions = torch.randn(3, 5, 2, 8), torch.tensor([[4, 5, 6, 0, 1]])
    expected = ours(x, input_pos=positions.expand(3, 5))
    assert torch.equal(ours(x, input_pos=positions), expected)


def test_scores_depend_on_distance_only():
    ours, _ = pair(16)
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()

    def score(i: int, j: int) -> float:
        return (
            (ours(q, input_pos=torch.tensor([[i]])) * ours(k, input_pos=torch.tensor([[j]])))
            .sum()
            .item()
        )

    assert score(17, 5) == pytest.approx(score(112, 100), abs=1e-4)  # angles in fp32
    assert score(5, 5) == pytest.approx((q * k).sum().item(), rel=1e-6)


def test_first_pair_turns_by_the_position():
    ours, _ = pair(4)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    got = ours(x, input_pos=torch.tensor([[2]])).flatten()
    torch.testing.assert_close(
        got[:2], torch.tensor([2.0]).cos().new_tensor([-0.4161468, 0.9092974])
    )


def test_backward_by_finite_differences_and_real_form():
    from components.attention.rope import _rotate_real, _rows

    ours, _ = pair(6)
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[3, 0, 250, 7]])
    assert torch.autograd.gradcheck(lambda x: ours(x, input_pos=positions), (x,))
    real = _rotate_real(x, _rows(ours.cache, positions, 4))
    torch.testing.assert_close(real, ours(x, input_pos=positions), rtol=0, atol=1e-12)


def test_non_contiguous_heads():
    ours, theirs = pair(8)
    x = torch.randn(1, 3, 5, 8).transpose(1, 2)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)


def test_the_table_survives_casts_and_the_meta_device():
    ours, _ = pair(8)
    table = ours.cache.clone()
    assert torch.equal(ours.to(torch.bfloat16).cache, table)
    with torch.device("meta"):
        empty = RotaryEmbedding(8, max_positions=300, base=100_000)
    assert empty.cache.is_meta
    assert torch.equal(empty.to_empty(device="cpu").cache, table)
    assert not ours.state_dict()


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="even"):
        RotaryEmbedding(7, max_positions=4)
