"""Sink attention on FlexAttention: the kernel returns its LSE, the sink is applied to its output.

Gradients flow through the LSE. Called inside a compiled layer it becomes part of that graph; called
eagerly on CUDA it goes through one compiled FlexAttention shared by all modules.

Suffixes: ``B`` batch, ``T`` packed tokens, ``N`` query heads, ``K`` key heads, ``H`` head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from components.attention.lse import apply_sink
from components.attention.plan import MaskPlan


def flex_attention_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plan: MaskPlan,
    window: int | None,
    prefix: int,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
) -> Tensor:
    """Attention with an optional sink per head over a tree mask, on FlexAttention.

    Args:
        q: queries ``[B, N, T, H]``, rotated.
        k: keys ``[B, K, T, H]``, K a divisor of N.
        v: values ``[B, K, T, H]``.
        plan: the mask, shared by the rows of the batch.
        window: largest distance in positions that is still seen; None for no window.
        prefix: positions at the start of each rollout that no window hides.
        sinks: sink logit of each query head ``[N]``, or None.
        scale: factor on the scores; None for ``H ** -0.5``.
        softcap: scaled scores become ``softcap * tanh(score / softcap)``; None for none.

    Returns:
        ``[B, N, T, H]`` in the dtype of q.

    Raises:
        ValueError: gradients on a CPU, or a plan of another length.
    """
    check_trainable(q, k, v, sinks)
    if plan.num_tokens != q.shape[2]:
        raise ValueError(f"the plan is for {plan.num_tokens} tokens, the queries have {q.shape[2]}")
    block_mask = plan.block_mask(window=window, prefix=prefix, device=q.device)
    # Eager FlexAttention builds T x T: on a GPU always compiled, with the layer or by itself.
    compiling = torch.compiler.is_compiling()
    attend = flex_attention if q.device.type == "cpu" or compiling else _compiled_flex()
    settings = {
        "score_mod": None if softcap is None else _soft_cap(softcap),
        "block_mask": block_mask,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if sinks is None:
        return attend(q, k, v, **settings)
    out, aux = attend(q, k, v, **settings, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return apply_sink(out, aux.lse, sinks)[0]


def check_trainable(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Raise where FlexAttention has no backward.

    Raises:
        ValueError: naming the backends that have one.
    """
    needs_grad = any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    if q.device.type == "cpu" and needs_grad and torch.is_grad_enabled():
        raise ValueError(
            "backend 'flex' cannot train on a CPU: FlexAttention has no CPU backward; "
            "use backend='folded' (or 'reference' for small inputs)"
        )


@functools.lru_cache(maxsize=1)
def _compiled_flex() -> Callable:
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=8)
def _soft_cap(cap: float) -> Callable[..., Tensor]:
    """The score_mod of a soft cap; one object per value, so that nothing is compiled twice."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
