"""``SinkAttention`` with the rest of what torchtune's decoders ask of an attention module.

KV caches (``setup_caches``, ``disable_kv_cache``, ``delete_kv_caches``), dense masks, and a refusal
of dropout.

Suffixes: ``B`` batch, ``T`` new tokens, ``S`` keys, ``D`` width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchtune.modules import KVCache

from components.attention.plan import MaskPlan
from components.attention.reference import softmax_with_sink
from components.attention.sink_attention import Attend, SinkAttention


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
            start = self.kv_cache.size
            k, v = self.kv_cache.update(k, v)
            slots = k.shape[2]
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
