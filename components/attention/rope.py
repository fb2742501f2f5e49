"""Rotary position embedding on interleaved pairs (Su et al. 2021, https://arxiv.org/abs/2104.09864).

The numbers are those of torchtune's ``RotaryPositionalEmbeddings`` (Llama's original layout:
dimensions 2i and 2i + 1 form a pair), in three passes over memory instead of a dozen: cast up, one
complex product in place, cast down. The backward is the same with the conjugate and keeps nothing
but the positions.

Suffixes: ``B`` batch, ``T`` packed tokens, ``n`` heads (query or key), ``H`` head dim,
``M`` positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates queries or keys by their positions, in fp32 whatever the dtype of the model.

    Args:
        head_dim: H, even.
        max_positions: positions 0 .. max_positions - 1 can be rotated.
        base: base of the geometric progression of wavelengths.

    Raises:
        ValueError: an odd head_dim.
    """

    cache: Tensor

    def __init__(self, head_dim: int, *, max_positions: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {head_dim}")
        self.head_dim, self.max_positions, self.base = head_dim, max_positions, base
        self.register_buffer("cache", self._table(torch.get_default_device()), persistent=False)

    def _table(self, device: torch.device) -> Tensor:
        """cos and sin of every angle ``[M, H / 2, 2]``, fp32."""
        pairs = torch.arange(0, self.head_dim, 2, device=device).float()
        theta = 1.0 / (self.base ** (pairs / self.head_dim))
        position = torch.arange(self.max_positions, dtype=torch.float32, device=device)
        angle = torch.outer(position, theta)
        return torch.stack([angle.cos(), angle.sin()], dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # A cast of the model must not round the table; leaving the meta device must fill it.
        super()._apply(fn, recurse)
        self.cache = self._table(self.cache.device)
        return self

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate.

        Args:
            x: heads ``[B, T, n, H]``.
            input_pos: positions ``[B, T]`` (or ``[1, T]``); None for 0, 1, 2, ...

        Returns:
            ``[B, T, n, H]`` in the dtype of x.
        """
        if torch.compiler.is_compiling():
            return _rotate_real(x, _rows(self.cache, input_pos, x.shape[1]))
        return _Rotate.apply(x, self.cache, input_pos)

    def turns(self, input_pos: Tensor) -> Tensor:
        """cos and sin of each token ``[B, T, 1, H / 2, 2]``, for :func:`rotate`.

        Args:
            input_pos: positions ``[B, T]``.
        """
        return _rows(self.cache, input_pos, input_pos.shape[1])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """What RotaryEmbedding does, without autograd and with its table looked up once for all layers.

    Args:
        x: heads ``[B, T, n, H]``.
        turns: of the module's :meth:`RotaryEmbedding.turns`.

    Returns:
        ``[B, T, n, H]`` in the dtype of x.
    """
    return _rotate_complex(x, turns, back=False)


def _rows(table: Tensor, input_pos: Tensor | None, num_tokens: int) -> Tensor:
    """cos and sin of each token ``[B, T, 1, H / 2, 2]``."""
    rows = table[:num_tokens].unsqueeze(0) if input_pos is None else table[input_pos]
    return rows.unsqueeze(2)


def _rotate_real(x: Tensor, rows: Tensor) -> Tensor:
    """For the compiler, which fuses this and does not know complex numbers."""
    pairs = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    cos, sin = rows.unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


def _rotate_complex(x: Tensor, rows: Tensor, *, back: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    fresh = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(fresh.unflatten(-1, (-1, 2)))
    turn = torch.view_as_complex(rows)
    pairs.mul_(turn.conj() if back else turn)
    return fresh.to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, input_pos: Tensor | None) -> Tensor:
        ctx.save_for_backward(table, input_pos)
        return _rotate_complex(x, _rows(table, input_pos, x.shape[1]), back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        table, input_pos = ctx.saved_tensors
        return _rotate_complex(grad, _rows(table, input_pos, grad.shape[1]), back=True), None, None
