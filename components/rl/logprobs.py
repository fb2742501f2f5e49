"""Log-probabilities of the trained tokens without ever keeping their logits.

The head's logits are the largest tensor of a language model's training step: 2,000 tokens times
49,152 ids in fp32 are 375 MiB, and autograd would keep several copies. Here they exist for
``chunk_size`` tokens at a time.

With logits ``x = h W^T / temperature`` and p = softmax(x), the log-probability of target y has

    d logp / d h   = (W_y - p W) / temperature
    d logp / d W_v = (1[v = y] - p_v) h / temperature

The first needs nothing from above but a factor per token, so the forward pass computes it from the
logits it holds anyway: where the weight is frozen (LoRA), backward never sees the vocabulary again.
Where the weight is trained, backward recomputes the logits chunk by chunk.

The entropy H = -sum_v p_v log p_v may carry a gradient too (an entropy bonus), in the same way:

    d H / d x_v = -p_v (log p_v + H)

Suffixes: ``M`` trained tokens, ``C`` tokens of a chunk, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    *,
    targets: Tensor,
    temperature: float,
    chunk_size: int = 256,
    compute_entropy: bool = True,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under ``softmax(hidden @ weight.T / temperature)``.

    Peak extra memory is one buffer [chunk_size, V] in fp32, two with the entropy (bf16 adds a bf16
    copy); nothing of size M x V exists in either pass. In bf16 the products run in bf16; max, exp,
    sums and the gradient of the weight are fp32. Use as the ``head`` of a model with
    ``functools.partial``.

    Args:
        hidden: [M, D] hidden states of the predecessors of the trained tokens; M may be 0.
        weight: [V, D] output embedding.
        targets: [M] long, the trained tokens.
        temperature: the one that the tokens were sampled with; logits are divided by it.
        chunk_size: tokens whose logits exist at a time.
        compute_entropy: also return the entropy of each distribution.
        entropy_grad: the entropy carries a gradient; one more product with the weight per chunk.

    Returns:
        Log-probabilities [M] and entropies [M] in nats, fp32 (fp64 for fp64 input). The entropy
        is None if not asked for.

    Raises:
        ValueError: temperature or chunk_size out of range, shapes or dtypes that do not fit.
    """
    if not (math.isfinite(temperature) and temperature > 0.0):
        raise ValueError(f"temperature = {temperature}: must be a finite number > 0")
    if chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: must be at least 1")
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)}: must be [M, D] and [V, D]"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {list(targets.shape)}: must be [M] = [{hidden.shape[0]}]")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} but weight is {weight.dtype}")
    if entropy_grad and not compute_entropy:
        raise ValueError("entropy_grad = True: needs compute_entropy=True")
    # needs_input_grad ignores torch.no_grad(), and the gradient costs as much as the logits.
    needs_grad = torch.is_grad_enabled() and hidden.requires_grad
    logprobs, entropy = _ChunkedLogprobs.apply(
        hidden, weight, targets, temperature, chunk_size, compute_entropy, needs_grad, entropy_grad
    )  # pyright: ignore[reportGeneralTypeIssues]
    return logprobs, entropy if compute_entropy else None


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        compute_entropy: bool,
        needs_grad: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = _wide(hidden.dtype)
        num_tokens = hidden.shape[0]
        lse = hidden.new_empty(num_tokens, dtype=dtype)
        logprobs = torch.empty_like(lse)
        entropy = torch.empty_like(lse if compute_entropy else lse[:0])
        # d logp / d hidden and d entropy / d hidden, without the factors that come from the loss
        kept = (num_tokens if needs_grad else 0, num_tokens if needs_grad and entropy_grad else 0)
        slope, entropy_slope = (
            hidden.new_empty((rows, hidden.shape[1]), dtype=dtype) for rows in kept
        )
        buffers = _buffers(hidden, weight, chunk_size, count=1 + compute_entropy)
        for start in range(0, num_tokens, chunk_size):
            rows = slice(start, min(start + chunk_size, num_tokens))
            x = _logits(hidden[rows], weight, temperature, out=buffers[0])
            target = x.gather(1, targets[rows, None]).squeeze(1)
            peak = x.amax(dim=1, keepdim=True)
            # In place unless the entropy needs x once more.
            e = torch.sub(x, peak, out=buffers[-1][: len(x)]).exp_()
            total = e.sum(dim=1)
            lse[rows] = total.log() + peak.squeeze(1)
            logprobs[rows] = target - lse[rows]
            if compute_entropy:
                xe = x.mul_(e)
                entropy[rows] = lse[rows] - xe.sum(dim=1) / total
            if needs_grad:
                mean_row = torch.mm(e.to(weight.dtype), weight).to(dtype) / total[:, None]
                slope[rows] = (weight[targets[rows]].to(dtype) - mean_row) / temperature
            if kept[1]:
                # p (log p + H) = (x e + (H - lse) e) / total
                pull = xe.add_(e.mul_((entropy[rows] - lse[rows])[:, None])).div_(total[:, None])
                pulled = torch.mm(pull.to(weight.dtype), weight).to(dtype)
                entropy_slope[rows] = pulled.div_(-temperature)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.dtype, ctx.entropy_grad = hidden.dtype, entropy_grad
        if weight.requires_grad:
            ctx.save_for_backward(slope, entropy_slope, hidden, weight, targets, lse, entropy)
        else:
            ctx.save_for_backward(slope, entropy_slope)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, entropy_slope, *rest = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = grad_logprobs[:, None] * slope
            if ctx.entropy_grad:
                grad_hidden += grad_entropy[:, None] * entropy_slope
            grad_hidden = grad_hidden.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_grad(
                grad_logprobs,
                grad_entropy if ctx.entropy_grad else None,
                *rest,
                temperature=ctx.temperature,
                chunk_size=ctx.chunk_size,
            )
        return grad_hidden, grad_weight, *[None] * 6


def _weight_grad(
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    *,
    temperature: float,
    chunk_size: int,
) -> Tensor:
    """Gradient of the weight [V, D], accumulated in fp32, from logits that are recomputed."""
    factor = grad_logprobs / temperature
    make = torch.empty if len(hidden) else torch.zeros  # the first chunk writes, others add
    grad = make(weight.shape, dtype=_wide(weight.dtype), device=weight.device)
    buffers = _buffers(hidden, weight, chunk_size, count=1 + (grad_entropy is not None))
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        h, scale = hidden[rows], factor[rows, None]
        logp = _logits(h, weight, temperature, out=buffers[0]).sub_(lse[rows, None])
        p = torch.exp(logp, out=buffers[-1][: len(logp)])  # in place unless logp is needed
        if grad_entropy is not None:
            pull = logp.add_(entropy[rows, None]).mul_(grad_entropy[rows, None] / -temperature)
            p = p.mul_(pull.sub_(scale))
        else:
            p = p.mul_(-scale)
        if grad.dtype == weight.dtype:
            grad.addmm_(p.t(), h, beta=0 if start == 0 else 1)
        elif start == 0:
            grad.copy_(torch.mm(p.t().to(h.dtype), h))
        else:
            grad.add_(torch.mm(p.t().to(h.dtype), h))
        grad.index_add_(0, targets[rows], h.to(grad.dtype) * scale)
    return grad.to(weight.dtype)


def _logits(hidden: Tensor, weight: Tensor, temperature: float, *, out: Tensor) -> Tensor:
    """Logits [C, V] of a chunk, written into the buffer."""
    out = out[: len(hidden)]
    if out.dtype == weight.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(torch.mm(hidden, weight.t()))
    return out if temperature == 1.0 else out.div_(temperature)


def _buffers(hidden: Tensor, weight: Tensor, chunk_size: int, *, count: int) -> list[Tensor]:
    """Buffers [C, V] in the wide dtype, shared by all chunks."""
    shape = (min(chunk_size, len(hidden)), len(weight))
    return [hidden.new_empty(shape, dtype=_wide(hidden.dtype)) for _ in range(count)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
