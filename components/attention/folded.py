"""Sink attention by folding: a flash forward, and its ordinary backward called with (out', lse').

A flash backward needs only the output and the LSE to rebuild the probabilities. Given those of the
*whole* attention (all key sets merged, the sink added), the unchanged kernel returns the exact
gradients of each part, and the gradient of a sink logit is
``ds = -sum over batch and queries of exp(s - lse') * sum_d(dout * out')``.
No gradient flows through an LSE, nothing of size T x T exists, and nothing is saved that flash does
not save anyway. The same algebra is in MagiAttention (2025: flash backward with corrected out and
lse) and in FlashAttention-4 (``learnable_sink``).

Suffixes: ``B`` batch, ``T`` packed tokens, ``N`` query heads, ``K`` key heads, ``H`` head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from components.attention.kernels import check_supported, part_backward, part_forward
from components.attention.lse import NEG_INF, merge_, sink_gate
from components.attention.parts import CAUSAL, FULL, Part
from components.attention.plan import MaskPlan, parts_of

NO_SOFTCAP = (
    "backend 'folded' cannot cap scores (Gemma 2 does): the fused kernels have no place for it; "
    "use backend='flex' (CUDA) or 'reference'"
)


def folded_attention(
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
    """Attention with an optional sink per head over a tree mask; memory linear in T.

    Args:
        q: queries ``[B, N, T, H]``, rotated; any strides with a contiguous last dimension.
        k: keys ``[B, K, T, H]``, K a divisor of N.
        v: values ``[B, K, T, H]``.
        plan: the mask, shared by the rows of the batch.
        window: largest distance in positions that is still seen; None for no window.
        prefix: positions at the start of each rollout that no window hides.
        sinks: sink logit of each query head ``[N]``, or None.
        scale: factor on the scores; None for ``H ** -0.5``.
        softcap: must be None: a flash kernel cannot cap scores.

    Returns:
        ``[B, N, T, H]``, laid out so that ``out.transpose(1, 2)`` is contiguous.

    Raises:
        ValueError: a dtype, device or head size without a kernel; a plan of another length; a
            soft cap.
    """
    if softcap is not None:
        raise ValueError(f"softcap = {softcap}: {NO_SOFTCAP}")
    check_supported(q)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    out, _ = _folded(q, k, v, sinks, plan.chains, window, prefix, scale)
    return out


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One flash kernel call without gradient, with an LSE that is right for rows without a key.

    Args:
        q: queries ``[B, N, Tq, H]``.
        k: keys ``[B, K, Tk, H]``; Tk may be 0.
        v: values ``[B, K, Tk, H]``.
        mask: bool (True is visible) or additive, broadcastable to ``[B, N, Tq, Tk]``; CPU only.
        is_causal: key j is visible to query i iff j <= i.
        scale: factor on the scores; None for ``H ** -0.5``.

    Returns:
        ``out [B, N, Tq, H]`` and ``lse [B, N, Tq]`` (fp32; fp64 for fp64 inputs). A row without a
        visible key has out 0 and lse -inf.

    Raises:
        ValueError: a dtype or device without a kernel; a mask on CUDA.
    """
    check_supported(q)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    num_q, num_k = q.shape[2], k.shape[2]
    if num_k == 0 or num_q == 0:  # the CPU kernel divides by the number of keys
        lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return torch.zeros_like(q), q.new_full(q.shape[:3], NEG_INF, dtype=lse_dtype)
    with torch.no_grad():
        if mask is None:
            part = Part(0, num_q, 0, num_k, CAUSAL if is_causal else FULL, 0, True)
            return part_forward(q, k, v, part, window=0, scale=scale)
        if q.device.type != "cpu":
            raise ValueError(f"flash_forward takes a mask on cpu only, got {q.device.type}")
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, NEG_INF)
        mask = mask[(None,) * (4 - mask.dim())]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        # The kernel reports 0 for a row without a key.
        return out, lse.masked_fill_((mask == NEG_INF).all(-1), NEG_INF)


def _by_token(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros shaped like ``[B, n, T, ...]``, in memory ``[B, T, n, ...]`` as kernels have it."""
    return like.new_zeros(like.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _merges(parts: tuple[Part, ...]) -> bool:
    """Whether a query is in more than one part; its output and dq are sums in fp32 only then."""
    return not parts[-1].own  # the own parts, one for each query, come first


def _row_blocks(q: Tensor, size: int = 1024) -> list[slice]:
    """Rows a block at a time: mixed dtypes make fp32 copies of all that one operation is given."""
    return [slice(start, start + size) for start in range(0, q.shape[2], size)]


@torch.library.custom_op("sinkflex::folded_attention", mutates_args=())
def _folded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    chains: Tensor,
    window: int | None,
    prefix: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    parts = parts_of(chains, window=window, prefix=prefix)
    num_tokens = int(chains[:, 1].max())
    if num_tokens != q.shape[2]:
        raise ValueError(f"the plan is for {num_tokens} tokens, the queries have {q.shape[2]}")
    if len(parts) == 1:
        out, lse = part_forward(q, k, v, parts[0], window=window or 0, scale=scale)
    else:
        out, lse = _forward_parts(q, k, v, parts, window=window or 0, scale=scale)
    if sinks is not None:
        gate, lse = sink_gate(lse, sinks)
        for rows in _row_blocks(q):
            out[:, :, rows].mul_(gate[:, :, rows].unsqueeze(-1))  # the product in fp32, cast once
    return out.to(q.dtype), lse


def _forward_parts(
    q: Tensor, k: Tensor, v: Tensor, parts: tuple[Part, ...], *, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """All parts, merged by LSE in fp32."""
    dtype = _lse_dtype(q)
    out = _by_token(q, dtype if _merges(parts) else q.dtype)
    lse = _by_token(q[..., 0], dtype)
    for part in parts:
        rows, keys = slice(part.q0, part.q1), slice(part.k0, part.k1)
        out_new, lse_new = part_forward(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], part, window=window, scale=scale
        )
        if part.own:  # comes first for its rows
            out[:, :, rows], lse[:, :, rows] = out_new, lse_new
            continue
        merge_(out[:, :, rows], lse[:, :, rows], out_new, lse_new)
    return out, lse


@_folded.register_fake
def _(q, k, v, sinks, chains, window, prefix, scale):
    out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
    lse = q.new_empty(q.transpose(1, 2).shape[:3], dtype=_lse_dtype(q)).transpose(1, 2)
    return out, lse


@torch.library.custom_op("sinkflex::folded_attention_backward", mutates_args=())
def _folded_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    chains: Tensor,
    window: int | None,
    prefix: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = parts_of(chains, window=window, prefix=prefix)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    grads = None
    if len(parts) > 1:
        dtype = _lse_dtype(q)
        dtypes = (dtype if _merges(parts) else q.dtype, dtype, dtype)
        grads = tuple(_by_token(x, d) for x, d in zip((q, k, v), dtypes, strict=True))
    for part in parts:
        rows, keys = slice(part.q0, part.q1), slice(part.k0, part.k1)
        new = part_backward(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            part,
            window=window or 0,
            scale=scale,
        )
        if grads is None:
            grads = new
            break
        for total, piece, where in zip(grads, new, (rows, keys, keys), strict=True):
            total[:, :, where] += piece
    assert grads is not None
    dq, dk, dv = (x.to(q.dtype) for x in grads)
    return dq, dk, dv, _sink_gradient(grad, out, lse, sinks)


def _sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """``ds [N]``: minus the sink's share of the softmax times sum(dout * out'), summed."""
    if sinks is None:
        return grad.new_empty(0)
    logit = sinks.to(lse.dtype).view(1, -1, 1)
    ds = torch.zeros(len(sinks), dtype=lse.dtype, device=lse.device)
    for rows in _row_blocks(grad):
        delta = (grad[:, :, rows].to(lse.dtype) * out[:, :, rows]).sum(-1)
        ds -= (torch.exp(logit - lse[:, :, rows]) * delta).sum((0, 2))
    return ds.to(sinks.dtype)


@_folded_backward.register_fake
def _(grad, q, k, v, out, lse, sinks, chains, window, prefix, scale):
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    ds = grad.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return dq, dk, dv, ds


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, chains, window, prefix, scale = inputs
    ctx.save_for_backward(q, k, v, *output, sinks, chains)
    ctx.window, ctx.prefix, ctx.scale = window, prefix, scale
    ctx.mark_non_differentiable(output[1])  # the kernels' backward has no place for its gradient


def _autograd_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple:
    q, k, v, out, lse, sinks, chains = ctx.saved_tensors
    dq, dk, dv, ds = _folded_backward(
        grad, q, k, v, out, lse, sinks, chains, ctx.window, ctx.prefix, ctx.scale
    )
    return dq, dk, dv, None if sinks is None else ds, None, None, None, None


_folded.register_autograd(_autograd_backward, setup_context=_setup_context)
