"""Where the local engine keeps keys and values.

A rollout's cache has two parts: a *shared prefix* (the system turn, computed once per weight
version and kept once for all rollouts that start with it) and its *own* tokens, a row of a pool.
Prefill attends over the two parts apart and merges them by their LSE; a decode step puts the scores
of both into one softmax.

Suffixes: ``K`` key heads, ``H`` head dim, ``T`` new tokens, ``R`` rows of the pool, ``J`` blocks of
a row, ``P`` tokens of a block, ``S`` tokens of a shared prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 128
"""Tokens P of a block: half of it is wasted per rollout, and many small blocks cost more calls."""


class SharedPrefix:
    """Keys and values of ids that several rollouts start with.

    Args:
        ids: the shared ids.
        num_layers: layers of the model.
    """

    def __init__(self, ids: tuple[int, ...], *, num_layers: int) -> None:
        self.ids = ids
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def __len__(self) -> int:
        return len(self.ids)

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values ``[K, T, H]`` of tokens from ``start`` on."""
        pair = self._layers[layer]
        if pair is None:
            shape = (k.shape[0], len(self.ids), k.shape[2])
            pair = (k.new_zeros(shape), k.new_zeros(shape))
            self._layers[layer] = pair
        for kept, new in zip(pair, (k, v), strict=True):
            kept[:, start : start + new.shape[1]] = new

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, stop, H]`` of the first tokens."""
        pair = self._layers[layer]
        assert pair is not None
        return pair[0][:, :stop], pair[1][:, :stop]

    def num_bytes(self) -> int:
        """Memory held."""
        return _num_bytes(self._layers)


class RowPool:
    """Keys and values of the rollouts' own tokens: per layer two tensors ``[J, R * K, P, H]``.

    Block j of neighbouring rows is one contiguous piece, which is what batched products want: on a
    CPU in bf16 they would copy anything else first. Rows never move, so a rollout that leaves a
    batch costs nothing. All starts as zeros: what a mask hides is still multiplied, and must be
    finite.

    Args:
        num_layers: layers of the model.
        num_kv_heads: K.
        exact: never hold more rows and blocks than were asked for. Otherwise the pool grows by
            more than it must, so that it is seldom copied.
    """

    def __init__(self, *, num_layers: int, num_kv_heads: int, exact: bool = False) -> None:
        self.block = BLOCK
        self.exact = exact
        self.num_rows = 0
        self.num_blocks = 0
        self._num_kv_heads = num_kv_heads
        self._free: list[int] = []
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def acquire(self) -> int:
        """A row for one rollout, the lowest that is free."""
        if not self._free:
            more = 1 if self.exact else max(self.num_rows, 1)
            self._free = list(range(self.num_rows, self.num_rows + more))
            self.num_rows += more
        row = min(self._free)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """Give a row back; the memory goes when no row is in use."""
        self._free.append(row)
        if len(self._free) == self.num_rows:
            self._free, self.num_rows, self.num_blocks = [], 0, 0
            self._layers = [None] * len(self._layers)

    def reserve(self, length: int) -> None:
        """Make rows long enough for ``length`` tokens."""
        blocks = -(-length // self.block)
        if blocks > self.num_blocks:
            self.num_blocks = blocks if self.exact else max(blocks, self.num_blocks * 3 // 2)

    def compact(self, rows: Sequence[int], *, length: int) -> None:
        """Keep these rows alone, as rows 0, 1, ... of a smaller pool.

        Args:
            rows: those in use.
            length: tokens of the longest.
        """
        num_k, blocks = self._num_kv_heads, -(-length // self.block)
        for layer, pair in enumerate(self._layers):
            if pair is None:
                continue
            had_blocks, had_heads = pair[0].shape[:2]
            copied = min(blocks, had_blocks)
            packed = []
            for old in pair:
                new = old.new_zeros(blocks, len(rows) * num_k, *old.shape[2:])
                for to, row in enumerate(rows):
                    if (row + 1) * num_k <= had_heads:  # others were not written yet
                        heads = old[:copied, row * num_k : (row + 1) * num_k]
                        new[:copied, to * num_k : (to + 1) * num_k] = heads
                packed.append(new)
            self._layers[layer] = (packed[0], packed[1])
        self.num_rows, self.num_blocks, self._free = len(rows), blocks, []

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, which grow here when they must.

        Args:
            layer: index of the layer.
            like: a tensor ``[..., H]`` of the right dtype and device.

        Returns:
            ``[J, R * K, P, H]`` each, contiguous.
        """
        pair = self._layers[layer]
        shape = (
            self.num_blocks,
            self.num_rows * self._num_kv_heads,
            self.block,
            like.shape[-1],
        )
        if pair is None or pair[0].shape != shape:
            grown = (like.new_zeros(shape), like.new_zeros(shape))
            if pair is not None:
                blocks, rows = pair[0].shape[:2]
                for old, new in zip(pair, grown, strict=True):
                    new[:blocks, :rows] = old
            self._layers[layer] = pair = grown
        return pair

    def places(self, rows: Tensor, at: Tensor) -> Tensor:
        """Where tokens go in a layer seen as ``[J * R * K * P, H]``, for each key head.

        Args:
            rows: row of each token ``[T]``.
            at: its place in the row ``[T]``.

        Returns:
            ``[K, T]``.
        """
        block = torch.div(at, self.block, rounding_mode="floor")
        heads = torch.arange(self._num_kv_heads, device=rows.device)[:, None]
        row = (block * self.num_rows + rows) * self._num_kv_heads + heads
        return row * self.block + at % self.block

    def read(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """A copy of a row's first keys and values, ``[K, stop, H]`` each."""
        pair = self._layers[layer]
        assert pair is not None
        blocks = -(-stop // self.block)
        heads = slice(row * self._num_kv_heads, (row + 1) * self._num_kv_heads)
        keys, values = (x[:blocks, heads].transpose(0, 1).flatten(1, 2) for x in pair)
        return keys[:, :stop], values[:, :stop]

    def num_bytes(self) -> int:
        """Memory held."""
        return _num_bytes(self._layers)


@dataclass(slots=True, kw_only=True)
class RolloutCache:
    """What is kept of one rollout between its turns."""

    pool: RowPool
    row: int
    """Its row in the pool."""
    shared: SharedPrefix | None
    shared_len: int
    """As requested at its first turn."""
    ids: list[int] = field(default_factory=list)
    """Ids whose keys and values are kept, those of the shared prefix included."""

    @property
    def base(self) -> int:
        """Position of the first own token."""
        return 0 if self.shared is None else len(self.shared)

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, stop, H]`` of the first own tokens."""
        return self.pool.read(layer, self.row, stop)


def _num_bytes(layers: Sequence[tuple[Tensor, Tensor] | None]) -> int:
    return sum(tensor.nbytes for pair in layers if pair is not None for tensor in pair)
