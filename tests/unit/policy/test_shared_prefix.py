"""Shared-prefix decoding with sinks and windows against a dense decoder written out in fp64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from components.attention import lse
from components.models.decoder import PolicyModel
from components.policy import cache
from components.policy.local import LocalEngine
from tests.unit.policy.tiny import VOCAB, request, tiny_model

SHARED = 19
# (window, prefix) of the three layers; a prompt of 19 tokens is shared, rollouts go on to 45.
LAYOUTS = {
    "window inside the shared part": [(30, 0), (25, 3), (40, 0)],
    "window leaves the shared part": [(5, 0), (9, 2), (1, 4)],
    "always-visible prefix beyond the shared part": [(3, 25), (0, 19), (7, 20)],
    "with and without": [(None, 0), (6, 0), (18, 1)],
    "no window": [(None, 0)] * 3,
}


def build(layout: str, *, sinks: bool) -> PolicyModel:
    model = tiny_model("sinks" if sinks else "plain")
    for layer, (window, prefix) in zip(model.layers, LAYOUTS[layout], strict=True):
        layer.attn.window, layer.attn.prefix = window, prefix
    return model


def norm(x: Tensor, module: nn.Module) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + module.eps).rsqrt() * module.scale.double()


def rotate(x: Tensor, base: float) -> Tensor:
    """Pairs (2i, 2i + 1) of ``[T, n, H]`` turned by position * base ** (-2i / H)."""
    num_tokens, _, dim = x.shape
    angle = torch.arange(num_tokens, dtype=torch.float64)[:, None, None]
    angle = angle * base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


@torch.no_grad()
def dense_logprobs(model: PolicyModel, ids: list[int]) -> Tensor:
    """Log-probabilities [L, V] of one rollout: no cache, no kernel, no LSE."""
    config = model.config

    def linear(x: Tensor, module: nn.Module) -> Tensor:
        return x @ module.weight.double().T

    x = model.tok_embeddings.weight.double()[ids]
    q_at, k_at = torch.arange(len(ids))[:, None], torch.arange(len(ids))
    for layer in model.layers:
        attention, h = layer.attn, norm(x, layer.sa_norm)
        q, k, v = (
            linear(h, projection).unflatten(-1, (-1, config.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotate(q, config.rope_base), rotate(k, config.rope_base)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qnh,knh->nqk", q, k) / config.head_dim**0.5
        visible = k_at <= q_at
        if attention.window is not None:
            visible &= (q_at - k_at <= attention.window) | (k_at < attention.prefix)
        scores = scores.masked_fill(~visible, -torch.inf)
        if attention.sinks is not None:
            column = attention.sinks.double()[:, None, None].expand(-1, len(ids), 1)
            scores = torch.cat([scores, column], -1)
        weights = torch.softmax(scores, -1)[..., : len(ids)]
        out = torch.einsum("nqk,knh->qnh", weights, v).flatten(1)
        x = x + linear(out, attention.output_proj)
        h = norm(x, layer.mlp_norm)
        gated = nn.functional.silu(linear(h, layer.mlp.w1)) * linear(h, layer.mlp.w3)
        x = x + linear(gated, layer.mlp.w2)
    logits = norm(x, model.norm) @ model.tok_embeddings.weight.double().T
    return logits.log_softmax(-1)


def some_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def largest_error(model: PolicyModel) -> float:
    """Of the log-probabilities of two turns of four rollouts with one prompt and one without."""
    engine = LocalEngine(model, max_tokens=64, max_batch_size=8, prefill_chunk=7)
    prompt = some_ids(1, SHARED)
    contexts = {str(i): prompt + some_ids(10 + i, 1 + 2 * i) for i in range(4)}
    contexts["alone"] = some_ids(2, 12)
    worst = 0.0
    for turn in range(2):
        requests = [
            request(
                name,
                ids,
                shared_len=0 if name == "alone" else SHARED,
                max_new_tokens=6 + 2 * index,
                seed=turn,
            )
            for index, (name, ids) in enumerate(contexts.items())
        ]
        for asked, result in zip(requests, engine.generate(requests), strict=True):
            ids = [*asked.context, *result.ids]
            expected = dense_logprobs(model, ids)[len(asked.context) - 1 : -1]
            expected = expected[torch.arange(len(result.ids)), list(result.ids)]
            error = (torch.tensor(result.logprobs, dtype=torch.float64) - expected).abs().max()
            worst = max(worst, error.item())
            contexts[asked.rollout_id] = [*ids, *some_ids(100 + turn, 2)]
    assert engine.stats.shared_tokens == SHARED  # computed once for all four
    assert engine.stats.decode_tokens > 50
    return worst


@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_the_dense_decoder(layout, sinks, block, monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", block)
    assert largest_error(build(layout, sinks=sinks)) < 2e-5


def sink_in_each_piece(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A merge that counts the sink of the first piece again."""
    return TRUE_WEIGHTS(lse_a + 0.5, lse_b)


def ungated(lse_keys: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    gate, with_sink = TRUE_GATE(lse_keys, sinks)
    return torch.ones_like(gate), with_sink


TRUE_WEIGHTS, TRUE_GATE = lse.merge_weights, lse.sink_gate


@pytest.mark.parametrize(
    ("phase", "name", "wrong"),
    [
        ("prefill", "merge_weights", sink_in_each_piece),
        ("prefill", "sink_gate", ungated),
        ("decode", "sink_gate", ungated),  # it merges nothing: one softmax for all keys
    ],
)
def test_both_phases_use_the_one_algebra(phase, name, wrong, monkeypatch):
    """A fault planted in lse.py is seen in the first tokens (prefill) and in those after them."""
    model = build("with and without", sinks=True)
    context = some_ids(1, SHARED) + some_ids(10, 5)
    settings = {"shared_len": SHARED, "max_new_tokens": 1 if phase == "prefill" else 8}
    asked = request("a", context, **settings)

    def error(result, first: int) -> float:
        ids = list(result.ids)
        expected = dense_logprobs(model, context + ids)[len(context) - 1 : -1]
        expected = expected[torch.arange(len(ids)), ids]
        return (torch.tensor(result.logprobs, dtype=torch.float64) - expected)[first:].abs().max()

    engine = LocalEngine(model, max_tokens=64, max_batch_size=1)
    if phase == "prefill":
        assert error(engine.generate([asked])[0], 0) < 2e-5
        monkeypatch.setattr(lse, name, wrong)
        engine.sync(1)
        assert error(engine.generate([asked])[0], 0) > 1e-3
        return
    # The keys are computed by a sound prefill: only the decode steps meet the fault.
    serve = engine._decode

    def faulty(decode, live):
        with monkeypatch.context() as patch:
            patch.setattr(lse, name, wrong)
            return serve(decode, live)

    assert error(engine.generate([asked])[0], 0) < 2e-5
    monkeypatch.setattr(engine, "_decode", faulty)
    engine.sync(1)
    assert error(engine.generate([asked])[0], 1) > 1e-3
