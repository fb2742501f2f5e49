"""The attention module: torchtune's MultiHeadAttention, with sinks, windows and backends by name.

Suffixes: ``B`` batch, ``T`` packed tokens, ``N`` query heads, ``K`` key heads, ``H`` head dim,
``D`` width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from components.attention.flex import flex_attention_sink
from components.attention.folded import NO_SOFTCAP, folded_attention
from components.attention.plan import MaskPlan
from components.attention.probe import check_backend
from components.attention.reference import reference_attention

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "flex": flex_attention_sink,
    "folded": folded_attention,
    "reference": reference_attention,
}

_logged: set[str] = set()


@runtime_checkable
class Attend(Protocol):
    """An object that attends for the module, e.g. the KV cache of a sampling engine."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        prefix: int,
        sinks: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """Attention of the new tokens over what this object keeps.

        Args:
            layer: index of the calling layer.
            q: queries of the new tokens ``[B, N, T, H]``, rotated.
            k: their keys ``[B, K, T, H]``.
            v: their values ``[B, K, T, H]``.
            window: largest distance in positions that is still seen; None for no window.
            prefix: positions that no window hides.
            sinks: sink logit of each query head ``[N]``, or None.
            scale: factor on the scores; None for ``H ** -0.5``.

        Returns:
            ``[B, N, T, H]``.
        """
        ...


class SinkAttention(nn.Module):
    """Multi-head attention with an optional learned sink logit per head, a window and a prefix.

    Takes the place of torchtune's ``MultiHeadAttention`` in a transformer layer: the same call.

    Args:
        layer: index of the layer, handed to an :class:`Attend` object.
        num_heads: query heads N.
        num_kv_heads: key and value heads K; a divisor of N.
        head_dim: H.
        q_proj: D -> N * H.
        k_proj: D -> K * H.
        v_proj: D -> K * H.
        output_proj: N * H -> D.
        pos_embeddings: rotary embedding, called with ``([B, T, n, H], input_pos=[B, T])``, or None.
        q_norm: norm over the head dimension of q, or None.
        k_norm: the same for k.
        rope_before_norms: rotate q and k before their norms, as torchtune's own attention does;
            by default the norms come first, as in Qwen3.
        sinks: one logit per query head ``[N]``; None for plain attention.
        window: largest distance in positions that is still seen; None for no window.
        prefix: positions at the start of each rollout that no window hides.
        scale: factor on the scores; None for ``H ** -0.5``.
        softcap: scaled scores become ``softcap * tanh(score / softcap)`` (Gemma 2); None for none.
        backend: ``"flex"``, ``"folded"``, ``"reference"``, or ``"auto"``: flex on CUDA, folded
            elsewhere.

    Raises:
        ValueError: an unknown backend, head counts that do not divide, sinks of another shape, a
            negative window or prefix, a soft cap that is not positive or beyond the backend.
    """

    def __init__(
        self,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        output_proj: nn.Module,
        pos_embeddings: nn.Module | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        sinks: nn.Parameter | None = None,
        window: int | None = None,
        prefix: int = 0,
        scale: float | None = None,
        softcap: float | None = None,
        rope_before_norms: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(
                f"attention backend must be one of {['auto', *BACKENDS]}, got {backend!r}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}"
            )
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(
                f"sinks must be [{num_heads}], one per query head, got {list(sinks.shape)}"
            )
        if window is not None and window < 0:
            raise ValueError(f"window must be None or >= 0, got {window}")
        if prefix < 0:
            raise ValueError(f"prefix must be >= 0, got {prefix}")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap must be None or > 0, got {softcap}")
        if softcap is not None and backend == "folded":
            raise ValueError(f"softcap = {softcap}: {NO_SOFTCAP}")
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj
        self.output_proj = output_proj
        self.pos_embeddings = pos_embeddings
        self.q_norm, self.k_norm = q_norm, k_norm
        self.sinks = sinks
        self.window, self.prefix = window, prefix
        self.scale, self.softcap = scale, softcap
        self.rope_before_norms = rope_before_norms
        self.backend = backend

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: MaskPlan | Attend | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: hidden states ``[B, T, D]``.
            y: where keys and values come from, as torchtune passes it: ``x`` itself.
            mask: the plan of the batch, or an object that attends itself; None for rows that are
                one rollout each, from position 0.
            input_pos: positions ``[B, T]`` in the rollout, for the rotation; None for 0, 1, 2, ...

        Returns:
            ``[B, T, D]``.

        Raises:
            ValueError: a mask of another kind, cross attention, a backend that cannot run here.
            RuntimeError: a backend whose kernel gives wrong values here (see check_backend).
        """
        if y is not None and y is not x:
            raise ValueError("SinkAttention is self attention only: y must be x or None")
        q, k, v = self.project(x, input_pos=input_pos)
        settings = {
            "window": self.window,
            "prefix": self.prefix,
            "sinks": self.sinks,
            "scale": self.scale,
        }
        if mask is None or isinstance(mask, MaskPlan):
            plan = MaskPlan.causal(x.shape[1]) if mask is None else mask
            name = self.backend_on(x.device)
            if not torch.compiler.is_compiling():
                check_backend(BACKENDS[name], name=name, device=x.device)
            out = BACKENDS[name](q, k, v, plan=plan, softcap=self.softcap, **settings)
            return self.combine(out)
        if not isinstance(mask, Attend):
            raise ValueError(
                f"mask must be a MaskPlan, an object with attend(), or None, got "
                f"{type(mask).__name__}; build a plan with MaskPlan.from_tree"
            )
        if self.softcap is not None:
            raise ValueError(
                f"softcap = {self.softcap}: {type(mask).__name__} merges pieces of attention by "
                "their LSE and has no kernel that caps scores"
            )
        return self.combine(mask.attend(self.layer, q, k, v, **settings))

    def project(self, x: Tensor, *, input_pos: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed and rotated.

        Args:
            x: hidden states ``[B, T, D]``.
            input_pos: positions ``[B, T]``; None for 0, 1, 2, ...

        Returns:
            ``[B, N, T, H]``, ``[B, K, T, H]``, ``[B, K, T, H]``.
        """
        q = self._heads(self.q_proj(x), self.num_heads, self.q_norm, input_pos)
        k = self._heads(self.k_proj(x), self.num_kv_heads, self.k_norm, input_pos)
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        return q, k, v

    def combine(self, out: Tensor) -> Tensor:
        """The output projection of all heads.

        Args:
            out: ``[B, N, T, H]``.

        Returns:
            ``[B, T, D]``.
        """
        return self.output_proj(out.transpose(1, 2).flatten(2))

    def _heads(
        self, x: Tensor, num: int, norm: nn.Module | None, input_pos: Tensor | None
    ) -> Tensor:
        """``[B, T, n * H]`` to normed, rotated heads ``[B, n, T, H]``: a view, not a copy."""
        x = x.view(x.shape[0], x.shape[1], num, self.head_dim)
        if norm is not None and not self.rope_before_norms:
            x = norm(x)
        if self.pos_embeddings is not None:
            x = self.pos_embeddings(x, input_pos=input_pos)
        if norm is not None and self.rope_before_norms:
            x = norm(x)
        return x.transpose(1, 2)

    def backend_on(self, device: torch.device) -> str:
        """The backend that runs on ``device``: what ``auto`` stands for, logged once.

        Args:
            device: where the hidden states are.
        """
        if self.backend != "auto":
            return self.backend
        name = "flex" if device.type == "cuda" else "folded"
        if not torch.compiler.is_compiling() and device.type not in _logged:
            _logged.add(device.type)
            logger.info("attention backend on %s: %s (auto)", device.type, name)
        return name


def prepare(model: nn.Module, plan: MaskPlan, *, device: torch.device) -> None:
    """Build what the backends of a model need from a plan, once per batch, outside compiled code.

    Only needed before calling *compiled* modules whose backend is flex; eager modules do it on
    their first call.

    Args:
        model: holds :class:`SinkAttention` modules.
        plan: the mask of the batch.
        device: where the hidden states will be.
    """
    for module in model.modules():
        if not isinstance(module, SinkAttention):
            continue
        name = module.backend_on(device)
        check_backend(BACKENDS[name], name=name, device=device)
        if name == "flex":
            plan.block_mask(window=module.window, prefix=module.prefix, device=device)
