"""A tiny random decoder with every kind of attention, and what a plain forward makes of it."""

from __future__ import annotations

import torch
from torch import nn
from torchtune.modules import (
    FeedForward,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TransformerSelfAttentionLayer,
)

from components.attention.plan import MaskPlan
from components.attention.sink_attention import SinkAttention
from components.models.decoder import ModelConfig, PolicyModel
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest

VOCAB = 61
# (window, prefix) of each layer and the value around which sinks are drawn
KINDS = {
    "plain": ([(None, 0)] * 3, None),
    "sinks": ([(None, 0)] * 3, 2.0),
    "window": ([(4, 0), (None, 0), (9, 0)], None),
    "narrow": ([(0, 0), (1, 0), (2, 1)], 0.0),
    "prefix": ([(4, 3), (6, 40), (9, 12)], None),
    "all": ([(4, 3), (None, 0), (13, 22)], 1.0),
}


def tiny_model(kind: str = "plain", *, dtype: torch.dtype = torch.float32) -> PolicyModel:
    layers, sink = KINDS[kind]
    torch.manual_seed(0)
    dim, heads, kv_heads, head_dim = 48, 6, 2, 16
    config = ModelConfig(
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        embed_dim=dim,
        ffn_dim=64,
        vocab_size=VOCAB,
        max_positions=2048,
        rope_base=1000.0,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    rope = RotaryPositionalEmbeddings(head_dim, max_seq_len=2048, base=1000)

    def linear(a: int, b: int) -> nn.Linear:
        layer = nn.Linear(a, b, bias=False)
        nn.init.normal_(layer.weight, std=1.2 * a**-0.5)  # sharp enough for masks to matter
        return layer

    def block(index: int) -> nn.Module:
        window, prefix = layers[index]
        attention = SinkAttention(
            layer=index,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            q_proj=linear(dim, heads * head_dim),
            k_proj=linear(dim, kv_heads * head_dim),
            v_proj=linear(dim, kv_heads * head_dim),
            output_proj=linear(heads * head_dim, dim),
            pos_embeddings=rope,
            sinks=None if sink is None else nn.Parameter(sink + torch.randn(heads)),
            window=window,
            prefix=prefix,
            backend="reference",
        )
        mlp = FeedForward(
            gate_proj=linear(dim, 64), down_proj=linear(64, dim), up_proj=linear(dim, 64)
        )
        return TransformerSelfAttentionLayer(
            attention, mlp, sa_norm=RMSNorm(dim), mlp_norm=RMSNorm(dim)
        )

    model = PolicyModel(
        config,
        tok_embeddings=nn.Embedding(VOCAB, dim),
        layers=[block(index) for index in range(len(layers))],
        norm=RMSNorm(dim),
    )
    nn.init.normal_(model.tok_embeddings.weight, std=0.2)
    return model.to(dtype)


@torch.no_grad()
def plain_logits(model: PolicyModel, ids: list[int]) -> torch.Tensor:
    """Logits [L, V] of one rollout in one dense forward pass, nothing cached or shared."""
    return model(
        torch.tensor([ids]),
        mask=MaskPlan.causal(len(ids)),
        input_pos=torch.arange(len(ids))[None],
    )


def plain_logprobs(
    model: PolicyModel, context: list[int], sampled: tuple[int, ...], *, temperature: float
) -> list[float]:
    """Log-probability of each sampled id after a context."""
    logits = plain_logits(model, [*context, *sampled])[len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
    return logprobs[torch.arange(len(sampled)), list(sampled)].tolist()


def request(rollout_id: str, context: list[int], **settings) -> SampleRequest:
    defaults = {
        "shared_len": 0,
        "max_new_tokens": 8,
        "stop_ids": frozenset[int](),
        "temperature": 1.0,
        "seed": 0,
    }
    return SampleRequest(rollout_id=rollout_id, context=tuple(context), **(defaults | settings))


def watch_decode(engine: LocalEngine) -> tuple[list[int], list[int]]:
    """Bytes of the caches after each decode step to come, and the turns that were in it."""
    held: list[int] = []
    live: list[int] = []
    decode = engine._decode

    def watched(step, turns):
        out = decode(step, turns)
        held.append(engine.cache_bytes())
        live.append(len(turns))
        return out

    engine._decode = watched  # type: ignore[method-assign]
    return held, live
