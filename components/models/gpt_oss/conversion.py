"""gpt-oss's weights: Hugging Face's names and layouts, and this model's.

Only q and k change their layout: Hugging Face rotates halves of a head, our rotary embedding
neighbouring pairs, so their rows (and biases) are permuted. That copies bits.

Suffixes: ``n`` heads, ``H`` head dim, ``D`` width.
"""

from __future__ import annotations

import re

from torch import Tensor

from components.models.decoder import ModelConfig

_TO_HF = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "attn.sinks": "self_attn.sinks",
    "sa_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.router": "mlp.router",
    "mlp.experts.gate_up_proj.weight": "mlp.experts.gate_up_proj",
    **{
        f"mlp.experts.{name}.{part}": f"mlp.experts.{name}_{part}"  # MXFP4, kept as it is
        for name in ("gate_up_proj", "down_proj")
        for part in ("blocks", "scales")
    },
    "mlp.experts.gate_up_proj.bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
    "mlp.experts.down_proj.bias": "mlp.experts.down_proj_bias",
}
_LINEARS = ("q_proj", "k_proj", "v_proj", "output_proj", "router")
_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def _names() -> dict[str, str]:
    """Our name inside a layer -> Hugging Face's, biases and weights apart."""
    names = {}
    for ours, theirs in _TO_HF.items():
        if ours.endswith(_LINEARS):
            names |= {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")}
        else:
            names[ours] = theirs
    return names


_INSIDE = _names()
_FROM_HF = {theirs: ours for ours, theirs in {**_INSIDE, **_OUTSIDE}.items()}


def from_hf(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under the model's names.

    Args:
        state: under Hugging Face's names; MXFP4 decoded.
        config: of the model.
    """
    converted = {}
    for name, value in state.items():
        layer = _LAYER.fullmatch(name.removeprefix("model."))
        ours = f"layers.{layer[1]}.{_FROM_HF[layer[2]]}" if layer else _FROM_HF[name]
        converted[ours] = _permute(value, ours, config, back=False)
    return converted


def to_hf(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The reverse of :func:`from_hf`, bit for bit.

    Args:
        state: under the model's names, adapters merged.
        config: of the model.
    """
    converted = {}
    for name, value in state.items():
        layer = _LAYER.fullmatch(name)
        theirs = f"model.layers.{layer[1]}.{_INSIDE[layer[2]]}" if layer else _OUTSIDE[name]
        converted[theirs] = _permute(value, name, config, back=True)
    return converted


def _permute(value: Tensor, name: str, config: ModelConfig, *, back: bool) -> Tensor:
    """Rows of q and k ``[n * H, ...]`` from halves to pairs, or back; others as they are."""
    if ".attn.q_proj." in name:
        num_heads = config.num_heads
    elif ".attn.k_proj." in name:
        num_heads = config.num_kv_heads
    else:
        return value
    half = config.head_dim // 2
    shape = (num_heads, half, 2) if back else (num_heads, 2, half)
    return value.unflatten(0, shape).transpose(1, 2).flatten(0, 2)
