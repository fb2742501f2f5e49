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
from components.policy.cache import RolloutCache, RowPool, SharedPrefix
from components.policy.runs import Run, cut_runs, needs

HIDDEN = -1e30
"""Added to the scores of hidden keys. Finite, so that a row of padding, which sees nothing, stays
free of NaN."""


class _Group(NamedTuple):
    """Rollouts with one shared prefix, in a step, for one (window, prefix)."""

    shared: SharedPrefix
    members: Tensor | None
    """Their places in the batch; None: everybody's, the padding's included."""
    num_seen: int
    """Leading shared keys that they need."""
    mask: Tensor | None
    """Additive ``[1, B, 1, S]`` over these; None where every key is visible."""


class _Plan(NamedTuple):
    """What a step needs to know for one (window, prefix)."""

    groups: list[_Group]
    runs: list[Run] | None
    """Pieces of the pool; None: all its rows, from the first needed block to the last."""
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
        self._groups = _groups(caches, device)
        self._plans: dict[tuple, _Plan] = {}
        self._places: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Position ``[B]`` of each new token, 0 for padding."""
        return F.pad(self._base + self._length, (0, self._padding))

    def begin(self) -> None:
        """Prepare a step: every rollout gets one token after those it holds."""
        self._pool.reserve(max(len(c.ids) - c.base + 1 for c in self._caches))
        self._plans = {}
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
        plan = self._plans.get((window, prefix))
        if plan is None:
            plan = self._plans[window, prefix] = self._plan(heads, window, prefix)
        num_own = plan.mask.shape[-1]
        own_scores = plan.scores[:live, ..., -num_own:]
        for group in plan.groups:
            _score_shared(heads, group, layer, plan.scores)
        self._score_own(heads[:live], keys, plan, own_scores)
        p, lse = _softmax(plan.scores, with_lse=sinks is not None)
        out = self._mix_own(p[:live, ..., -num_own:], values, plan)
        out = F.pad(out, (0, 0, 0, 0, 0, 0, 0, self._padding))
        for group in plan.groups:
            _mix_shared(p, group, layer, out)
        out = out.view(num_b, -1, 1, dim)
        if sinks is not None:
            assert lse is not None
            out, _ = apply_sink(out.to(lse.dtype), lse.view(num_b, -1, 1), sinks)
        return out.to(q.dtype)

    def _plan(self, heads: Tensor, window: int | None, prefix: int) -> _Plan:
        size = self._pool.block
        runs: list[Run] = []
        rows = [c.row for c in self._caches]
        for block in range(-(-max(len(c.ids) - c.base + 1 for c in self._caches) // size)):
            needed = [needs(c, block * size, size, window, prefix) for c in self._caches]
            runs += cut_runs(block, rows, needed)
        first, last = runs[0].block, runs[-1].block + 1
        at = torch.arange(first * size, last * size, device=self._device)
        length, base = self._length[:, None], self._base[:, None]
        hidden = at > length
        if window is not None:
            hidden |= (length - at > window) & (base + at >= prefix)
        mask = _additive(hidden, heads.dtype)[:, None, None]
        groups = [
            self._plan_group(*group, window=window, prefix=prefix, dtype=heads.dtype)
            for group in self._groups
        ]
        groups = [group for group in groups if group.num_seen]
        width = max((group.num_seen for group in groups), default=0) + len(at)
        scores = heads.new_full((*heads.shape[:3], width), _lowest(heads.dtype))
        # One product over blocks that nobody needs is cheaper than many over those needed.
        covered = sum(run.last - run.first for run in runs)
        whole = 2 * covered >= (last - first) * self._pool.num_rows
        return _Plan(groups, None if whole else runs, first, mask, scores)

    def _plan_group(
        self,
        shared: SharedPrefix,
        members: Tensor | None,
        *,
        window: int | None,
        prefix: int,
        dtype: torch.dtype,
    ) -> _Group:
        """How many leading shared keys a group needs, and the mask over them."""
        position = self.positions if members is None else self.positions[members]
        if window is None:
            return _Group(shared, members, len(shared), None)
        if int(position[: len(self._caches)].min()) - window >= len(shared):
            seen = min(prefix, len(shared))  # the window has left the shared part
            return _Group(shared, members, seen, None)
        at = torch.arange(len(shared), device=self._device)
        hidden = (position[:, None] - at > window) & (at >= prefix)
        return _Group(shared, members, len(shared), _additive(hidden, dtype)[None, :, None])

    def _score_own(self, heads: Tensor, keys: Tensor, plan: _Plan, scores: Tensor) -> None:
        """Masked scores ``[B, K, G, C]`` of the rollouts' own keys ``[J, R * K, P, H]``."""
        num_b, num_k, num_g, dim = heads.shape
        size = keys.shape[2]
        if plan.runs is None:
            num_blocks = scores.shape[-1] // size
            every = self._on_rows(heads)
            every = every.expand(num_blocks, *every.shape).reshape(-1, num_g, dim)
            piece = keys[plan.first_block : plan.first_block + num_blocks].flatten(0, 1)
            new = torch.bmm(every, piece.transpose(1, 2)).view(num_blocks, -1, num_k, num_g, size)
            new = self._off_rows(new.permute(1, 2, 3, 0, 4))
            mask = plan.mask.view(num_b, 1, 1, num_blocks, size)
            torch.add(new, mask, out=scores.unflatten(-1, (num_blocks, size)))
            return
        for block, first, last, row in plan.runs:
            piece = keys[block, row * num_k : (row + last - first) * num_k]
            columns = slice(
                (block - plan.first_block) * size, (block + 1 - plan.first_block) * size
            )
            new = torch.bmm(heads[first:last].flatten(0, 1), piece.transpose(1, 2))
            torch.add(
                new.view(last - first, num_k, num_g, size),
                plan.mask[first:last, ..., columns],
                out=scores[first:last, ..., columns],
            )

    def _mix_own(self, p: Tensor, values: Tensor, plan: _Plan) -> Tensor:
        """Values ``[J, R * K, P, H]`` weighted by ``[B, K, G, C]``: ``[B, K, G, H]``."""
        num_b, num_k, num_g, num_own = p.shape
        size, dim = values.shape[2:]
        p = p.to(values.dtype)
        if plan.runs is None:
            num_blocks = num_own // size
            every = self._on_rows(p).unflatten(-1, (num_blocks, size))
            every = every.permute(3, 0, 1, 2, 4).reshape(-1, num_g, size)
            piece = values[plan.first_block : plan.first_block + num_blocks].flatten(0, 1)
            new = torch.bmm(every, piece).view(num_blocks, -1, num_k, num_g, dim)
            return self._off_rows(new[0] if num_blocks == 1 else new.sum(0))
        out = values.new_zeros(num_b, num_k, num_g, dim)
        for block, first, last, row in plan.runs:
            piece = values[block, row * num_k : (row + last - first) * num_k]
            columns = slice(
                (block - plan.first_block) * size, (block + 1 - plan.first_block) * size
            )
            new = torch.bmm(p[first:last, ..., columns].flatten(0, 1), piece)
            out[first:last] += new.view(last - first, num_k, num_g, dim)
        return out

    def _on_rows(self, x: Tensor) -> Tensor:
        """``[B, ...]`` as ``[R, ...]``: each rollout at its row of the pool, zeros elsewhere."""
        if len(x) == self._pool.num_rows:
            return x  # every row is in the batch, and the batch is ordered by rows
        return x.new_zeros(self._pool.num_rows, *x.shape[1:]).index_copy_(0, self._rows, x)

    def _off_rows(self, x: Tensor) -> Tensor:
        """``[R, ...]`` as ``[B, ...]``."""
        return x if len(x) == len(self._caches) else x[self._rows]


def _lowest(dtype: torch.dtype) -> float:
    return max(HIDDEN, torch.finfo(dtype).min / 2)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask of the places that are hidden."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, _lowest(dtype))


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


def _softmax(scores: Tensor, *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Probabilities ``[..., C]`` and, on demand, LSE ``[...]`` in at least fp32."""
    if not with_lse:
        return torch.softmax(scores, -1), None  # summed in fp32, whatever the dtype
    p = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # The largest probability is exp(its score - lse).
    return p, scores.amax(-1).to(p.dtype) - p.amax(-1).log()


def _score_shared(heads: Tensor, group: _Group, layer: int, scores: Tensor) -> None:
    """Scores of a group's shared keys, into the first columns of ``[B, K, G, S + C]``."""
    if group.members is not None:
        heads = heads[group.members]
    num_b, num_k, num_g, dim = heads.shape
    keys, _ = group.shared.read(layer, group.num_seen)
    q = heads.transpose(0, 1).reshape(num_k, -1, dim)
    new = torch.bmm(q, keys.transpose(1, 2)).view(num_k, num_b, num_g, -1)
    if group.mask is not None:
        new += group.mask
    columns = scores[..., : group.num_seen]
    if group.members is None:
        columns.copy_(new.transpose(0, 1))
    else:
        columns.index_copy_(0, group.members, new.transpose(0, 1))


def _mix_shared(p: Tensor, group: _Group, layer: int, out: Tensor) -> None:
    """Add a group's shared values, weighted by ``[B, K, G, S + C]``, to ``out [B, K, G, H]``."""
    p = p[..., : group.num_seen]
    if group.members is not None:
        p = p[group.members]
    num_b, num_k, num_g, _ = p.shape
    _, values = group.shared.read(layer, group.num_seen)
    weights = p.transpose(0, 1).reshape(num_k, num_b * num_g, -1).to(values.dtype)
    new = torch.bmm(weights, values).view(num_k, num_b, num_g, -1).transpose(0, 1)
    if group.members is None:
        out += new
    else:
        out.index_add_(0, group.members, new.contiguous())
