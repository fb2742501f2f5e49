"""Dense attention with the sink as one more column: the specification of the other backends.

O(T^2) in memory, in fp32 (fp64 for fp64 inputs).

Suffixes: ``B`` batch, ``T`` packed tokens, ``N`` query heads, ``K`` key heads, ``H`` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.attention.plan import MaskPlan


def reference_attention(
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
    """Attention with an optional sink per head over a tree mask, written out.

    Args:
        q: queries ``[B, N, T, H]``.
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
        ValueError: a plan of another length.
    """
    if plan.num_tokens != q.shape[2]:
        raise ValueError(f"the plan is for {plan.num_tokens} tokens, the queries have {q.shape[2]}")
    visible = plan.visible(window=window, prefix=prefix, device=q.device)
    return softmax_with_sink(q, k, v, visible=visible, sinks=sinks, scale=scale, softcap=softcap)


def softmax_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None = None,
) -> Tensor:
    """The softmax over keys and sink under any dense mask; rows that see nothing give 0.

    Args:
        q: queries ``[B, N, Tq, H]``.
        k: keys ``[B, K, Tk, H]``.
        v: values ``[B, K, Tk, H]``.
        visible: bool, broadcastable to ``[B, N, Tq, Tk]``.
        sinks: sink logit of each query head ``[N]``, or None.
        scale: factor on the scores; None for ``H ** -0.5``.
        softcap: scaled scores become ``softcap * tanh(score / softcap)``; None for none.

    Returns:
        ``[B, N, Tq, H]`` in the dtype of q.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q.to(dtype) @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # A row of -inf only: any finite number keeps NaN out, and its weights are cleared.
    nothing = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), dim=-1).masked_fill(nothing, 0.0)
    return (weights[..., : k.shape[2]] @ v).to(q.dtype)
