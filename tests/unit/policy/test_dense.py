"""The prefill attention of a CPU in bf16, against the same in float64."""

import pytest
import torch

from components.cpu import multiplies_bf16
from components.policy import dense
from components.policy.dense import DenseRows, takes


def oracle(q, keys, values, *, scale):
    """``[N, T, H]`` in float64: query t sees the first C - T + t + 1 keys."""
    groups = q.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(groups, 0) for x in (keys, values))
    scores = q.double() @ keys.transpose(1, 2) * scale
    num_t, num_c = scores.shape[1:]
    seen = torch.ones(num_t, num_c, dtype=torch.bool).tril(num_c - num_t)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values


def draw(num_n, num_k, num_t, num_c, dim=16, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_n, num_t, dim), (num_k, num_c, dim), (num_k, num_c, dim))
    return [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize(
    ("heads", "new", "past"),
    [((6, 2), 7, 30), ((3, 3), 20, 0), ((4, 1), 1, 12), ((4, 2), 1, 0), ((8, 2), 33, 5)],
)
@pytest.mark.parametrize("most_scores", [1, 200, 1 << 21])
def test_dense_rows_equal_float64(monkeypatch, heads, new, past, most_scores):
    monkeypatch.setattr(dense, "SCORES", most_scores)  # one query a block, some, all
    q, keys, values = draw(*heads, new, past + new)
    rows = DenseRows()
    for scale in (0.25, 0.7):  # the second call finds the buffers of the first
        found = rows.attend(q, keys, values, scale=scale)
        expected = oracle(q, keys, values, scale=scale)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


def test_a_query_never_sees_what_comes_after_it(monkeypatch):
    monkeypatch.setattr(dense, "SCORES", 300)
    q, keys, values = draw(4, 2, 12, 20)
    before = DenseRows().attend(q, keys, values, scale=0.25)
    keys[:, 14:], values[:, 14:] = 30.0, 1e4
    after = DenseRows().attend(q, keys, values, scale=0.25)
    assert torch.equal(before[:, :6], after[:, :6])  # queries 0 to 5 see keys up to 13
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_long_contexts_and_other_layers_are_left_to_the_flash_kernel():
    q = torch.zeros(1, 16, 3, 8, dtype=torch.bfloat16)
    assert takes(q, num_keys=4096, sinks=None) is multiplies_bf16()
    assert not takes(q, num_keys=4097, sinks=None)  # 31 queries at a time would read all keys
    assert not takes(q, num_keys=10, sinks=torch.zeros(16))
    assert not takes(q.float(), num_keys=10, sinks=None)


def test_it_is_not_much_less_exact_than_the_flash_kernel():
    q, keys, values = draw(6, 2, 64, 500, dim=64, seed=3)
    expected = oracle(q, keys, values, scale=0.125)
    # bf16 holds 8 bits: an output of about this size cannot be nearer than 2e-3 of it
    error = (DenseRows().attend(q, keys, values, scale=0.125).double() - expected).norm()
    mask = torch.ones(64, 500, dtype=torch.bool).tril(436)
    wide = [x.repeat_interleave(3, 0) for x in (keys, values)]
    flash = torch.nn.functional.scaled_dot_product_attention(
        q[None], wide[0][None], wide[1][None], attn_mask=mask, scale=0.125
    )
    assert error < 2.5 * (flash[0].double() - expected).norm()
    assert error < 6e-3 * expected.norm()
