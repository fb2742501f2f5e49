"""torchtune's pointwise modules, made fast in eager mode.

On a CPU the norms and the gate of a small bfloat16 model cost as much as a good part
of its matrix products, and what they keep for the backward pass is most of its memory. These
modules keep torchtune's parameters and numbers (tested), with fewer passes over memory and nothing
kept in float32.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torchtune.modules
from torch import Tensor, nn
from torch.nn import functional as F


def rms_norm(x: Tensor, scale: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """The norm in float32, without autograd.

    Args:
        x: [..., D].
        scale: [D].
        eps: added to the mean square.

    Returns:
        ``x / rms(x) * scale`` in x's dtype, and ``1 / rms(x)`` [..., 1] in float32.
    """
    wide = x.float()
    mean_square = torch.linalg.vecdot(wide, wide).unsqueeze(-1).div_(x.shape[-1])
    inverse = mean_square.add_(eps).rsqrt_()
    return (wide * inverse).mul_(scale).to(x.dtype), inverse


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one float per row; F.rms_norm on a CPU keeps two float32 copies of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        out, inverse = rms_norm(x, scale, eps=eps)
        ctx.save_for_backward(x, scale, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale, inverse = ctx.saved_tensors
        normed = x.float() * inverse
        grad = grads[0].to(torch.float32, copy=True)
        product = grad * normed
        wide_scale = scale.float()
        along = (product @ wide_scale).unsqueeze(-1).div_(x.shape[-1])
        grad_x = grad.mul_(wide_scale).addcmul_(normed, along, value=-1).mul_(inverse).to(x.dtype)
        grad_scale = None
        if ctx.needs_input_grad[1]:
            grad_scale = product.flatten(0, -2).sum(0).to(scale.dtype)
        return grad_x, grad_scale, None


class RMSNorm(torchtune.modules.RMSNorm):
    """Root mean square norm (Zhang and Sennrich 2019, arXiv:1910.07467), computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x / rms(x) * scale`` in x's dtype, shape [..., D]."""
        eager = not torch.compiler.is_compiling()
        if eager and x.device.type == "cpu" and x.dtype != torch.float64:
            return _RMSNorm.apply(x, self.scale, self.eps)  # pyright: ignore[reportReturnType]
        return F.rms_norm(x, self.normalized_shape, self.scale.to(x.dtype), self.eps)


class _Gate(torch.autograd.Function):
    """Keeps its two inputs; the plain expression keeps silu(gate) as well."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, F.silu(gate).mul_(grads[0])


class FeedForward(torchtune.modules.FeedForward):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): ``w2(silu(w1 x) * w3 x)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        assert self.w3 is not None
        gate, up = self.w1(x), self.w3(x)
        if torch.compiler.is_compiling():
            return self.w2(F.silu(gate) * up)
        return self.w2(_Gate.apply(gate, up))


def with_fast_layers(model: nn.Module) -> nn.Module:
    """Put these modules in the place of torchtune's own, with the same parameters, in place.

    Args:
        model: any; only modules that are exactly torchtune's RMSNorm, or its FeedForward with a
            gate and SiLU, are replaced.

    Returns:
        The model.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torchtune.modules.RMSNorm:
                fast = RMSNorm(child.normalized_shape[0], eps=child.eps)
                fast.scale = child.scale
                setattr(module, name, fast)
            elif type(child) is torchtune.modules.FeedForward and is_swiglu(child):
                parts = {"gate_proj": child.w1, "down_proj": child.w2, "up_proj": child.w3}
                setattr(module, name, FeedForward(**parts))
    return model


def is_swiglu(module: nn.Module) -> TypeGuard[torchtune.modules.FeedForward]:
    """Whether it is torchtune's FeedForward, or ours, with a gate and SiLU."""
    if type(module) not in (torchtune.modules.FeedForward, FeedForward):
        return False
    return module.w3 is not None and type(module.activation) is nn.SiLU
