"""The CUDA paths of attention: folded on FlashAttention, flex on Triton, against an oracle."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from components.attention.flex import flex_attention_sink
from components.attention.folded import folded_attention
from components.attention.masks import document_tree
from components.attention.plan import MaskPlan
from components.attention.probe import check_attend
from components.attention.sink_attention import SinkAttention, prepare
from tests.unit.attention.cases import inputs, oracle, random_tree, visible

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKENDS = {"folded": folded_attention, "flex": flex_attention_sink}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (127, 0), (127, 50), (600, 0)])
@pytest.mark.parametrize("sink", [None, 20.0])
def test_values_and_gradients(backend, window, prefix, sink):
    tree = random_tree(5, num_nodes=8, max_len=150)
    mask = visible(tree, window=window, prefix=prefix).cuda()
    q, k, v, s, grad = inputs(len(tree), head_dim=64, dtype=torch.bfloat16, batch=2, sink=sink)
    q, k, v, s = (x.detach().cuda().requires_grad_() for x in (q, k, v, s))
    settings = {"plan": MaskPlan.from_tree(tree), "window": window, "prefix": prefix}
    out = BACKENDS[backend](q, k, v, sinks=s, scale=None, **settings)
    got = (out, *torch.autograd.grad(out, (q, k, v, s), grad.cuda()))
    exact = oracle(q, k, v, s, mask, 64**-0.5)
    expected = (exact, *torch.autograd.grad(exact, (q, k, v, s), grad.cuda().double()))
    for a, b in zip(got, expected, strict=True):
        # Frobenius error of a bf16 flash kernel: 0.002 to 0.005.
        assert torch.isfinite(a).all()
        assert (a.double() - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize("window", [None, 127])
def test_folded_memory_is_linear(window):
    def peak(num_tokens: int) -> int:
        plan = MaskPlan.from_tree(document_tree([num_tokens // 2] * 2))
        q, k, v, s, grad = inputs(num_tokens, head_dim=64, dtype=torch.bfloat16)
        q, k, v, s = (x.detach().cuda().requires_grad_() for x in (q, k, v, s))
        torch.cuda.reset_peak_memory_stats()
        out = folded_attention(q, k, v, plan=plan, window=window, prefix=0, sinks=s, scale=None)
        out.backward(grad.cuda())
        return torch.cuda.max_memory_allocated()

    short, long = peak(8192), peak(32768)
    assert long <= 4.5 * short
    assert long < 32768 * 32768


def test_fp32_is_refused_by_name():
    q = torch.randn(1, 2, 8, 64, device="cuda")
    with pytest.raises(ValueError, match="'flex'"):
        folded_attention(
            q, q, q, plan=MaskPlan.causal(8), window=None, prefix=0, sinks=None, scale=None
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_probe_passes(backend):
    """LSE convention and the gradient through it: one key, dq = dk = 0.3932, ds = -0.3932."""
    dtype = torch.bfloat16 if backend == "folded" else torch.float32
    check_attend(
        BACKENDS[backend], name=backend, device=torch.device("cuda"), dtype=dtype, gradients=True
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 2, 127, 128, 129, 257, 1000])
def test_lengths(backend, num_tokens):
    """Around the block sizes of the kernels and of the window; two rows, GQA."""
    plan = MaskPlan.causal(num_tokens)
    mask = plan.visible(window=127, prefix=0, device=torch.device("cuda"))
    q, k, v, s, grad = inputs(num_tokens, head_dim=64, dtype=torch.bfloat16, batch=2)
    q, k, v, s = (x.detach().cuda().requires_grad_() for x in (q, k, v, s))
    out = BACKENDS[backend](q, k, v, plan=plan, window=127, prefix=0, sinks=s, scale=None)
    got = (out, *torch.autograd.grad(out, (q, k, v, s), grad.cuda()))
    exact = oracle(q, k, v, s, mask, 64**-0.5)
    expected = (exact, *torch.autograd.grad(exact, (q, k, v, s), grad.cuda().double()))
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm() + 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("window", "prefix"), [(127, 0), (127, 5)])
def test_each_query_weighs_exactly_its_keys(backend, window, prefix):
    """Equal scores and one-hot values read the mask off the output; s = 0 is one more key."""
    num_tokens = 256
    q = torch.zeros(1, 1, num_tokens, num_tokens, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(num_tokens, device="cuda", dtype=torch.bfloat16)[None, None]
    sinks, plan = torch.zeros(1, device="cuda"), MaskPlan.causal(num_tokens)
    out = BACKENDS[backend](
        q, q, v, plan=plan, window=window, prefix=prefix, sinks=sinks, scale=None
    )[0, 0]
    for row, weights in enumerate(out.float().cpu()):
        near = min(row + 1, window + 1)
        keys = near + min(max(row - window, 0), prefix)
        assert (weights > 0).sum() == keys
        torch.testing.assert_close(
            weights[row], torch.tensor(1 / (keys + 1)), rtol=2**-7, atol=0, check_dtype=False
        )


@pytest.mark.parametrize("window", [None, 127])
def test_flex_memory_is_linear(window):
    def peak(num_tokens: int) -> int:
        plan = MaskPlan.causal(num_tokens)
        plan.block_mask(window=window, prefix=0, device=torch.device("cuda"))
        q, k, v, s, grad = inputs(num_tokens, head_dim=64, dtype=torch.bfloat16)
        q, k, v, s = (x.detach().cuda().requires_grad_() for x in (q, k, v, s))
        torch.cuda.reset_peak_memory_stats()
        flex_attention_sink(
            q, k, v, plan=plan, window=window, prefix=0, sinks=s, scale=None
        ).backward(grad.cuda())
        return torch.cuda.max_memory_allocated()

    peak(8192)  # compiling and tuning
    short, long = peak(8192), peak(32768)
    assert long <= 4.5 * short
    assert long < 32768 * 32768


def test_compiled_and_checkpointed_flex_is_eager_flex():
    module, plan, x = flex_layer()
    x.requires_grad_()
    leaves = [x, *module.parameters()]

    def checkpointed(x):
        return checkpoint(module, x, mask=plan, use_reentrant=False)

    def plain(x):
        return module(x, mask=plan)

    def run(call):
        return torch.autograd.grad(call(x).square().sum(), leaves)

    expected = run(plain)
    for call in (
        checkpointed,
        torch.compile(plain, fullgraph=True),
        torch.compile(checkpointed, fullgraph=True),
    ):
        for got, want in zip(run(call), expected, strict=True):
            # TF32 products inside the Triton kernels.
            assert (got - want).norm() <= 5e-3 * want.norm()


def flex_layer():
    """A layer, a packed row and its hidden states."""
    width, heads = 256, 4
    module = SinkAttention(
        layer=0,
        num_heads=heads,
        num_kv_heads=2,
        head_dim=64,
        q_proj=nn.Linear(width, 256),
        k_proj=nn.Linear(width, 128),
        v_proj=nn.Linear(width, 128),
        output_proj=nn.Linear(256, width),
        sinks=nn.Parameter(torch.linspace(-2, 2, heads)),
        window=127,
        backend="auto",
    ).cuda()
    tree = random_tree(5, num_nodes=8, max_len=150)
    plan = MaskPlan.from_tree(tree)
    x = torch.randn(1, len(tree), width, device="cuda")
    prepare(module, plan, device=x.device)
    return module, plan, x


def test_compiled_layer_with_flex():
    module, plan, x = flex_layer()
    got = torch.compile(module, fullgraph=True)(x, mask=plan)
    module.backend = "reference"
    torch.testing.assert_close(got, module(x, mask=plan), rtol=0, atol=5e-3)
