"""Log-sum-exp algebra: a learned sink logit and the merge of two attention results.

``lse`` is the natural logarithm of the sum of exponentials over the visible keys, without the sink.
A row without a visible key has ``out = 0`` and ``lse = -inf``. Everything is computed in the dtype
of ``lse`` (fp32 or fp64) and cast once: an LSE in bf16 puts the output off by up to 10 %.

Suffixes: ``B`` batch, ``T`` packed tokens, ``N`` query heads, ``H`` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def sink_gate(lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The factor that a sink puts on an attention output, and the LSE that contains the sink.

    Args:
        lse: LSE over the visible keys ``[B, N, T]``.
        sinks: sink logit of each query head ``[N]``; ``-inf`` means no sink.

    Returns:
        ``(sigmoid(lse - s), logaddexp(lse, s))``, both ``[B, N, T]`` in the dtype of ``lse``.
    """
    s = sinks.to(lse.dtype).view(1, -1, 1)
    # (-inf) - (-inf) is NaN, in the gradient too: such rows get another s, and constants instead.
    nothing = (lse == NEG_INF) & (s == NEG_INF)
    s = torch.where(nothing, torch.zeros_like(s), s)
    gate = torch.sigmoid(lse - s)
    return gate, torch.where(nothing, NEG_INF, torch.logaddexp(lse, s))


def apply_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over keys and a sink, from attention over the keys alone.

    The sink is one more logit whose value vector is zero, so the softmax over T + 1 columns with
    the last one dropped is ``sigmoid(lse - s) * out``. Differentiable in all three arguments.

    Args:
        out: attention output without the sink ``[B, N, T, H]``.
        lse: its LSE ``[B, N, T]``.
        sinks: sink logit of each query head ``[N]``.

    Returns:
        ``(out', lse')``: output ``[B, N, T, H]`` in the dtype of ``out``, and the LSE with the sink
        ``[B, N, T]``.
    """
    gate, lse_with_sink = sink_gate(lse, sinks)
    return (out * gate.unsqueeze(-1)).to(out.dtype), lse_with_sink


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets. Add the sink after the last merge, once.

    Args:
        out_a: output over the first set ``[B, N, T, H]``.
        lse_a: its LSE ``[B, N, T]``.
        out_b: output over the second set ``[B, N, T, H]``.
        lse_b: its LSE ``[B, N, T]``.

    Returns:
        ``(out, lse)`` over both sets, ``out`` in the dtype of ``out_a``.
    """
    weight_a, weight_b, lse = merge_weights(lse_a, lse_b)
    out = out_a * weight_a.unsqueeze(-1) + out_b * weight_b.unsqueeze(-1)
    return out.to(out_a.dtype), lse


def merge_(out: Tensor, lse: Tensor, out_new: Tensor, lse_new: Tensor) -> None:
    """:func:`merge` in place: what was computed over more keys is added to ``out`` and ``lse``.

    Args:
        out: output so far ``[B, N, T, H]``, in the dtype of ``lse``; may be a view.
        lse: its LSE ``[B, N, T]``; may be a view.
        out_new: output over the further keys ``[B, N, T, H]``.
        lse_new: its LSE ``[B, N, T]``.
    """
    weight, weight_new, merged = merge_weights(lse, lse_new)
    out.mul_(weight.unsqueeze(-1)).addcmul_(out_new, weight_new.unsqueeze(-1))
    lse.copy_(merged)


def merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``exp(lse_a - lse)``, ``exp(lse_b - lse)`` and ``lse = logaddexp(lse_a, lse_b)``, NaN-free.

    Args:
        lse_a: LSE over the first key set ``[B, N, T]``.
        lse_b: LSE over the second key set ``[B, N, T]``.

    Returns:
        The two weights and the merged LSE, ``[B, N, T]`` each.
    """
    nothing = (lse_a == NEG_INF) & (lse_b == NEG_INF)
    difference = torch.where(nothing, 0.0, lse_a) - torch.where(nothing, 0.0, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    return torch.sigmoid(difference), torch.sigmoid(-difference), lse
