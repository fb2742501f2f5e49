"""Where the local engine keeps keys and values.

A rollout's cache has two parts: a *shared prefix* (the system turn, computed once per weight
version and kept once for all rollouts that start with it) and its *own* tokens, a row of a pool.
Attention runs over the two parts apart and merges them by their LSE.

Suffixes: ``K`` key heads, ``H`` head dim, ``R`` rows of the pool, ``C`` capacity of a row, ``S``
tokens of a shared prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Store(Protocol):
    """Keys and values of consecutive tokens of one rollout or prefix."""

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, C, H]`` of a layer, to read and to write.

        Args:
            layer: index of the layer.
            like: keys ``[B, K, T, H]``, whose sizes, dtype and device they have.
        """
        ...


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

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, S, H]``."""
        found = self._layers[layer]
        if found is None:
            shape = (like.shape[1], len(self.ids), like.shape[3])
            found = (like.new_zeros(shape), like.new_zeros(shape))
            self._layers[layer] = found
        return found

    def num_bytes(self) -> int:
        """Memory held."""
        return sum(t.nbytes for pair in self._layers if pair is not None for t in pair)


class RowPool:
    """Keys and values of the rollouts' own tokens: per layer two tensors ``[R, K, C, H]``.

    Rows never move, so a rollout that leaves a batch costs nothing. Rows and capacity grow by
    doubling, each layer when it is next used. All starts as zeros: what a mask hides is still
    multiplied, and must be finite.

    Args:
        num_layers: layers of the model.
        max_length: no row ever gets longer.
    """

    def __init__(self, *, num_layers: int, max_length: int) -> None:
        self.num_rows = 0
        self.capacity = 0
        self._max_length = max_length
        self._free: list[int] = []
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def acquire(self) -> int:
        """A row of its own, the lowest that is free."""
        if not self._free:
            more = max(self.num_rows, 1)
            self._free = list(range(self.num_rows, self.num_rows + more))
            self.num_rows += more
        row = min(self._free)
        self._free.remove(row)
        return row

    def release(self, row: int) -> None:
        """Give a row back; the memory goes when no row is in use."""
        self._free.append(row)
        if len(self._free) == self.num_rows:
            self._free, self.num_rows, self.capacity = [], 0, 0
            self._layers = [None] * len(self._layers)

    def reserve(self, length: int) -> None:
        """Make rows long enough for ``length`` tokens."""
        assert length <= self._max_length
        if length > self.capacity:
            self.capacity = min(max(256, length, 2 * self.capacity), self._max_length)

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[R, K, C, H]`` of a layer."""
        found = self._layers[layer]
        shape = (self.num_rows, like.shape[1], self.capacity, like.shape[3])
        if found is None or found[0].shape != shape:
            grown = (like.new_zeros(shape), like.new_zeros(shape))
            if found is not None:
                rows, _, length, _ = found[0].shape
                for old, new in zip(found, grown, strict=True):
                    new[:rows, :, :length] = old
            self._layers[layer] = found = grown
        return found

    def num_bytes(self) -> int:
        """Memory held."""
        return sum(t.nbytes for pair in self._layers if pair is not None for t in pair)


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

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, C, H]`` of the own tokens."""
        keys, values = self.pool.layer(layer, like)
        return keys[self.row], values[self.row]
