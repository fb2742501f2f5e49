"""The gate of gpt-oss's experts: an interleaved, clamped SwiGLU.

Suffixes: ``S`` rows (a token for each of its experts), ``F`` width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def clamped_swiglu(gate_up: Tensor, *, limit: float, alpha: float) -> Tensor:
    """``(up + 1) * gate * sigmoid(alpha * gate)``, gate and up clamped first.

    Gate has no lower bound. Computed in at least fp32 and cast once. Source: OpenAI's gpt-oss
    reference implementation and transformers' GptOssExperts.

    Args:
        gate_up: ``[S, 2 F]``, gate in the even columns and up in the odd ones.
        limit: gate is at most this, up within plus and minus this.
        alpha: gain of the sigmoid.

    Returns:
        ``[S, F]`` in the dtype of gate_up.
    """
    if torch.compiler.is_compiling():
        return _plain(gate_up, limit, alpha)
    return _ClampedSwiGLU.apply(gate_up, limit, alpha)  # pyright: ignore[reportReturnType]


def _halves(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate and up before and after the clamp, in at least fp32."""
    dtype = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up[..., 0::2].to(dtype), gate_up[..., 1::2].to(dtype)
    return gate, up, gate.clamp(max=limit), up.clamp(-limit, limit)


def _plain(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    _, _, gate, up = _halves(gate_up, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


class _ClampedSwiGLU(torch.autograd.Function):
    """Keeps its input only; autograd would keep seven tensors of half its size in fp32."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit, ctx.alpha = limit, alpha
        return _plain(gate_up, limit, alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        raw_gate, raw_up, gate, up = _halves(gate_up, ctx.limit)
        sigmoid = torch.sigmoid(ctx.alpha * gate)
        grad = grads[0].to(gate.dtype)
        slope = sigmoid * (1 + ctx.alpha * gate * (1 - sigmoid))
        grad_gate = (grad * (up + 1) * slope).masked_fill_(raw_gate > ctx.limit, 0)
        grad_up = (grad * gate * sigmoid).masked_fill_(raw_up.abs() > ctx.limit, 0)
        return torch.stack([grad_gate, grad_up], -1).flatten(-2).to(gate_up.dtype), None, None
