"""Attention for one new token of each rollout of a batch.

The queries of all rollouts that share a prefix go through one product with it, those over a
rollout's own tokens through padded batched products. On a CPU in bf16 two products and a
softmax take half the time of the flash kernel, which is made for many queries.

Suffixes: ``B`` rollouts, ``N`` query heads, ``K`` key heads, ``G`` query heads per key head, ``H``
head dim, ``R`` rows of the pool, ``J`` blocks, ``P`` tokens of one, ``C`` keys, ``S`` shared ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from components.attention.lse import apply_sink, merge
from components.policy.cache import RolloutCache, RowPool, SharedPrefix

HIDDEN = -1e30
"""Added to the scores of hidden keys. Finite, so that a row without a visible key stays NaN-free:
its LSE is about HIDDEN, and the merge gives it weight 0."""

MAX_BRIDGE = 2
"""Blocks that no query needs but that go along, to keep two runs of rows in one product."""


class _Run(NamedTuple):
    """One block of neighbouring rows of the pool, which go through one product."""

    block: int
    first: int
    last: int
    """Places in the batch; their rows in the pool are neighbours, too."""
    row: int
    """Row of the first in the pool."""


class _OwnPlan(NamedTuple):
    """What a step needs of the rollouts' own tokens, for one (window, prefix)."""

    runs: list[_Run]
    first_block: int
    mask: Tensor
    """Additive ``[B, 1, 1, C]`` over the tokens from the first needed block to the last."""
    scores: Tensor
    """``[B, K, G, C]``: zeros, whose visible places every layer overwrites."""


class DecodePass:
    """Attends for one new token of each rollout of a batch, step after step.

    Args:
        pool: the rows of the batch.
        caches: the rollouts, ordered by their rows.
        device: where the model is.
        size: rows of the batch, those beyond the rollouts padding: the model's products then have
            one shape whoever is there.
    """

    def __init__(
        self, pool: RowPool, caches: Sequence[RolloutCache], *, device: torch.device, size: int = 0
    ) -> None:
        self._pool, self._caches, self._device = pool, caches, device
        self._padding = max(0, size - len(caches))
        self._rows = torch.tensor([c.row for c in caches], device=device)
        self._base = torch.tensor([c.base for c in caches], device=device)
        self._length = torch.tensor([len(c.ids) - c.base for c in caches], device=device)
        self._groups = _groups(caches, device)
        self._own_plans: dict[tuple, _OwnPlan] = {}
        self._shared_masks: dict[tuple, tuple[int, Tensor | None]] = {}
        self._places: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Position ``[B]`` of each new token, 0 for padding."""
        return F.pad(self._base + self._length, (0, self._padding))

    def begin(self) -> None:
        """Prepare a step: every rollout gets one token after those it holds."""
        self._pool.reserve(max(len(c.ids) - c.base + 1 for c in self._caches))
        self._own_plans, self._shared_masks = {}, {}
        # [B * K], the order of k [B, K, 1, H]
        self._places = self._pool.places(self._rows, self._length).t().flatten()

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
        num_b, num_k, _, dim = k.shape
        live = num_b - self._padding
        keys, values = self._pool.layer(layer, k)
        assert self._places is not None
        keys.view(-1, dim).index_copy_(0, self._places, k[:live].reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self._places, v[:live].reshape(-1, dim))
        # Scaling q is exact for the usual powers of two, and cheaper than scaling the scores.
        factor = dim**-0.5 if scale is None else scale
        heads = (q * factor).reshape(num_b, num_k, -1, dim)
        if (window, prefix) not in self._own_plans:
            self._own_plans[window, prefix] = self._plan_own(heads[:live], window, prefix)
        out, lse = _own(heads[:live], keys, values, self._own_plans[window, prefix])
        for group in range(len(self._groups)):
            out, lse = self._merge_shared(group, layer, heads, out, lse, window, prefix)
        if sinks is not None:
            out, _ = apply_sink(out, lse, sinks)
        return F.pad(out.to(q.dtype), (0, 0, 0, 0, 0, 0, 0, self._padding))

    def _plan_own(self, heads: Tensor, window: int | None, prefix: int) -> _OwnPlan:
        size = self._pool.block
        runs: list[_Run] = []
        for block in range(-(-max(len(c.ids) - c.base + 1 for c in self._caches) // size)):
            needed = [_needs(c, block * size, size, window, prefix) for c in self._caches]
            runs += cut_runs(block, [c.row for c in self._caches], needed)
        first, last = runs[0].block, runs[-1].block + 1
        at = torch.arange(first * size, last * size, device=self._device)
        length, base = self._length[:, None], self._base[:, None]
        hidden = at > length
        if window is not None:
            hidden |= (length - at > window) & (base + at >= prefix)
        mask = _additive(hidden, heads.dtype)[:, None, None]
        scores = heads.new_zeros(*heads.shape[:3], (last - first) * size)
        return _OwnPlan(runs, first, mask, scores)

    def _merge_shared(
        self,
        group: int,
        layer: int,
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
        keys, values = shared.read(layer, num_seen)
        if members is None:  # with the padding: its queries are of no use, but the shape is fixed
            new, new_lse = (x[: len(out)] for x in _shared(heads, keys, values, mask))
            return merge(out, lse, new, new_lse)
        new, new_lse = _shared(heads[members], keys, values, mask)
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
        if int(position[: len(self._caches)].min()) - window >= len(shared):
            return min(prefix, len(shared)), None  # the window has left the shared part
        at = torch.arange(len(shared), device=self._device)
        hidden = (position[:, None] - at > window) & (at >= prefix)
        return len(shared), _additive(hidden, dtype)[None, :, None]


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask of the places that are hidden."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, max(HIDDEN, torch.finfo(dtype).min / 2))


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


def _needs(cache: RolloutCache, start: int, size: int, window: int | None, prefix: int) -> bool:
    """Whether a rollout's new token sees any of its own tokens from ``start`` on."""
    new = len(cache.ids) - cache.base
    last = min(new, start + size - 1)
    if last < start:
        return False
    return window is None or new - last <= window or cache.base + start < prefix


def cut_runs(block: int, rows: Sequence[int], needed: Sequence[bool]) -> list[_Run]:
    """The pieces of a block that a batch needs.

    Args:
        block: index of the block.
        rows: row of each rollout in the pool, rising.
        needed: whether the rollout needs the block.

    Returns:
        Runs that cover what is needed, and at most MAX_BRIDGE blocks at a time that are not.
    """
    runs: list[_Run] = []
    for place, row in enumerate(rows):
        if not needed[place]:
            continue
        if runs:
            _, first, last, first_row = runs[-1]
            close = place - last <= MAX_BRIDGE
            if close and row - first_row == place - first:
                runs[-1] = _Run(block, first, place + 1, first_row)
                continue
        runs.append(_Run(block, place, place + 1, row))
    return runs


def _own(heads: Tensor, keys: Tensor, values: Tensor, plan: _OwnPlan) -> tuple[Tensor, Tensor]:
    """Attention over the rollouts' own tokens.

    Args:
        heads: scaled queries ``[B, K, G, H]``.
        keys: ``[J, R * K, P, H]``.
        values: ``[J, R * K, P, H]``.
        plan: which blocks.

    Returns:
        ``out [B, N, 1, H]`` and ``lse [B, N, 1]``, both in at least fp32.
    """
    num_b, num_k, _, dim = heads.shape
    size = keys.shape[2]
    for block, first, last, row in plan.runs:
        piece = keys[block, row * num_k : (row + last - first) * num_k]
        columns = slice((block - plan.first_block) * size, (block + 1 - plan.first_block) * size)
        new = torch.bmm(heads[first:last].flatten(0, 1), piece.transpose(1, 2))
        plan.scores[first:last, ..., columns] = new.view(last - first, num_k, -1, size)
    p, lse = _softmax(plan.scores + plan.mask)
    p = p.to(values.dtype)
    out = torch.zeros(heads.shape, dtype=lse.dtype, device=heads.device)
    for block, first, last, row in plan.runs:
        piece = values[block, row * num_k : (row + last - first) * num_k]
        columns = slice((block - plan.first_block) * size, (block + 1 - plan.first_block) * size)
        new = torch.bmm(p[first:last, ..., columns].flatten(0, 1), piece)
        out[first:last] += new.view(last - first, num_k, -1, dim)
    return out.view(num_b, -1, 1, dim), lse.view(num_b, -1, 1)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities ``[..., C]`` and LSE ``[...]`` of scores, in at least fp32."""
    p = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # The largest probability is exp(its score - lse).
    return p, scores.amax(-1).to(p.dtype) - p.amax(-1).log()


def _shared(
    heads: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of a batch over keys that all share.

    Args:
        heads: scaled queries ``[B, K, G, H]``.
        keys: ``[K, S, H]``.
        values: ``[K, S, H]``.
        mask: additive ``[1, B, 1, S]``; None where every key is visible.

    Returns:
        ``out [B, N, 1, H]`` and ``lse [B, N, 1]``, the latter in at least fp32.
    """
    num_b, num_k, num_g, dim = heads.shape
    q = heads.transpose(0, 1).reshape(num_k, -1, dim)
    scores = torch.bmm(q, keys.transpose(1, 2))
    if mask is not None:
        scores.view(num_k, num_b, num_g, -1).add_(mask)
    p, lse = _softmax(scores)
    out = torch.bmm(p.to(values.dtype), values).view(num_k, num_b, num_g, dim)
    lse = lse.view(num_k, num_b, num_g)
    return (
        out.transpose(0, 1).reshape(num_b, -1, 1, dim),
        lse.transpose(0, 1).reshape(num_b, -1, 1),
    )
