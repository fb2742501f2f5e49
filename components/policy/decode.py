"""Attention for one new token of each rollout of a batch.

The queries of all rollouts that share a prefix go through one product with it, those over a
rollout's own tokens through padded batched products. On a CPU in bf16 two products and a
softmax take half the time of the flash kernel, which is made for many queries.

Suffixes: ``B`` rollouts, ``N`` query heads, ``K`` key heads, ``H`` head dim, ``R`` rows of the pool,
``C`` keys of a row, ``S`` tokens of a shared prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.attention.lse import apply_sink, merge
from components.policy.cache import RolloutCache, RowPool, SharedPrefix

HIDDEN = -1e30
"""Added to the scores of hidden keys. Finite, so that a row without a visible key stays NaN-free:
its LSE is about HIDDEN, and the merge gives it weight 0."""

SPAN_COST = 1024
"""What one more product costs, in padded tokens (about 40 us against 0.04 us on 2 cores)."""


class _Span(NamedTuple):
    """Rollouts of a batch whose rows in the pool are neighbours and go through one product."""

    first: int
    last: int
    """Places in the batch."""
    row: int
    """Row of the first in the pool."""
    longest: int
    """Keys of the longest, its new token included."""
    shortest: int
    """Keys of the shortest, its new token included."""


class DecodePass:
    """Attends for one new token of each rollout of a batch, step after step.

    Args:
        pool: the rows of the batch.
        caches: the rollouts, ordered by their rows.
        device: where the model is.
    """

    def __init__(
        self, pool: RowPool, caches: Sequence[RolloutCache], *, device: torch.device
    ) -> None:
        self._pool, self._caches, self._device = pool, caches, device
        self._rows = torch.tensor([c.row for c in caches], device=device)
        self._base = torch.tensor([c.base for c in caches], device=device)
        self._length = torch.tensor([len(c.ids) - c.base for c in caches], device=device)
        self._groups = _groups(caches, device)
        self._steps = 0
        self._cuts: list[tuple[int, int]] = []
        self._spans: list[_Span] = []
        self._own_masks: dict[tuple, tuple[int, Tensor | None]] = {}
        self._shared_masks: dict[tuple, tuple[int, Tensor | None]] = {}
        self._places: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Position ``[B]`` of each new token."""
        return self._base + self._length

    def begin(self) -> None:
        """Prepare a step: every rollout gets one token after those it holds."""
        lengths = [len(c.ids) - c.base + 1 for c in self._caches]
        self._pool.reserve(max(lengths))
        if self._steps % 64 == 0:  # the lengths' differences stay as they are
            self._cuts = cut_spans([c.row for c in self._caches], lengths)
        self._spans = [
            _Span(a, b, self._caches[a].row, max(lengths[a:b]), min(lengths[a:b]))
            for a, b in self._cuts
        ]
        self._own_masks, self._shared_masks, self._places = {}, {}, None
        self._steps += 1

    def end(self) -> None:
        """Every rollout holds one token more."""
        self._length += 1

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        prefix: int,
        sinks: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """See ``components.attention.sink_attention.Attend``; T is 1."""
        keys, values = self._pool.layer(layer, k)
        num_b, num_k, _, dim = k.shape
        places = self._where(keys)
        keys.view(-1, dim).index_copy_(0, places, k.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, places, v.reshape(-1, dim))
        # Scaling q is exact for the usual powers of two, and cheaper than scaling the scores.
        factor = dim**-0.5 if scale is None else scale
        heads = (q * factor).reshape(num_b, num_k, -1, dim)
        out, lse = self._own(heads, keys, values, window, prefix)
        for group in range(len(self._groups)):
            out, lse = self._merge_shared(group, layer, k, heads, out, lse, window, prefix)
        if sinks is not None:
            out, _ = apply_sink(out, lse, sinks)
        return out.to(q.dtype)

    def _where(self, keys: Tensor) -> Tensor:
        """Places ``[B * K]`` of the new tokens in the pool seen as ``[R * K * C, H]``."""
        if self._places is None:
            _, num_k, capacity, _ = keys.shape
            heads = torch.arange(num_k, device=self._device)
            places = (self._rows[:, None] * num_k + heads) * capacity + self._length[:, None]
            self._places = places.flatten()
        return self._places

    def _own(
        self, heads: Tensor, keys: Tensor, values: Tensor, window: int | None, prefix: int
    ) -> tuple[Tensor, Tensor]:
        """Attention over own tokens: ``out [B, N, 1, H]`` and ``lse [B, N, 1]``, wide."""
        outs, lses = [], []
        for index, span in enumerate(self._spans):
            key = (index, window, prefix)
            if key not in self._own_masks:
                self._own_masks[key] = self._own_mask(span, window, prefix, heads.dtype)
            start, mask = self._own_masks[key]
            rows = slice(span.row, span.row + span.last - span.first)
            out, lse = _products(
                heads[span.first : span.last],
                keys[rows].flatten(0, 1)[:, start : span.longest],
                values[rows].flatten(0, 1)[:, start : span.longest],
                mask,
            )
            outs.append(out.flatten(1, 2).unsqueeze(2))
            lses.append(lse.flatten(1, 2).unsqueeze(2))
        out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in (outs, lses))
        return out.to(lse.dtype), lse

    def _own_mask(
        self, span: _Span, window: int | None, prefix: int, dtype: torch.dtype
    ) -> tuple[int, Tensor | None]:
        """First own key that a span needs, and the mask ``[B, 1, 1, C]`` from there on."""
        if window is None and span.shortest == span.longest:
            return 0, None
        base = self._base[span.first : span.last, None]
        start = 0
        if window is not None and prefix <= int(base.min()):
            start = max(0, span.shortest - 1 - window)
        at = torch.arange(start, span.longest, device=self._device)
        last = self._length[span.first : span.last, None]
        hidden = at > last
        if window is not None:
            hidden |= (last - at > window) & (base + at >= prefix)
        return start, _additive(hidden, dtype)[:, None, None]

    def _merge_shared(
        self,
        group: int,
        layer: int,
        like: Tensor,
        heads: Tensor,
        out: Tensor,
        lse: Tensor,
        window: int | None,
        prefix: int,
    ) -> tuple[Tensor, Tensor]:
        """Merge in the attention over a group's shared prefix, all its queries in one product."""
        shared, members = self._groups[group]
        key = (group, window, prefix)
        if key not in self._shared_masks:
            self._shared_masks[key] = self._shared_mask(group, window, prefix, heads.dtype)
        num_seen, mask = self._shared_masks[key]
        if num_seen == 0:
            return out, lse
        keys, values = (x[:, :num_seen] for x in shared.layer(layer, like))
        mine = heads if members is None else heads[members]
        new, new_lse = _products(mine.transpose(0, 1), keys, values, mask)
        new = new.transpose(0, 1).flatten(1, 2).unsqueeze(2)
        new_lse = new_lse.transpose(0, 1).flatten(1, 2).unsqueeze(2)
        if members is None:
            return merge(out, lse, new, new_lse)
        merged, merged_lse = merge(out[members], lse[members], new, new_lse)
        return out.index_copy(0, members, merged), lse.index_copy(0, members, merged_lse)

    def _shared_mask(
        self, group: int, window: int | None, prefix: int, dtype: torch.dtype
    ) -> tuple[int, Tensor | None]:
        """How many leading shared keys a group needs, and the mask ``[1, B, 1, S]`` over them."""
        shared, members = self._groups[group]
        position = self.positions if members is None else self.positions[members]
        if window is None:
            return len(shared), None
        if int(position.min()) - window >= len(shared):
            return min(prefix, len(shared)), None  # the window has left the shared part
        at = torch.arange(len(shared), device=self._device)
        hidden = (position[:, None] - at > window) & (at >= prefix)
        return len(shared), _additive(hidden, dtype)[None, :, None]


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, HIDDEN)


def _groups(
    caches: Sequence[RolloutCache], device: torch.device
) -> list[tuple[SharedPrefix, Tensor | None]]:
    """The shared prefixes of a batch, and who has each: indices, or None for everybody."""
    members: dict[int, list[int]] = {}
    for index, cache in enumerate(caches):
        if cache.shared is not None:
            members.setdefault(id(cache.shared), []).append(index)
    groups: list[tuple[SharedPrefix, Tensor | None]] = []
    for rows in members.values():
        shared = caches[rows[0]].shared
        assert shared is not None
        whole = len(rows) == len(caches)
        groups.append((shared, None if whole else torch.tensor(rows, device=device)))
    return groups


def cut_spans(rows: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a batch into runs that waste little padding, at the least cost.

    Args:
        rows: row of each rollout in the pool, rising.
        lengths: keys of each.

    Returns:
        ``(first, last)`` of each run: neighbours in the pool, padded to their longest.
    """
    best: list[tuple[int, int]] = [
        (0, 0)
    ]  # cost of the first i rollouts, and where their last run starts
    for end in range(1, len(rows) + 1):
        longest, options = 0, []
        for first in range(end - 1, -1, -1):
            if first < end - 1 and rows[first + 1] != rows[first] + 1:
                break
            longest = max(longest, lengths[first])
            options.append((best[first][0] + SPAN_COST + longest * (end - first), first))
        best.append(min(options))
    spans: list[tuple[int, int]] = []
    end = len(rows)
    while end:
        spans.append((best[end][1], end))
        end = best[end][1]
    return spans[::-1]


def _products(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of few queries per key head.

    Args:
        q: scaled queries ``[X, Y, G, H]``: key head x is that of all ``[x]``, or x * Y + y that of
            ``[x, y]``, depending on their number.
        keys: ``[X, C, H]`` or ``[X * Y, C, H]``.
        values: like ``keys``.
        mask: additive, broadcast to ``[X, Y, G, C]``; None where every key is visible.

    Returns:
        ``out [X, Y, G, H]`` and ``lse [X, Y, G]``, the latter in at least fp32.
    """
    scores = torch.bmm(q.reshape(len(keys), -1, q.shape[-1]), keys.transpose(1, 2))
    if mask is not None:
        scores.view(*q.shape[:3], -1).add_(mask)
    wide = torch.promote_types(q.dtype, torch.float32)
    p = torch.softmax(scores, -1, dtype=wide)
    # The largest probability is exp(its score - lse).
    lse = scores.amax(-1).to(wide) - p.amax(-1).log()
    return torch.bmm(p.to(values.dtype), values).view(q.shape), lse.view(q.shape[:3])
