"""The engine and torch.compile: its own layers run eager, other compiled code stays compiled."""

from __future__ import annotations

import pytest
import torch

from components.policy.local import LocalEngine
from tests.unit.policy.tiny import request, tiny_model


@pytest.fixture
def graphs():
    """Graphs that were compiled, and a ``torch.compile`` that counts them and compiles nothing."""
    torch._dynamo.reset()
    found = []

    def backend(graph, _inputs):
        found.append(graph)
        return graph.forward

    yield found, lambda fn: torch.compile(fn, backend=backend, dynamic=True)
    torch._dynamo.reset()


def sampled(model) -> tuple[int, ...]:
    engine = LocalEngine(model, max_tokens=64, max_batch_size=1)
    turn = request("r", [1, 2, 3, 4], max_new_tokens=6, temperature=1.0, seed=5)
    return engine.generate([turn])[0].ids


def test_compiled_layers_sample_eager_and_the_same(graphs):
    compiled, compiler = graphs
    model = tiny_model("plain")
    expected = sampled(model)
    for layer in model.layers:
        layer.forward = compiler(layer.forward)
    assert sampled(model) == expected
    assert compiled == []


def test_what_another_thread_compiles_is_not_switched_off(graphs):
    """While the engine samples ahead the trainer's attention must not run eager: T x T."""
    compiled, compiler = graphs
    attention = compiler(lambda x: torch.softmax(x, -1) * 2)
    model = tiny_model("plain")
    seen = []

    def in_between(*_):
        seen.append(attention(torch.ones(3)))

    model.tok_embeddings.register_forward_hook(in_between)
    sampled(model)
    assert seen
    assert len(compiled) == 1
