"""What a sink component must get right whatever computes it: the same checks for every backend."""

from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from components.attention import flex
from components.attention.flex import flex_attention_sink
from components.attention.folded import folded_attention
from components.attention.lse import apply_sink
from components.attention.masks import document_tree
from components.attention.plan import MaskPlan
from components.attention.reference import reference_attention

from .cases import inputs, oracle, path, random_tree, visible

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

BACKENDS = {
    "folded": folded_attention,
    "flex": flex_attention_sink,
    "reference": reference_attention,
}
SMALL = {"num_nodes": 6, "max_len": 40}
LENGTHS = [1, 2, 127, 128, 129, 257, 1000]
# fp32 sums over at most 1,000 terms of order 1; the reference and the folded run in fp64.
TOLERANCE = {"folded": 1e-13, "reference": 1e-13, "flex": 1e-5}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """A backend's name; flex may differentiate on the CPU, which torch forbids (it is O(T^2))."""
    if request.param == "flex":
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
        monkeypatch.setattr(flex, "check_trainable", lambda *args: None)
    return request.param


def dtype_of(backend):
    return torch.float32 if backend == "flex" else torch.float64  # flex has no fp64 on Triton


def close(got, expected, backend):
    for a, b in zip(got, expected, strict=True):
        scale = max(b.abs().max().item(), 1.0)
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=TOLERANCE[backend] * scale)


def attend(backend, *leaves, plan, window=None, prefix=0, sinks, scale=None):
    settings = {"plan": plan, "window": window, "prefix": prefix, "sinks": sinks, "scale": scale}
    return BACKENDS[backend](*leaves, **settings)


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (127, 0)])
def test_lengths(backend, num_tokens, window, prefix):
    """Around the block sizes of kernels and of the window, against the oracle; GQA, batch of 2."""
    plan = MaskPlan.causal(num_tokens)
    kind = {"dtype": dtype_of(backend), "batch": 2 if num_tokens < 500 else 1}
    q, k, v, s, grad = inputs(num_tokens, **kind)
    i, j = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    mask = (j <= i) & (i - j <= (num_tokens if window is None else window))
    out = attend(backend, q, k, v, plan=plan, window=window, prefix=prefix, sinks=s)
    expected = oracle(q, k, v, s, mask, 8**-0.5)
    got = torch.autograd.grad(out, (q, k, v, s), grad)
    want = torch.autograd.grad(expected, (q, k, v, s), grad.double())
    close((out.detach(), *got), (expected.detach(), *want), backend)


@pytest.mark.parametrize("window", [None, 127])
def test_8192_tokens_fp64(window):
    """The oracle a block of queries at a time; gradients of k, v and s add up over the blocks."""
    num_tokens, size = 8192, 256
    q, k, v, s, grad = inputs(num_tokens, heads=2, kv_heads=1, head_dim=4)
    plan = MaskPlan.causal(num_tokens)
    out = folded_attention(q, k, v, plan=plan, window=window, prefix=0, sinks=s, scale=None)
    got = torch.autograd.grad(out, (q, k, v, s), grad)
    want = [torch.zeros_like(x) for x in (q, k, v, s)]
    for start in range(0, num_tokens, size):
        rows = slice(start, start + size)
        keys = slice(0, rows.stop)  # none after these can be seen
        i, j = torch.arange(rows.start, rows.stop)[:, None], torch.arange(rows.stop)[None]
        mask = (j <= i) & (i - j <= (num_tokens if window is None else window))
        block = oracle(q[:, :, rows], k[:, :, keys], v[:, :, keys], s, mask, 0.5)
        torch.testing.assert_close(out[:, :, rows], block, rtol=0, atol=1e-13)
        grads = torch.autograd.grad(block, (q, k, v, s), grad[:, :, rows])
        want = [a + b for a, b in zip(want, grads, strict=True)]
    close(got, want, "folded")


def test_gradients_by_finite_differences(backend):
    if backend == "flex":
        pytest.skip("fp32: finite differences need fp64; test_lengths compares with the oracle")
    q, k, v, s, _ = inputs(6, heads=2, kv_heads=1, head_dim=2)
    plan = MaskPlan.causal(6)
    run = partial(attend, backend, plan=plan, window=2, prefix=1, scale=0.7)
    assert torch.autograd.gradcheck(lambda q, k, v, s: run(q, k, v, sinks=s), (q, k, v, s))


@pytest.mark.parametrize(("window", "prefix"), [(127, 0), (127, 5), (1, 0), (0, 3)])
def test_each_query_weighs_exactly_its_keys(backend, window, prefix):
    """Equal scores and one-hot values read the mask off the output, sink and all.

    Query q sees min(q + 1, w + 1) keys, and the prefix positions beyond them once; with s = 0 each
    weighs 1 / (number of keys + 1).
    """
    num_tokens = 160
    dtype = dtype_of(backend)
    q = torch.zeros(1, 1, num_tokens, num_tokens, dtype=dtype)
    v = torch.eye(num_tokens, dtype=dtype)[None, None]
    sinks = torch.zeros(1, dtype=dtype)
    plan = MaskPlan.causal(num_tokens)
    with torch.no_grad():
        out = attend(backend, q, q, v, plan=plan, window=window, prefix=prefix, sinks=sinks)[0, 0]
    for row, weights in enumerate(out.double()):
        near = min(row + 1, window + 1)
        keys = near + min(max(row - window, 0), prefix)
        expected = torch.zeros(num_tokens, dtype=torch.float64)
        expected[row + 1 - near : row + 1] = 1 / (keys + 1)
        expected[: keys - near] = 1 / (keys + 1)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("packed", ["documents", "tree"])
@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (20, 0), (20, 7)])
def test_each_rollout_alone_gives_the_same(backend, packed, window, prefix):
    """Output rows are those of the rollout by itself; gradients add up over rollouts."""
    tree = document_tree([50, 1, 33]) if packed == "documents" else random_tree(4, **SMALL)
    q, k, v, s, grad = inputs(len(tree), dtype=dtype_of(backend))
    leaves, settings = (q, k, v), {"window": window, "prefix": prefix, "sinks": s}
    whole = attend(backend, *leaves, plan=MaskPlan.from_tree(tree), **settings)
    expected = torch.autograd.grad(whole, (*leaves, s), grad)
    totals = [torch.zeros_like(x) for x in expected]
    for node in torch.unique(tree.enter).tolist():
        rows = path(tree, int((tree.enter == node).nonzero().max()))
        new = tree.enter[rows] == node  # each query once: those of the rollout's last node
        alone = attend(
            backend,
            *(x[:, :, rows] for x in leaves),
            plan=MaskPlan.causal(len(rows)),
            **settings,
        )
        close([alone[:, :, new].detach()], [whole[:, :, rows[new]].detach()], backend)
        part = torch.autograd.grad(alone[:, :, new], (*leaves, s), grad[:, :, rows[new]])
        totals = [a + b for a, b in zip(totals, part, strict=True)]
    close(totals, expected, backend)


def test_strides_do_not_matter(backend):
    """Heads first, tokens first, every second element of a larger tensor: the same values."""
    tree = random_tree(3, **SMALL)
    plan = MaskPlan.from_tree(tree)
    q, k, v, s, grad = inputs(len(tree), batch=2, dtype=dtype_of(backend))

    def run(*leaves):
        out = attend(backend, *leaves, plan=plan, window=20, sinks=s)
        return out.detach(), *torch.autograd.grad(out, (*leaves, s), grad)

    def thinned(x):
        return torch.stack([x, -x], 3)[:, :, :, 0].detach().requires_grad_()

    expected = run(q, k, v)
    for lay in (lambda x: x.detach().contiguous().requires_grad_(), thinned):
        close(run(*(lay(x) for x in (q, k, v))), expected, backend)


def test_heads_keep_their_order(backend):
    """Query head n reads key head n // group and sink n: permuting whole groups permutes rows."""
    q, k, v, s, _ = (x.detach() for x in inputs(20, heads=6, kv_heads=3, dtype=dtype_of(backend)))
    plan = MaskPlan.causal(20)
    out = attend(backend, q, k, v, plan=plan, sinks=s)
    heads, groups = torch.tensor([4, 5, 0, 1, 2, 3]), torch.tensor([2, 0, 1])
    moved = attend(backend, q[:, heads], k[:, groups], v[:, groups], plan=plan, sinks=s[heads])
    close([moved], [out[:, heads]], backend)
    close([out], [oracle(q, k, v, s, torch.ones(20, 20).tril().bool(), 8**-0.5)], backend)


@pytest.mark.parametrize("sink", [0.5, -torch.inf])
def test_flex_rows_without_a_key(sink, monkeypatch):
    """A row that sees nothing: out 0, all mass on the sink, and no NaN in any gradient."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    q, k, v, s, _ = inputs(8, heads=2, kv_heads=2, dtype=torch.float32, sink=sink)
    block_mask = torch_flex.create_block_mask(
        lambda b, h, i, j: (j <= i) & (i != 3), None, None, 8, 8, device="cpu"
    )
    out, aux = torch_flex.flex_attention(
        q, k, v, block_mask=block_mask, return_aux=torch_flex.AuxRequest(lse=True)
    )
    out, lse = apply_sink(out, aux.lse, s)
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == sink).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v, s))
    assert all(torch.isfinite(x).all() for x in grads)
    assert (grads[0][:, :, 3] == 0).all()


def test_a_tree_with_far_sinks(backend):
    """A tree, a scale, and sinks far above every score, against the dense fp64 oracle."""
    tree = random_tree(6, **SMALL)
    q, k, v, s, grad = inputs(len(tree), dtype=dtype_of(backend), sink=20.0)
    mask = visible(tree, window=15, prefix=4)
    out = attend(
        backend, q, k, v, plan=MaskPlan.from_tree(tree), window=15, prefix=4, sinks=s, scale=0.4
    )
    expected = oracle(q, k, v, s, mask, 0.4)
    assert 0 < out.abs().max() < 1e-4
    rtol = 1e-5 if backend == "flex" else 1e-11
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-13)
    got = torch.autograd.grad(out, (q, k, v, s), grad)
    want = torch.autograd.grad(expected, (q, k, v, s), grad.double())
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= 10 * rtol * b.norm()
