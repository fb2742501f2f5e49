"""Our attention in any torchtune decoder: llama, qwen2, mistral, phi3, gemma2 and their kin.

The projections (LoRA or not), norms and rotary embeddings stay the model's own modules under their
own names, so torchtune's checkpoints load unchanged; learned sinks add ``layers.*.attn.sinks``.

Suffixes: ``B`` batch, ``T`` new tokens, ``S`` keys, ``N`` query heads, ``K`` key heads, ``H`` head
dim, ``D`` width.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.modules import (
    KVCache,
    MultiHeadAttention,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from components.attention.plan import MaskPlan
from components.attention.reference import softmax_with_sink
from components.attention.sink_attention import Attend, SinkAttention

Windows = int | Sequence[int | None] | Literal["model"] | None


class TuneAttention(SinkAttention):
    """``SinkAttention`` with the rest of ``MultiHeadAttention``'s surface: KV caches, dense masks.

    Args:
        attn_dropout: of the module that this one replaces. There is no dropout here, so training
            with another value than 0 is refused.
        settings: of SinkAttention.
    """

    def __init__(self, *, attn_dropout: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.attn_dropout = attn_dropout
        self.kv_cache: KVCache | None = None
        self.cache_enabled = False

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        """Make and enable a KV cache; torchtune's ``TransformerDecoder.setup_caches`` calls this.

        Args:
            batch_size: rows B.
            dtype: of keys and values.
            max_seq_len: slots S.

        Raises:
            ValueError: there is one already.
        """
        if self.kv_cache is not None:
            raise ValueError(
                f"layer {self.layer} has a KV cache already; "
                "torchtune.modules.delete_kv_caches(model) removes them"
            )
        self.kv_cache = KVCache(
            batch_size=batch_size,
            max_seq_len=max_seq_len,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )
        self.cache_enabled = True

    def reset_cache(self) -> None:
        """Empty the KV cache.

        Raises:
            RuntimeError: there is none.
        """
        if self.kv_cache is None:
            raise RuntimeError("there is no KV cache to reset; call setup_caches() first")
        self.kv_cache.reset()

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: MaskPlan | Attend | Tensor | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: hidden states ``[B, T, D]``.
            y: where keys and values come from, as torchtune passes it: ``x`` itself.
            mask: as in SinkAttention, or torchtune's dense mask ``[B, T, S]`` (bool, True is
                visible), which a KV cache needs; windows hide more of it, sinks are added.
            input_pos: positions ``[B, T]``; None for 0, 1, 2, ...

        Returns:
            ``[B, T, D]``.

        Raises:
            ValueError: dropout in training; a dense mask without a KV cache for a fused backend, or
                of another shape; a KV cache without one; positions that a window needs and ``mask``
                does not tell.
        """
        if self.training and self.attn_dropout > 0:
            raise ValueError(
                f"attn_dropout = {self.attn_dropout}: SinkAttention has no dropout; build the "
                "model with attn_dropout=0.0 to train it"
            )
        if isinstance(mask, Tensor):
            return self._dense(x, y, mask=mask, input_pos=input_pos)
        if self.cache_enabled:
            raise ValueError(
                "the KV caches are enabled and need torchtune's mask, bool [B, T, S], not "
                f"{type(mask).__name__}; torchtune.modules.disable_kv_cache(model) turns them off"
            )
        if mask is None and input_pos is not None and self.window is not None:
            self._check_window_positions(input_pos)
        return super().forward(x, y, mask=mask, input_pos=input_pos)

    def _check_window_positions(self, input_pos: Tensor) -> None:
        """Without a plan a row is one rollout from 0 on: other positions would move the window."""
        if torch.compiler.is_compiling():
            return
        if not (input_pos == torch.arange(input_pos.shape[-1], device=input_pos.device)).all():
            raise ValueError(
                f"window = {self.window} with positions other than 0, 1, 2, ... needs a plan as "
                "the mask: MaskPlan.causal(T, position) or MaskPlan.from_tree"
            )

    def _dense(
        self, x: Tensor, y: Tensor | None, *, mask: Tensor, input_pos: Tensor | None
    ) -> Tensor:
        """Attention under a dense mask, over the KV cache if it is enabled."""
        if y is not None and y is not x:
            raise ValueError("SinkAttention is self attention only: y must be x or None")
        if not self.cache_enabled and self.backend != "reference":
            raise ValueError(
                f"a dense mask needs dense attention, and backend = {self.backend!r} is not: pass "
                "a MaskPlan (or None: causal), set up KV caches, or attach with backend='reference'"
            )
        q, k, v = self.project(x, input_pos=input_pos)
        start, slots = 0, k.shape[2]
        if self.cache_enabled:
            assert self.kv_cache is not None
            start, slots = self.kv_cache.size, self.kv_cache.k_cache.shape[2]
            k, v = self.kv_cache.update(k, v)
        if mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[1:] != (q.shape[2], slots):
            raise ValueError(
                f"mask must be bool [B, {q.shape[2]}, {slots}] (new tokens, keys), got "
                f"{mask.dtype} {list(mask.shape)}"
            )
        end = start + q.shape[2]  # later slots of a cache are empty
        visible = mask[..., :end] & self._in_window(start, end, input_pos, mask.device)
        out = softmax_with_sink(
            q,
            k[:, :, :end],
            v[:, :, :end],
            visible=visible[:, None],
            sinks=self.sinks,
            scale=self.scale,
            softcap=self.softcap,
        )
        return self.combine(out)

    def _in_window(
        self, start: int, end: int, input_pos: Tensor | None, device: torch.device
    ) -> Tensor:
        """What window and prefix leave of keys 0 to ``end``, ``[B or 1, T, S]``, for new tokens.

        Slots of a row follow on as its positions do, from wherever its left padding ends.
        """
        slot = torch.arange(end, device=device)
        if self.window is None:
            return torch.ones(1, 1, end, dtype=torch.bool, device=device)
        near = slot[start:, None] - slot <= self.window
        padding = torch.zeros(1, dtype=torch.int64, device=device)
        if input_pos is not None:
            padding = end - 1 - input_pos[..., -1].reshape(-1)
        return near | (slot - padding[:, None] < self.prefix)[:, None]


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
            close = difflib.get_close_matches(window, ["model"], n=1)
            hint = " (did you mean 'model'?)" if close else ""
            raise ValueError(
                f"window = {window!r}{hint}: must be a number, one per layer, null or 'model'"
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
