"""Where the local engine keeps keys and values.

A rollout's cache has two parts: a *shared prefix* (the system turn, computed once per weight
version and kept once for all rollouts that start with it) and its *own* tokens, a row of a pool.
Prefill attends over the two parts apart and merges them by their LSE, or, like a decode step, puts
the scores of both into one softmax (see dense.py). Of either part, layers with a sliding window
keep only what a token to come can see (see spans.py).

Suffixes: ``K`` key heads, ``H`` head dim, ``T`` new tokens, ``R`` rows of the pool, ``J`` blocks of
a row, ``P`` tokens of a block, ``S`` tokens of a shared prefix.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from components.policy.spans import Kept, Span, Spans, keep, num_blocks, runs, slots

BLOCK = 128
"""Tokens P of a block, by which a pool grows: many small ones cost more calls."""


class SharedPrefix:
    """Keys and values of ids that several rollouts start with.

    Args:
        ids: the shared ids.
        spans: of each layer of the model.
    """

    def __init__(self, ids: tuple[int, ...], *, spans: Spans) -> None:
        self.ids = ids
        self.spans = spans
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * len(spans)

    def __len__(self) -> int:
        return len(self.ids)

    def kept(self, span: Span | None, stop: int) -> Kept:
        """What layers of a span keep once ``stop`` tokens are written."""
        return keep(span, base=0, stop=stop, num_last=span.window if span else 0)

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store keys and values ``[K, T, H]`` of tokens from ``start`` on, the next in order."""
        span, pair = self.spans[layer], self._layers[layer]
        if span is not None:
            old = pair or (k[:, :0], v[:, :0])
            self._layers[layer] = self._roll(span, start, old, (k, v))
            return
        if pair is None:
            shape = (k.shape[0], len(self.ids), k.shape[2])
            pair = (k.new_zeros(shape), k.new_zeros(shape))
            self._layers[layer] = pair
        for held, new in zip(pair, (k, v), strict=True):
            held[:, start : start + new.shape[1]] = new

    def _roll(
        self, span: Span, start: int, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What stays of what was kept and of what comes after it."""
        before, after = self.kept(span, start), self.kept(span, start + new[0].shape[1])
        tail = after.tail - (before.tail - before.head)  # in the two side by side
        keys, values = (
            torch.cat([both[:, : after.head], both[:, tail:]], 1)
            for both in (torch.cat(pair, 1) for pair in zip(old, new, strict=True))
        )
        return keys, values

    def read(self, layer: int, num: int) -> tuple[Tensor, Tensor]:
        """The first keys and values that are kept, at most ``num``: ``[K, num, H]``."""
        pair = self._layers[layer]
        assert pair is not None
        return pair[0][:, :num], pair[1][:, :num]

    def num_bytes(self) -> int:
        """Memory held."""
        return _num_bytes(self._layers)


class RowPool:
    """Keys and values of the rollouts' own tokens: per layer two tensors ``[J, R * K, P, H]``.

    J is the same in all layers, but for windowed ones, which stop growing when they hold the head
    and ring of every row.

    Block j of neighbouring rows is one contiguous piece, which is what batched products want: on a
    CPU in bf16 they would copy anything else first. Rows never move, so a rollout that leaves a
    batch costs nothing. All starts as zeros: what a mask hides is still multiplied, and must be
    finite.

    Args:
        spans: of each layer of the model.
        num_kv_heads: K.
        exact: never hold more rows and blocks than were asked for. Otherwise the pool grows by
            more than it must, so that it is seldom copied.
    """

    def __init__(self, *, spans: Spans, num_kv_heads: int, exact: bool = False) -> None:
        self.spans = spans
        self.block = BLOCK
        self.exact = exact
        self.num_rows = 0
        self.num_blocks = 0
        self.base = sys.maxsize
        """The lowest position at which a row has begun."""
        self._num_kv_heads = num_kv_heads
        self._free: list[int] = []
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * len(spans)

    def acquire(self, *, base: int) -> int:
        """A row for one rollout, the lowest that is free.

        Args:
            base: position of the rollout's first own token.
        """
        self.base = min(self.base, base)
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
            self.base = sys.maxsize
            self._layers = [None] * len(self._layers)

    def reserve(self, length: int) -> None:
        """Make rows long enough for ``length`` tokens."""
        blocks = -(-length // self.block)
        if blocks > self.num_blocks:
            self.num_blocks = blocks if self.exact else max(blocks, self.num_blocks * 3 // 2)

    def compact(self, rows: Sequence[int], *, length: int, base: int) -> None:
        """Keep these rows alone, as rows 0, 1, ... of a smaller pool.

        Args:
            rows: those in use.
            length: tokens of the longest.
            base: the lowest position at which one begins.
        """
        num_k = self._num_kv_heads
        self.num_rows, self.num_blocks, self._free = len(rows), -(-length // self.block), []
        self.base = base
        for layer, pair in enumerate(self._layers):
            if pair is None:
                continue
            blocks = self._blocks(layer)
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
            self._blocks(layer),
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

    def _blocks(self, layer: int) -> int:
        span = self.spans[layer]
        return num_blocks(span, longest=self.num_blocks, block=self.block, base=self.base)

    def places(self, rows: Tensor, at: Tensor, base: Tensor, *, span: Span | None) -> Tensor:
        """Where tokens go in a layer seen as ``[J * R * K * P, H]``, for each key head.

        Args:
            rows: row of each token ``[T]``.
            at: its place in the row ``[T]``.
            base: position of the row's first token ``[T]``.
            span: of the layer.

        Returns:
            ``[K, T]``.
        """
        at = slots(span, at, base)
        block = torch.div(at, self.block, rounding_mode="floor")
        heads = torch.arange(self._num_kv_heads, device=rows.device)[:, None]
        row = (block * self.num_rows + rows) * self._num_kv_heads + heads
        return row * self.block + at % self.block

    def read(self, layer: int, row: int, stop: int, *, base: int) -> tuple[Tensor, Tensor]:
        """A copy of what the token at ``stop`` sees of those before it, ``[K, T, H]`` each."""
        span, pair = self.spans[layer], self._layers[layer]
        assert pair is not None
        if span is None:
            found = [(0, stop)]
        else:
            kept = keep(span, base=base, stop=stop, num_last=span.window)
            found = runs(span, kept, base=base)
        blocks = -(-max((last for _, last in found), default=0) // self.block)
        heads = slice(row * self._num_kv_heads, (row + 1) * self._num_kv_heads)
        keys, values = (x[:blocks, heads].transpose(0, 1).flatten(1, 2) for x in pair)
        if span is None:
            return keys[:, :stop], values[:, :stop]
        keys, values = (
            torch.cat([x[:, :0], *(x[:, first:last] for first, last in found)], 1)
            for x in (keys, values)
        )
        return keys, values

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
        """What the own token at ``stop`` sees of those before it: keys and values ``[K, T, H]``."""
        return self.pool.read(layer, self.row, stop, base=self.base)


def _num_bytes(layers: Sequence[tuple[Tensor, Tensor] | None]) -> int:
    return sum(tensor.nbytes for pair in layers if pair is not None for tensor in pair)
