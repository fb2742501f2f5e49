"""Attention for the new tokens of a rollout, all scores of a query in one row: a CPU in bf16.

Two matrix products and one softmax take less than half the time of PyTorch's flash kernel for a
CPU, which converts and exponentiates in float32. As in a decode step the scores are rounded to
bf16, and all keys of a query meet in one softmax, so that nothing has to be merged by an LSE.
Queries come in blocks, which bounds the memory of the scores and leaves out most of what causality
hides.

Suffixes: ``N`` query heads, ``K`` key heads, ``H`` head dim, ``T`` new tokens, ``C`` all keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.cpu import multiplies_bf16
from components.policy.shared import lowest

SCORES = 1 << 21
"""Most scores of one product: 4 MiB, which stay in the cache between the three steps."""
LEAST_QUERIES = 32
"""Of a block: each reads all keys and values."""


def takes(q: Tensor, *, num_keys: int, sinks: Tensor | None) -> bool:
    """Whether these queries are served here faster than by the flash kernel.

    Args:
        q: ``[1, N, T, H]``.
        num_keys: of the query that sees the most.
        sinks: of the layer.
    """
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or sinks is not None:
        return False
    fits = SCORES // (q.shape[1] * num_keys) >= LEAST_QUERIES
    return fits and multiplies_bf16()


class DenseRows:
    """Computes attention without a window, with buffers that are used again from layer to layer."""

    def __init__(self) -> None:
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._triangle: Tensor | None = None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
        """Each query sees the keys up to its own, the last T of which are the new tokens'.

        Args:
            q: ``[N, T, H]``.
            keys: ``[K, C, H]``, K a divisor of N.
            values: ``[K, C, H]``.
            scale: factor on the scores.

        Returns:
            ``[N, T, H]``.
        """
        num_n, num_t, dim = q.shape
        num_k, num_c = keys.shape[:2]
        past = num_c - num_t
        heads = (q * scale).view(num_k, num_n // num_k, num_t, dim)
        out = torch.empty_like(heads)
        size = max(1, min(num_t, SCORES // (num_n * num_c)))
        for start in range(0, num_t, size):
            stop = min(start + size, num_t)
            block = heads[:, :, start:stop].reshape(num_k, -1, dim)
            scores, p = self._take((num_k, block.shape[1], past + stop), like=q)
            torch.bmm(block, keys[:, : past + stop].transpose(1, 2), out=scores)
            newest = scores[..., past + start :].view(*heads.shape[:2], stop - start, -1)
            newest += self._hidden(stop - start, like=q)
            torch.softmax(scores, -1, out=p)
            new = torch.bmm(p, values[:, : past + stop])
            out[:, :, start:stop] = new.view(*heads.shape[:2], stop - start, dim)
        return out.view(num_n, num_t, dim)

    def _take(self, shape: tuple[int, int, int], *, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two buffers of a shape; fresh memory costs as much as a product writes to it."""
        count = shape[0] * shape[1] * shape[2]
        if self._buffers is None or len(self._buffers[0]) < count:
            self._buffers = like.new_empty(count), like.new_empty(count)
        first, second = (buffer[:count].view(shape) for buffer in self._buffers)
        return first, second

    def _hidden(self, size: int, *, like: Tensor) -> Tensor:
        """Added to the scores ``[size, size]`` of a block's own keys."""
        if self._triangle is None or len(self._triangle) < size:
            full = like.new_full((size, size), lowest(like.dtype))
            self._triangle = full.triu_(1)
        return self._triangle[:size, :size]
