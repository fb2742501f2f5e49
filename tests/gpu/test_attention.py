"""The CUDA paths of attention: folded on FlashAttention, flex on Triton, against an oracle."""

import pytest
import torch
from torch import nn

from components.attention.flex import flex_attention_sink
from components.attention.folded import folded_attention
from components.attention.masks import document_tree
from components.attention.plan import MaskPlan
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


def test_compiled_layer_with_flex():
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
    got = torch.compile(module, fullgraph=True)(x, mask=plan)
    module.backend = "reference"
    torch.testing.assert_close(got, module(x, mask=plan), rtol=0, atol=5e-3)
