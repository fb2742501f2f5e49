"""The folded backend: values and all gradients against a dense fp64 oracle."""

import pytest
import torch

from components.attention.folded import _folded, flash_forward, folded_attention
from components.attention.masks import document_tree
from components.attention.plan import MaskPlan, parts_of

from .cases import inputs, oracle, random_tree, visible

MASKS = [(None, 0), (0, 0), (1, 2), (127, 0), (127, 50), (300, 40), (600, 0)]


def error(got, expected) -> float:
    """Largest error in units of the largest expected value (1 at least)."""
    scale = max(expected.abs().max().item(), 1.0)
    return (got.double() - expected.double()).abs().max().item() / scale


def errors(plan, mask, *, window, prefix, sinks=True, scale=None, **kind) -> list[float]:
    """Errors of out, dq, dk, dv and ds."""
    q, k, v, s, grad = inputs(mask.shape[0], **kind)
    s = s if sinks else None
    leaves = [x for x in (q, k, v, s) if x is not None]
    got = folded_attention(q, k, v, plan=plan, window=window, prefix=prefix, sinks=s, scale=scale)
    assert got.dtype == q.dtype
    expected = oracle(q, k, v, s, mask, q.shape[-1] ** -0.5 if scale is None else scale)
    got_grads = torch.autograd.grad(got, leaves, grad)
    grads = torch.autograd.grad(expected, leaves, grad.double())
    for a, b in zip(got_grads, leaves, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    pairs = zip((got, *got_grads), (expected, *grads), strict=True)
    return [error(a.detach(), b.detach()) for a, b in pairs]


def test_one_key_by_hand():
    """q = k = 1, v = 2, s = 0: p = sigmoid(1), dS = p (2 - out'); dropping dLSE gives dq = 0."""
    q, k, s = (torch.ones(1, 1, 1, 1, dtype=torch.float64, requires_grad=True) for _ in range(3))
    v = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64, requires_grad=True)
    s = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    out = folded_attention(
        q, k, v, plan=MaskPlan.causal(1), window=None, prefix=0, sinks=s, scale=1.0
    )
    out.sum().backward()
    got = [out.item(), *(x.grad.item() for x in (q, k, v, s))]
    expected = [1.4621172, 0.3932239, 0.3932239, 0.7310586, -0.3932239]
    assert got == pytest.approx(expected, abs=5e-8)


def test_equal_scores_by_hand():
    q = torch.zeros(1, 1, 2, 4, dtype=torch.float64)
    v, s = torch.ones_like(q), torch.zeros(1, dtype=torch.float64)
    out = folded_attention(
        q, q, v, plan=MaskPlan.causal(2), window=None, prefix=0, sinks=s, scale=None
    )
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([1 / 2, 2 / 3]).double())


@pytest.mark.parametrize("num_tokens", [1, 2, 127, 128, 129, 257])
@pytest.mark.parametrize(("window", "prefix"), MASKS)
def test_causal_rows_fp64(num_tokens, window, prefix):
    plan = MaskPlan.causal(num_tokens)
    mask = plan.visible(window=window, prefix=prefix, device=torch.device("cpu"))
    assert max(errors(plan, mask, window=window, prefix=prefix)) < 1e-13


def test_a_thousand_tokens_fp64():
    plan = MaskPlan.causal(1000)
    mask = torch.ones(1000, 1000).tril().bool()
    assert max(errors(plan, mask, window=None, prefix=0)) < 1e-13
    near = mask & torch.ones(1000, 1000).triu(-200).bool()
    assert max(errors(plan, near, window=200, prefix=0, sinks=False)) < 1e-13


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("window", "prefix"), MASKS)
def test_prefix_trees_fp64(seed, window, prefix):
    tree = random_tree(seed, num_nodes=8, max_len=[1, 3, 20, 40, 80, 80][seed])
    mask = visible(tree, window=window, prefix=prefix)
    plan = MaskPlan.from_tree(tree)
    kind = {"batch": 2, "heads": 6, "kv_heads": [1, 2, 3, 6][seed % 4]}
    assert max(errors(plan, mask, window=window, prefix=prefix, **kind)) < 1e-13
    assert max(errors(plan, mask, window=window, prefix=prefix, sinks=False, **kind)) < 1e-13


@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (40, 10)])
def test_documents_fp64(window, prefix):
    tree = document_tree([70, 1, 129, 30])
    mask = visible(tree, window=window, prefix=prefix)
    plan = MaskPlan.from_tree(tree)
    assert max(errors(plan, mask, window=window, prefix=prefix, scale=0.3)) < 1e-13


@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (50, 0), (300, 20)])
def test_fp32(window, prefix):
    tree = random_tree(5, num_nodes=8, max_len=80)
    mask = visible(tree, window=window, prefix=prefix)
    got = errors(MaskPlan.from_tree(tree), mask, window=window, prefix=prefix, dtype=torch.float32)
    # Sums over at most 300 keys in fp32: about sqrt(300) x 6e-8, on values of order 1.
    assert max(got) < 2e-6


@pytest.mark.parametrize(("num_nodes", "max_len"), [(8, 80), (3, 600)], ids=["short", "long"])
def test_bf16_is_no_worse_than_plain_flash(num_nodes, max_len):
    """Merged over many key sets, against one kernel call with a dense mask on the same problem.

    Short parts go backward in fp32, those of 200 rows and more in bf16.
    """
    tree = random_tree(5, num_nodes=num_nodes, max_len=max_len)
    if max_len > 80:
        parts = parts_of(MaskPlan.from_tree(tree).chains, window=None, prefix=0)
        assert max(part.q1 - part.q0 for part in parts) > 200
    mask = visible(tree, window=None, prefix=0)
    q, k, v, s, grad = inputs(len(tree), dtype=torch.bfloat16, head_dim=64)

    def off(got, sinks):
        leaves = [x for x in (q, k, v, sinks) if x is not None]
        exact = oracle(q, k, v, sinks, mask, 64**-0.5)
        pairs = zip(got, (exact, *torch.autograd.grad(exact, leaves, grad.double())), strict=True)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]

    aten = torch.ops.aten
    additive = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, -torch.inf)
    extra = {"attn_mask": additive[None, None]}
    with torch.no_grad():
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, **extra)
        plain = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, **extra
        )
    plain = off((out, *plain), None)
    settings = {"plan": MaskPlan.from_tree(tree), "window": None, "prefix": 0, "scale": None}
    for sinks in (None, s):
        out = folded_attention(q, k, v, sinks=sinks, **settings)
        leaves = [x for x in (q, k, v, sinks) if x is not None]
        folded = off((out, *torch.autograd.grad(out, leaves, grad)), sinks)
        # The sink rounds the output a second time: sqrt(2) at most.
        assert folded[0] < (1.45 if sinks is not None else 1.15) * plain[0]
        assert all(f < 1.15 * p for f, p in zip(folded[1:], plain[1:], strict=False))
    assert folded[4] < 0.005


@pytest.mark.parametrize("sink", [-torch.inf, -100.0, 20.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_extreme_sinks(sink, dtype):
    """A sink far above or below every score: exact, finite, and never without effect (s = 20)."""
    plan = MaskPlan.causal(40)
    q, k, v, s, grad = inputs(40, sink=sink, dtype=dtype)
    out = folded_attention(q, k, v, plan=plan, window=7, prefix=2, sinks=s, scale=None)
    grads = torch.autograd.grad(out, (q, k, v, s), grad)
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    mask = plan.visible(window=7, prefix=2, device=torch.device("cpu"))
    if dtype == torch.float64:
        used = None if sink == -torch.inf else s
        expected = oracle(q, k, v, used, mask, 8**-0.5)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=0)
    if sink == -torch.inf:
        assert (grads[3] == 0).all()
    if sink == 20.0:
        assert out.abs().max() < 1e-5


def test_window_probe():
    """Equal scores and one-hot values: query q weighs exactly min(q + 1, w + 1) keys, equally."""
    num_tokens, w = 300, 127
    q = torch.zeros(1, 1, num_tokens, num_tokens, dtype=torch.float64)
    v = torch.eye(num_tokens, dtype=torch.float64)[None, None]
    out = folded_attention(
        q, q, v, plan=MaskPlan.causal(num_tokens), window=w, prefix=0, sinks=None, scale=None
    )[0, 0]
    i, j = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None, :]
    count = torch.clamp(i + 1, max=w + 1)
    expected = torch.where((j <= i) & (i - j <= w), 1.0 / count.double(), 0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-15)


def test_window_of_one_by_hand():
    q = torch.zeros(1, 1, 3, 1, dtype=torch.float64)
    v = torch.tensor([1.0, 0.0, 0.0]).double().view(1, 1, 3, 1)
    out = folded_attention(
        q, q, v, plan=MaskPlan.causal(3), window=1, prefix=0, sinks=None, scale=None
    )
    assert out.flatten().tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("layout", ["by_head", "interleaved"])
def test_strides_do_not_matter(layout):
    q, k, v, s, grad = inputs(150, batch=2)
    plan = MaskPlan.from_tree(document_tree([100, 50]))

    def lay(x):
        if layout == "by_head":
            return x.contiguous()
        return torch.stack([x, x], 3).transpose(2, 3).contiguous()[:, :, 0]

    def run(q, k, v, grad):
        out = folded_attention(q, k, v, plan=plan, window=20, prefix=0, sinks=s, scale=None)
        return out, *torch.autograd.grad(out, (q, k, v, s), grad)

    leaves = [lay(x.detach()).requires_grad_() for x in (q, k, v)]
    expanded = torch.ones((), dtype=torch.float64).expand(grad.shape)
    for g in (grad, lay(grad), expanded):
        for a, b in zip(run(q, k, v, g), run(*leaves, g), strict=True):
            assert torch.equal(a, b)


def test_output_needs_no_copy_for_the_projection():
    q, k, v, s, _ = inputs(150)
    for window in (None, 20):
        out = folded_attention(
            q, k, v, plan=MaskPlan.causal(150), window=window, prefix=0, sinks=s, scale=None
        )
        assert out.transpose(1, 2).is_contiguous()


def test_another_length_is_an_error():
    q, k, v, _, _ = inputs(4)
    with pytest.raises(ValueError, match="plan is for 5 tokens, the queries have 4"):
        folded_attention(
            q, k, v, plan=MaskPlan.causal(5), window=None, prefix=0, sinks=None, scale=None
        )


def test_dtypes_without_a_kernel_are_refused():
    q = torch.ones(1, 1, 2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="float32"):
        flash_forward(q, q, q)
    meta = torch.ones(1, 1, 2, 4, device="meta")
    with pytest.raises(ValueError, match="cpu and cuda, got meta"):
        flash_forward(meta, meta, meta)


def test_the_lse_carries_no_gradient():
    q, k, v, s, _ = inputs(4)
    out, lse = _folded(q, k, v, s, MaskPlan.causal(4).chains, None, 0, 1.0)
    assert out.requires_grad
    assert not lse.requires_grad


def test_the_operator_is_well_formed():
    """Schema, fake implementation and autograd registration, by torch's own checks."""
    q, k, v, s, _ = inputs(20)
    chains = MaskPlan.from_tree(document_tree([12, 8])).chains
    checks = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    for sinks in (s, None):
        torch.library.opcheck(_folded, (q, k, v, sinks, chains, 3, 1, 0.5), test_utils=checks)


class TestFlashForward:
    def test_lse_of_equal_scores_is_ln_t(self):
        """No factor ln 2, no sink in it."""
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            zero = torch.zeros(1, 2, 7, 8, dtype=dtype)
            _, lse = flash_forward(zero, zero, zero)
            assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(lse, torch.full_like(lse, 7).log())

    @pytest.mark.parametrize("boolean", [True, False])
    def test_masks_and_rows_without_a_key(self, boolean):
        q, k, v, _, _ = inputs(6, batch=2)
        q, k, v = (x.detach() for x in (q, k, v))
        visible = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
        visible[3] = False
        visible[4] = True
        mask = visible if boolean else torch.zeros(6, 6).double().masked_fill(~visible, -torch.inf)
        out, lse = flash_forward(q, k, v, mask=mask, scale=0.4)
        scores = 0.4 * q @ k.repeat_interleave(2, 1).mT
        scores = scores.masked_fill(~visible, -torch.inf)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        assert (lse[:, :, 3] == -torch.inf).all()
        assert (out[:, :, 3] == 0).all()
        rows = [0, 1, 2, 4, 5]
        expected = scores[:, :, rows].softmax(-1) @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(out[:, :, rows], expected)

    def test_no_keys_at_all(self):
        q, k, v, _, _ = inputs(6)
        out, lse = flash_forward(q, k[:, :, :0], v[:, :, :0])
        assert (out == 0).all()
        assert (lse == -torch.inf).all()

    def test_gradients_are_not_recorded(self):
        q, k, v, _, _ = inputs(6)
        assert not flash_forward(q, k, v, is_causal=True)[0].requires_grad
