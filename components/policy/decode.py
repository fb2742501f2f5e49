"""Attention for one new token of each rollout of a batch.

The queries of all rollouts that share a prefix go through one product with it, those over a
rollout's own tokens through batched products. All scores of a query meet in one row and go through
one softmax. On a CPU in bf16 that takes half the time of the flash kernel, which is made for many
queries.

Suffixes: ``B`` rollouts and padding, ``N`` query heads, ``K`` key heads, ``G`` query heads per key
head, ``H`` head dim, ``R`` rows of the pool, ``J`` blocks, ``P`` tokens of one, ``C`` own keys,
``S`` shared ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from components.attention.lse import apply_sink
from components.policy.cache import RolloutCache, RowPool
from components.policy.shared import (
    Group,
    additive,
    find_groups,
    lowest,
    mix_shared,
    plan_group,
    score_shared,
)
from components.policy.spans import Span, hidden_slots, keep, runs, span_of


class _Pieces(NamedTuple):
    """The blocks of the pool that a batch needs, gathered one by one, ``n`` in all."""

    places: Tensor
    """``[n]``: whose they are, as places in the batch."""
    columns: Tensor
    """``[n]``: their block of own keys, counted from the plan's first."""
    units: Tensor
    """``[n]``: where they are in a pool seen as ``[J * R, K, P, H]``."""


class _Plan(NamedTuple):
    """What a step needs to know for one (window, prefix)."""

    places: Tensor
    """``[B * K]``: where the new keys go, in the order of k ``[B, K, 1, H]`` without padding."""
    groups: list[Group]
    pieces: _Pieces | None
    """None: all rows of the pool, from the first needed block to the last, with nothing copied."""
    first_block: int
    mask: Tensor
    """Additive ``[B, 1, 1, C]`` over the own tokens of these blocks; B without the padding."""
    scores: Tensor
    """``[B, K, G, S + C]``: HIDDEN, but for visible places, which every layer overwrites."""


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
        self._groups = find_groups(caches, device)
        self._plans: dict[tuple, _Plan] = {}

    @property
    def positions(self) -> Tensor:
        """Position ``[B]`` of each new token, 0 for padding."""
        return F.pad(self._base + self._length, (0, self._padding))

    def begin(self) -> None:
        """Prepare a step: every rollout gets one token after those it holds."""
        self._pool.reserve(max(len(c.ids) - c.base + 1 for c in self._caches))
        self._plans = {}

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
        # Scaling q is exact for the usual powers of two, and cheaper than scaling the scores.
        factor = dim**-0.5 if scale is None else scale
        heads = (q * factor).reshape(num_b, num_k, -1, dim)
        plan = self._plans.get((window, prefix))
        if plan is None:
            plan = self._plans[window, prefix] = self._plan(heads, window, prefix)
        assert self._pool.spans[layer] == span_of(window, prefix)
        keys, values = self._pool.layer(layer, k)
        keys.view(-1, dim).index_copy_(0, plan.places, k[:live].reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, plan.places, v[:live].reshape(-1, dim))
        num_own = plan.mask.shape[-1]
        own_scores = plan.scores[:live, ..., -num_own:]
        for group in plan.groups:
            score_shared(heads, group, layer, plan.scores)
        self._score_own(heads[:live], keys, plan, own_scores)
        p, lse = _softmax(plan.scores, with_lse=sinks is not None)
        out = self._mix_own(p[:live, ..., -num_own:], values, plan)
        if self._padding:
            out = F.pad(out, (0, 0, 0, 0, 0, 0, 0, self._padding))
        for group in plan.groups:
            mix_shared(p, group, layer, out)
        out = out.view(num_b, -1, 1, dim)
        if sinks is not None:
            assert lse is not None
            out, _ = apply_sink(out.to(lse.dtype), lse.view(num_b, -1, 1), sinks)
        return out.to(q.dtype)

    def _plan(self, heads: Tensor, window: int | None, prefix: int) -> _Plan:
        size, span = self._pool.block, span_of(window, prefix)
        needed = [
            (place, block)
            for place, cache in enumerate(self._caches)
            for block in needed_blocks(cache, size, span=span)
        ]
        first = min(block for _, block in needed)
        last = max(block for _, block in needed) + 1
        slot = torch.arange(first * size, last * size, device=self._device)
        hidden = hidden_slots(span, slot, self._length[:, None], self._base[:, None])
        mask = additive(hidden, heads.dtype)[:, None, None]
        places = self._pool.places(self._rows, self._length, self._base, span=span)
        groups = [
            plan_group(
                *group,
                self.positions,
                num_live=len(self._caches),
                window=window,
                prefix=prefix,
                dtype=heads.dtype,
            )
            for group in self._groups
        ]
        groups = [group for group in groups if group.num_seen]
        width = max((group.num_seen for group in groups), default=0) + len(slot)
        scores = heads.new_full((*heads.shape[:3], width), lowest(heads.dtype))
        # To multiply blocks that nobody needs is cheaper than to copy those needed, up to a point.
        whole = 2 * len(needed) >= (last - first) * self._pool.num_rows
        pieces = None if whole else self._gather(needed, first)
        return _Plan(places.t().flatten(), groups, pieces, first, mask, scores)

    def _gather(self, needed: Sequence[tuple[int, int]], first: int) -> _Pieces:
        places, blocks = torch.tensor(needed, device=self._device).unbind(-1)
        units = blocks * self._pool.num_rows + self._rows[places]
        return _Pieces(places, blocks - first, units)

    def _score_own(self, heads: Tensor, keys: Tensor, plan: _Plan, scores: Tensor) -> None:
        """Masked scores ``[B, K, G, C]`` of the rollouts' own keys ``[J, R * K, P, H]``."""
        num_b, num_k, num_g, dim = heads.shape
        size = keys.shape[2]
        num_blocks = scores.shape[-1] // size
        scores = scores.unflatten(-1, (num_blocks, size))
        mask = plan.mask.view(num_b, 1, 1, num_blocks, size)
        if plan.pieces is not None:
            places, columns, units = plan.pieces
            piece = keys.view(-1, num_k, size, dim)[units].flatten(0, 1)
            new = torch.bmm(heads[places].flatten(0, 1), piece.transpose(1, 2))
            new = new.view(-1, num_k, num_g, size) + mask[places, :, :, columns]
            scores[places, :, :, columns] = new
            return
        every = self._on_rows(heads)
        every = every.expand(num_blocks, *every.shape).reshape(-1, num_g, dim)
        piece = keys[plan.first_block : plan.first_block + num_blocks].flatten(0, 1)
        new = torch.bmm(every, piece.transpose(1, 2)).view(num_blocks, -1, num_k, num_g, size)
        torch.add(self._off_rows(new.permute(1, 2, 3, 0, 4)), mask, out=scores)

    def _mix_own(self, p: Tensor, values: Tensor, plan: _Plan) -> Tensor:
        """Values ``[J, R * K, P, H]`` weighted by ``[B, K, G, C]``: ``[B, K, G, H]``."""
        num_k, num_g, num_own = p.shape[1:]
        size, dim = values.shape[2:]
        num_blocks = num_own // size
        p = p.to(values.dtype)
        if plan.pieces is not None:
            places, columns, units = plan.pieces
            piece = values.view(-1, num_k, size, dim)[units].flatten(0, 1)
            every = p.unflatten(-1, (num_blocks, size))[places, :, :, columns].flatten(0, 1)
            new = torch.bmm(every, piece).view(-1, num_k, num_g, dim)
            wide = torch.promote_types(p.dtype, torch.float32)
            out = torch.zeros(len(p), num_k, num_g, dim, dtype=wide, device=p.device)
            return out.index_add_(0, places, new.to(out.dtype)).to(p.dtype)
        every = self._on_rows(p).unflatten(-1, (num_blocks, size))
        every = every.permute(3, 0, 1, 2, 4).reshape(-1, num_g, size)
        piece = values[plan.first_block : plan.first_block + num_blocks].flatten(0, 1)
        new = torch.bmm(every, piece).view(num_blocks, -1, num_k, num_g, dim)
        return self._off_rows(new[0] if num_blocks == 1 else new.sum(0))

    def _on_rows(self, x: Tensor) -> Tensor:
        """``[B, ...]`` as ``[R, ...]``: each rollout at its row of the pool, zeros elsewhere."""
        if len(x) == self._pool.num_rows:
            return x  # every row is in the batch, and the batch is ordered by rows
        return x.new_zeros(self._pool.num_rows, *x.shape[1:]).index_copy_(0, self._rows, x)

    def _off_rows(self, x: Tensor) -> Tensor:
        """``[R, ...]`` as ``[B, ...]``."""
        return x if len(x) == len(self._caches) else x[self._rows]


def needed_blocks(cache: RolloutCache, size: int, *, span: Span | None) -> Sequence[int]:
    """Blocks of a rollout's row that hold tokens which its new token sees, itself included.

    Args:
        cache: the rollout, without the new token.
        size: tokens of a block.
        span: of the layer.
    """
    stop = len(cache.ids) - cache.base + 1
    if span is None:
        return range(-(-stop // size))
    kept = keep(span, base=cache.base, stop=stop, num_last=span.ring)
    found = runs(span, kept, base=cache.base)
    return sorted({b for first, last in found for b in range(first // size, -(-last // size))})


def _softmax(scores: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Probabilities ``[..., C]`` and, on demand, LSE ``[...]`` in at least fp32."""
    if not with_lse:
        return torch.softmax(scores, -1), None  # summed in fp32, whatever the dtype
    p = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # The largest probability is exp(its score - lse).
    return p, scores.amax(-1).to(p.dtype) - p.amax(-1).log()
