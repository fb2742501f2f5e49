"""Our attention in any torchtune decoder: llama, qwen2, mistral, phi3, gemma2 and their kin.

The projections (LoRA or not), norms and rotary embeddings stay the model's own modules under their
own names, so torchtune's checkpoints load unchanged; learned sinks add ``layers.*.attn.sinks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import (
    MultiHeadAttention,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from components.attention.sink_attention import SinkAttention
from components.models.tune_attention import TuneAttention

Windows = int | Sequence[int | None] | Literal["model"] | None


def with_sink_attention(
    model: TransformerDecoder,
    *,
    backend: str = "auto",
    sinks: float | None = None,
    window: Windows = "model",
    prefix: int = 0,
) -> TransformerDecoder:
    """Put ``SinkAttention`` in the place of every attention module of a torchtune decoder.

    Args:
        model: built by torchtune, LoRA or not; changed in place. Its weights stay where they are.
        backend: of the attention: auto, folded, flex or reference. A model that soft-caps its
            scores (gemma2) works with flex and reference only.
        sinks: where the learned sink logit of every query head starts; None for no sinks. A head
            whose LSE is well above its sink attends as before: -10 hardly changes a pretrained
            model, and can still grow.
        window: largest distance in positions that is still seen: one for all layers, one per layer
            (None for all keys), or "model" for what the model itself does. torchtune's own models
            have no window but gemma2, whose ``sliding_window_size`` W counts the query's own key:
            it is W - 1 here.
        prefix: positions at the start that no window hides.

    Returns:
        The model.

    Raises:
        ValueError: naming what cannot be replaced: cross attention, attention that is not causal, a
            KV cache in use, a model that has our attention already; or a setting out of range.
    """
    old = [_attention_of(layer, number) for number, layer in enumerate(model.layers)]
    windows = _windows(window, old)
    new = [
        _replacement(
            attention, number, backend=backend, sinks=sinks, window=windows[number], prefix=prefix
        )
        for number, attention in enumerate(old)
    ]
    for layer, attention in zip(model.layers, new, strict=True):
        layer.attn = attention
    return model


def _attention_of(layer: nn.Module, number: int) -> MultiHeadAttention | Gemma2Attention:
    """The module to replace, checked."""
    where = f"layer {number} ({type(layer).__name__})"
    attention = getattr(layer, "attn", None)
    if isinstance(attention, SinkAttention):
        raise ValueError(f"{where} has SinkAttention already: attach once")
    if not isinstance(layer, TransformerSelfAttentionLayer) or not isinstance(
        attention, (MultiHeadAttention, Gemma2Attention)
    ):
        raise ValueError(
            f"{where}: only TransformerSelfAttentionLayer with MultiHeadAttention or "
            f"Gemma2Attention can be attached to, not {type(attention).__name__}"
        )
    if not attention.is_causal:
        raise ValueError(f"{where}: is_causal = False; SinkAttention is causal")
    if attention.kv_cache is not None:
        raise ValueError(f"{where} has a KV cache: attach first, then call setup_caches()")
    return attention


def _windows(
    window: Windows, old: Sequence[MultiHeadAttention | Gemma2Attention]
) -> list[int | None]:
    """The window of each layer."""
    if isinstance(window, str):
        if window != "model":
            raise ValueError(
                f"window = {window!r}: must be a number, a list of one per layer, null (none) or "
                "'model' (what the model itself does)"
            )
        own = (getattr(attention, "sliding_window_size", None) for attention in old)
        return [None if size is None else size - 1 for size in own]
    if window is None or isinstance(window, int):
        return [window] * len(old)
    if len(window) != len(old):
        raise ValueError(
            f"window lists {len(window)} layers, the model has {len(old)}: one window per layer"
        )
    return list(window)


def _replacement(
    old: MultiHeadAttention | Gemma2Attention,
    number: int,
    *,
    backend: str,
    sinks: float | None,
    window: int | None,
    prefix: int,
) -> TuneAttention:
    """Our module with the old one's parts."""
    weight = old.q_proj.weight
    assert isinstance(weight, Tensor)
    learned = None
    if sinks is not None:
        # Never on the meta device, where a model may be built: loading weights brings no sinks.
        device = torch.device("cpu") if weight.is_meta else weight.device
        start = torch.full((old.num_heads,), float(sinks), dtype=weight.dtype, device=device)
        learned = nn.Parameter(start)
    new = TuneAttention(
        layer=number,
        num_heads=old.num_heads,
        num_kv_heads=old.num_kv_heads,
        head_dim=old.head_dim,
        q_proj=old.q_proj,
        k_proj=old.k_proj,
        v_proj=old.v_proj,
        output_proj=old.output_proj,
        pos_embeddings=old.pos_embeddings,
        q_norm=old.q_norm,
        k_norm=old.k_norm,
        rope_before_norms=True,
        sinks=learned,
        window=window,
        prefix=prefix,
        scale=getattr(old, "scaling", None),
        softcap=getattr(old, "softcapping", None),
        attn_dropout=old.attn_dropout,
        backend=backend,
    )
    return new.train(old.training)
