"""Compiled, checkpointed, both: the same numbers, no graph break, few graphs over many lengths.

Those here trace with ``aot_eager``; the ones marked ``compile`` make machine code with inductor.
"""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

from components.attention import flex
from components.attention.plan import MaskPlan
from components.attention.reference import reference_attention
from components.attention.sink_attention import prepare

from .cases import inputs, random_tree
from .test_sink_attention import build, close, gradients, hidden

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def differentiable(monkeypatch):
    """Let FlexAttention differentiate on a CPU, which torch forbids: the device check goes."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *args: None)
    monkeypatch.setattr(flex, "check_trainable", lambda *args: None)


def layer(backend, *, sink, window):
    """The attention of a layer with its norm, as a model compiles it."""
    attention = build(backend=backend, sink=sink, window=window)
    return Layer(attention)


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(24), attention

    def forward(self, x, *, mask, input_pos):
        return x + self.attention(self.norm(x), mask=mask, input_pos=input_pos)


@pytest.mark.parametrize("sink", [None, 2.0])
@pytest.mark.parametrize("window", [None, 11])
def test_flex_in_its_compiled_layer(differentiable, sink, window):
    """One graph, no break, values and gradients (through the LSE) of the dense reference."""
    tree = random_tree(2, num_nodes=5, max_len=30)
    plan, x = MaskPlan.from_tree(tree), hidden(len(tree))
    call = {"mask": plan, "input_pos": tree.position[None]}
    module, dense = (layer(name, sink=sink, window=window) for name in ("flex", "reference"))
    dense.load_state_dict(module.state_dict())
    prepare(module, plan, device=CPU)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter)  # breaks would be allowed here...
    got = gradients(module, compiled(x, **call), x)
    assert not counters["graph_break"]  # ...and there are none
    assert counter.frame_count == 1
    close(got, gradients(dense, dense(x, **call), x), atol=1e-5)


def test_a_graph_break_would_be_counted(differentiable, monkeypatch):
    """The count above can fail: FlexAttention behind compiler.disable, as torchtune has it."""
    disabled = torch.compiler.disable(torch_flex.flex_attention)
    monkeypatch.setattr(flex, "flex_attention", disabled)
    plan, x = MaskPlan.causal(20), hidden(20)
    module = layer("flex", sink=None, window=None)
    prepare(module, plan, device=CPU)
    torch.compile(module, backend="aot_eager")(x, mask=plan, input_pos=None)
    assert counters["graph_break"]


def test_flex_asks_for_the_lse_only_when_it_has_sinks(monkeypatch):
    asked, right = [], torch_flex.flex_attention

    def recorded(*args, **kwargs):
        asked.append(kwargs.get("return_aux"))
        return right(*args, **kwargs)

    monkeypatch.setattr(flex, "flex_attention", recorded)
    q, k, v, s, _ = (x.detach() for x in inputs(12, dtype=torch.float32))
    settings = {"plan": MaskPlan.causal(12), "window": None, "prefix": 0, "scale": None}
    for sinks in (None, s):
        out = flex.flex_attention_sink(q, k, v, sinks=sinks, **settings)
        expected = reference_attention(q, k, v, sinks=sinks, **settings)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert asked[0] is None
    assert asked[1].lse


def test_a_block_mask_that_was_not_prepared_is_an_error(differentiable):
    module = layer("flex", sink=None, window=None)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="needs its BlockMask beforehand"):
        compiled(hidden(20), mask=MaskPlan.causal(20), input_pos=None)


def four_ways(module, call, x, *, backend):
    """Gradients eager, compiled, checkpointed, compiled and checkpointed."""

    def checkpointed(x):
        return checkpoint(module, x, **call, use_reentrant=False)

    def plain(x):
        return module(x, **call)

    runs = {"eager": plain, "checkpointed": checkpointed}
    for name, run in list(runs.items()):
        runs[f"compiled {name}"] = torch.compile(run, backend=backend, fullgraph=True)
    return {name: gradients(module, run(x), x) for name, run in runs.items()}


@pytest.mark.parametrize(
    ("backend", "compiler"),
    [
        ("folded", "aot_eager"),
        ("flex", "aot_eager"),
        pytest.param("folded", "inductor", marks=pytest.mark.compile),
    ],
)
def test_compiled_and_checkpointed_are_eager(differentiable, backend, compiler):
    tree = random_tree(3, num_nodes=8, max_len=30)
    plan, x = MaskPlan.from_tree(tree), hidden(len(tree))
    module = layer(backend, sink=1.0, window=13)
    prepare(module, plan, device=CPU)
    results = four_ways(
        module, {"mask": plan, "input_pos": tree.position[None]}, x, backend=compiler
    )
    for name, got in results.items():
        close(got, results["eager"])
        if name == "checkpointed":
            assert all(torch.equal(a, b) for a, b in zip(got, results["eager"], strict=True))


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.compile)]
)
def test_many_lengths_few_graphs(compiler):
    """Twenty batches of other lengths and shapes: two graphs, one for the first and one for all."""
    counter = CompileCounterWithBackend(compiler)
    module = layer("folded", sink=1.0, window=40)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for seed in range(20):
        tree = random_tree(seed, num_nodes=1 + seed % 5, max_len=10 + 7 * seed)
        compiled(
            hidden(len(tree)), mask=MaskPlan.from_tree(tree), input_pos=tree.position[None]
        ).sum().backward()
    assert counter.frame_count <= 2


def test_flex_recompiles_are_bounded(differentiable):
    """A BlockMask is part of the graph's inputs: other lengths must not mean other graphs.

    Twenty rows of 9 to 743 tokens, compiled as a run compiles its layers: two graphs at the first,
    one more for the first row of more than one block (128 tokens). They only trace: torch makes no
    machine code on a CPU for FlexAttention with its LSE (NotImplementedError), nor for queries that
    are a view.
    """
    counter = CompileCounterWithBackend("aot_eager")
    module, dense = (layer(name, sink=1.0, window=11) for name in ("flex", "reference"))
    dense.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    lengths, graphs = [], []
    for seed in range(20):
        tree = random_tree(seed, num_nodes=1 + seed % 5, max_len=40 + 10 * seed)
        plan, x = MaskPlan.from_tree(tree), hidden(len(tree))
        call = {"mask": plan, "input_pos": tree.position[None]}
        prepare(module, plan, device=CPU)
        got = gradients(module, compiled(x, **call), x)
        close(got, gradients(dense, dense(x, **call), x), atol=1e-5)
        lengths.append(len(tree))
        graphs.append(counter.frame_count)
    assert len(set(lengths)) == 20
    assert min(lengths) < 128 < 4 * 128 < max(lengths)
    assert graphs[-1] <= 3
    long = next(n for n, length in enumerate(lengths) if length > 128)
    assert graphs[long] == graphs[-1]  # none after the first long row
