"""The fused kernels of ATen behind one forward and one backward call.

Their backward takes ``out`` and ``lse`` as arguments, which is what folding needs. On a CPU that is
``_scaled_dot_product_flash_attention_for_cpu`` (bf16, fp16, fp32, fp64, additive masks, strides);
on CUDA ``_flash_attention_forward`` (bf16, fp16, windows, head dim up to 256). Neither needs k and
v expanded to the query heads.

Suffixes: ``B`` batch, ``T`` packed tokens, ``N`` query heads, ``K`` key heads, ``H`` head dim.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from components.attention.parts import BAND, CAUSAL, Part

_aten = torch.ops.aten

FEW_ROWS = 200
"""Below so many queries the CPU's backward kernel is faster in fp32 than in 16 bits: 0.20 ms for 64
causal rows of 9 heads of 64 instead of 0.72, on 2 cores with AVX512-BF16; 1.52 for 200 instead of
2.06."""

FEW_KEYS = 4096
"""Up to so many keys are repeated for their query heads where that evens the threads' work."""


def check_supported(q: Tensor) -> None:
    """Raise where no kernel here can take ``q``.

    Args:
        q: queries ``[B, N, T, H]``.

    Raises:
        ValueError: naming what can.
    """
    if q.device.type == "cpu":
        allowed = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    elif q.device.type == "cuda":
        allowed = (torch.bfloat16, torch.float16)
    else:
        raise ValueError(f"folded attention runs on cpu and cuda, got {q.device.type}")
    if q.dtype not in allowed:
        raise ValueError(
            f"folded attention on {q.device.type} takes {', '.join(map(str, allowed))}, got "
            f"{q.dtype}; the backends 'flex' (CUDA) and 'reference' take others"
        )
    if q.device.type == "cuda" and (q.shape[-1] > 256 or q.shape[-1] % 8):
        raise ValueError(
            "folded attention on cuda takes head_dim up to 256 in multiples of 8, got "
            f"{q.shape[-1]}; the backends 'flex' and 'reference' take others"
        )


def part_forward(
    q: Tensor, k: Tensor, v: Tensor, part: Part, *, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of one part.

    Args:
        q: queries of the part ``[B, N, Tq, H]``.
        k: its keys ``[B, K, Tk, H]``.
        v: its values ``[B, K, Tk, H]``.
        part: what of them is visible.
        window: the window of a band.
        scale: factor on the scores.

    Returns:
        ``out [B, N, Tq, H]`` and ``lse [B, N, Tq]`` in fp32 (fp64 for fp64 inputs).
    """
    causal = part.kind == CAUSAL
    if q.device.type == "cpu":
        mask = _band(part, window, q.dtype) if part.kind == BAND else None
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    left, right = _cuda_window(part, window)
    out, lse, *_ = _aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    # Laid out by token, as the CPU kernel does and the fake implementation says.
    return out.transpose(1, 2), lse.transpose(1, 2).contiguous().transpose(1, 2)


def part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    *,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part, given the output and the LSE of the *whole* attention.

    The kernel rebuilds ``p = exp(score - lse)`` and ``dS = p (dP - sum(grad * out))``: with ``out``
    and ``lse`` merged over all parts and the sink, these are the gradients of the whole.

    Args:
        grad: gradient of the output ``[B, N, Tq, H]``.
        q: queries of the part ``[B, N, Tq, H]``.
        k: its keys ``[B, K, Tk, H]``.
        v: its values ``[B, K, Tk, H]``.
        out: merged output ``[B, N, Tq, H]``.
        lse: merged LSE ``[B, N, Tq]``.
        part: what is visible.
        window: the window of a band.
        scale: factor on the scores.

    Returns:
        ``dq, dk, dv`` in the shapes of q, k, v; perhaps in fp32 on a CPU.
    """
    if q.device.type == "cpu":
        return _cpu_backward(grad, q, k, v, out, lse, part, window=window, scale=scale)
    left, right = _cuda_window(part, window)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grads = _aten._flash_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)),
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        part.kind == CAUSAL,
        no_dropout,
        torch.empty(0, device=q.device),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    *,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[2] < FEW_ROWS and q.dtype.itemsize < 4:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    mask = _band(part, window, q.dtype) if part.kind == BAND else None
    num_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    spread = k.shape[2] <= FEW_KEYS and _is_uneven(num_kv, q.shape[1])
    if spread:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, part.kind == CAUSAL, attn_mask=mask, scale=scale
    )
    if spread:
        wide = torch.promote_types(k.dtype, torch.float32)
        dk, dv = (x.unflatten(1, (num_kv, group)).sum(2, dtype=wide) for x in (dk, dv))
    return dq, dk, dv


def _is_uneven(num_kv_heads: int, num_heads: int) -> bool:
    """Whether threads would finish sooner if each took query heads.

    The CPU's backward kernel hands out whole key heads: of SmolLM2's 3, one of 2 threads gets two,
    and works for 6 of 9 query heads. With keys repeated it works for 5.
    """
    threads = torch.get_num_threads()
    busiest = -(-num_kv_heads // threads) * (num_heads // num_kv_heads)
    return -(-num_heads // threads) < busiest


def _cuda_window(part: Part, window: int) -> tuple[int | None, int | None]:
    """The band as FlashAttention counts it: from the lower right corner of the score matrix."""
    if part.kind != BAND:
        return None, None
    corner = (part.k1 - part.k0) - (part.q1 - part.q0)
    return window - part.offset + corner, part.offset - corner


def _band(part: Part, window: int, dtype: torch.dtype) -> Tensor:
    return _band_mask(part.q1 - part.q0, part.k1 - part.k0, part.offset, window, dtype)


@functools.lru_cache(maxsize=64)
def _band_mask(num_q: int, num_k: int, offset: int, window: int, dtype: torch.dtype) -> Tensor:
    """Additive mask ``[Tq, Tk]`` of a band; nearly all blocks of a row share one."""
    distance = offset + torch.arange(num_q)[:, None] - torch.arange(num_k)[None, :]
    mask = torch.zeros(num_q, num_k, dtype=dtype)
    return mask.masked_fill_((distance < 0) | (distance > window), float("-inf"))
