"""The module: torchtune's call, backends by name, checkpointing, compilation."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchtune.modules import MultiHeadAttention, RMSNorm, RotaryPositionalEmbeddings

from components.attention import sink_attention
from components.attention.plan import MaskPlan
from components.attention.rope import RotaryEmbedding
from components.attention.sink_attention import Attend, SinkAttention, prepare

from .cases import random_tree

WIDTH, HEADS, KV_HEADS, DIM = 24, 6, 2, 4


def parts(norms: bool = False):
    torch.manual_seed(0)
    modules = {
        "q_proj": nn.Linear(WIDTH, HEADS * DIM, bias=False),
        "k_proj": nn.Linear(WIDTH, KV_HEADS * DIM, bias=False),
        "v_proj": nn.Linear(WIDTH, KV_HEADS * DIM, bias=False),
        "output_proj": nn.Linear(HEADS * DIM, WIDTH, bias=False),
    }
    if norms:
        modules |= {"q_norm": RMSNorm(DIM), "k_norm": RMSNorm(DIM)}
        for name in ("q_norm", "k_norm"):
            nn.init.normal_(modules[name].scale)
    return modules


def build(*, sink: float | None = 1.0, dtype: torch.dtype = torch.float32, **settings):
    sinks = None if sink is None else nn.Parameter(torch.linspace(-sink, sink, HEADS))
    module = SinkAttention(
        **({"layer": 3, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM} | settings),
        **parts(),
        pos_embeddings=RotaryEmbedding(DIM, max_positions=2000),
        sinks=sinks,
    )
    return module.to(dtype)


def hidden(num_tokens: int, *, batch: int = 1, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, num_tokens, WIDTH, generator=generator, dtype=dtype)
    return x.requires_grad_()


def gradients(module, out, x):
    leaves = [x, *module.parameters()]
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def close(got, expected, *, atol=2e-6):
    for a, b in zip(got, expected, strict=True):
        scale = max(b.abs().max().item(), 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=atol * scale)


def test_equals_torchtunes_attention():
    x, positions = hidden(40, batch=2), 2 * torch.arange(40)[None] + 3
    theirs = MultiHeadAttention(
        embed_dim=WIDTH,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        **parts(),
        pos_embeddings=RotaryPositionalEmbeddings(DIM, 100),
    )
    ours = build(sink=None)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    expected = gradients(theirs, theirs(x, x, input_pos=positions), x)
    close(gradients(ours, ours(x, x, input_pos=positions), x), expected)
    plain = gradients(theirs, theirs(x, x), x)
    close(gradients(ours, ours(x, x, mask=MaskPlan.causal(40)), x), plain)


def test_norms_come_before_the_rotation():
    x, positions = hidden(10), torch.arange(10)[None]
    rope = RotaryPositionalEmbeddings(DIM, 100)
    modules = parts(norms=True)
    ours = SinkAttention(
        layer=0,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        **modules,
        pos_embeddings=rope,
    )
    q = rope(modules["q_norm"](modules["q_proj"](x).view(1, 10, HEADS, DIM)), input_pos=positions)
    k = rope(
        modules["k_norm"](modules["k_proj"](x).view(1, 10, KV_HEADS, DIM)), input_pos=positions
    )
    v = modules["v_proj"](x).view(1, 10, KV_HEADS, DIM)
    out = nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    expected = modules["output_proj"](out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours(x, input_pos=positions), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (13, 0), (13, 5)])
def test_folded_equals_reference_on_a_tree(window, prefix):
    tree = random_tree(3, num_nodes=8, max_len=30)
    plan, positions = MaskPlan.from_tree(tree), tree.position[None]
    x = hidden(len(tree), batch=2, dtype=torch.float64)
    results = []
    for backend in ("folded", "reference"):
        module = build(backend=backend, window=window, prefix=prefix, dtype=torch.float64)
        out = module(x, x, mask=plan, input_pos=positions)
        results.append(gradients(module, out, x))
    close(results[0], results[1], atol=1e-12)


def test_each_sink_belongs_to_its_query_head():
    """A huge sink on head n silences exactly head n's columns of the output projection."""
    x = hidden(12)
    for n in range(HEADS):
        module = build(sink=None)
        nn.init.zeros_(module.output_proj.weight)
        with torch.no_grad():
            module.output_proj.weight[:, :] = torch.eye(WIDTH)
        plain = module(x)
        values = torch.full((HEADS,), -torch.inf)
        values[n] = 1000.0
        module.sinks = nn.Parameter(values)
        got = module(x)
        columns = slice(n * DIM, (n + 1) * DIM)
        assert (got[..., columns] == 0).all()
        kept = torch.ones(WIDTH, dtype=torch.bool)
        kept[columns] = False
        torch.testing.assert_close(got[..., kept], plain[..., kept])


def test_checkpointed_equals_plain():
    tree = random_tree(3, num_nodes=8, max_len=30)
    plan, positions = MaskPlan.from_tree(tree), tree.position[None]
    module, x = build(window=13), hidden(len(tree))
    expected = gradients(module, module(x, x, mask=plan, input_pos=positions), x)
    out = checkpoint(module, x, x, mask=plan, input_pos=positions, use_reentrant=False)
    for a, b in zip(gradients(module, out, x), expected, strict=True):
        assert torch.equal(a, b)


class Recorder:
    """Attends by itself, as a KV cache does."""

    def attend(self, layer, q, k, v, *, window, prefix, sinks, scale):
        self.seen = (layer, q.shape, k.shape, v.shape, window, prefix, sinks, scale)
        return torch.full_like(q, 2.0)


def test_an_attend_object_takes_over():
    module, recorder = build(window=9, prefix=2, scale=0.5), Recorder()
    assert isinstance(recorder, Attend)
    out = module(hidden(7, batch=2), mask=recorder, input_pos=torch.arange(7)[None] + 30)
    assert recorder.seen[:1] == (3,)
    assert recorder.seen[1:4] == ((2, HEADS, 7, DIM), (2, KV_HEADS, 7, DIM), (2, KV_HEADS, 7, DIM))
    assert recorder.seen[4:] == (9, 2, module.sinks, 0.5)
    expected = module.output_proj(torch.full((2, 7, HEADS * DIM), 2.0))
    torch.testing.assert_close(out, expected)


def test_auto_is_folded_on_a_cpu_and_says_so_once(caplog, monkeypatch):
    monkeypatch.setattr(sink_attention, "_logged", set())
    with caplog.at_level(logging.INFO, logger="components.attention.sink_attention"):
        for _ in range(3):
            build()(hidden(5))
    assert [record.getMessage() for record in caplog.records] == [
        "attention backend on cpu: folded (auto)"
    ]
    assert build().backend_on(torch.device("cuda")) == "flex"
    assert build(backend="folded").backend_on(torch.device("cuda")) == "folded"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "sdpa"}, "must be one of .*'auto', 'flex', 'folded', 'reference'.*got 'sdpa'"),
        ({"num_kv_heads": 4}, "not a multiple"),
        ({"num_heads": 4}, r"sinks must be \[4\]"),
        ({"window": -1}, "window must be None or >= 0, got -1"),
        ({"prefix": -1}, "prefix must be >= 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        build(**settings)


def test_bad_calls_are_refused():
    x = hidden(5)
    with pytest.raises(ValueError, match=r"got Tensor; build a plan with MaskPlan\.from_tree"):
        build()(x, x, mask=torch.ones(1, 5, 5).bool())
    with pytest.raises(ValueError, match="self attention only"):
        build()(x, hidden(5))
    with pytest.raises(ValueError, match="use backend='folded'"):
        build(backend="flex")(x)


def test_prepare_builds_one_block_mask_per_kind():
    plan = MaskPlan.causal(200)
    model = nn.ModuleList(build(backend="flex", window=w) for w in (None, 20, None, 20))
    prepare(model, plan, device=torch.device("cpu"))
    assert len(plan._block_masks) == 2
    with torch.no_grad():
        expected = build(backend="reference", window=20)(hidden(200), mask=plan)
        torch.testing.assert_close(model[1](hidden(200), mask=plan), expected, atol=1e-6, rtol=0)


def test_compiled_fullgraph_equals_eager_with_few_graphs():
    """Many batches, one or two graphs, backward included; test_compile.py has the rest."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = build(window=40)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for seed in range(6):
        tree = random_tree(seed, num_nodes=seed + 1, max_len=40)
        plan, positions = MaskPlan.from_tree(tree), tree.position[None]
        x = hidden(len(tree))
        expected = gradients(module, module(x, x, mask=plan, input_pos=positions), x)
        got = gradients(module, compiled(x, x, mask=plan, input_pos=positions), x)
        close(got, expected)
    assert counter.frame_count <= 2
    for num_tokens in (30, 50):  # no plan at all: the stock call of torchtune
        x = hidden(num_tokens)
        close(gradients(module, compiled(x, x), x), gradients(module, module(x, x), x))
    torch._dynamo.reset()
