"""Attention of a batch over the prefixes that its rollouts share: one product for all who have one.

Suffixes: ``B`` rollouts and padding, ``K`` key heads, ``G`` query heads per key head, ``H`` head
dim, ``S`` shared keys, ``C`` others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.policy.cache import RolloutCache, SharedPrefix
from components.policy.spans import Span

HIDDEN = -1e30
"""Added to the scores of hidden keys. Finite, so that a row of padding, which sees nothing, stays
free of NaN."""


class Group(NamedTuple):
    """Rollouts with one shared prefix, in a step, for one (window, prefix)."""

    shared: SharedPrefix
    members: Tensor | None
    """Their places in the batch; None: everybody's, the padding's included."""
    num_seen: int
    """S, the first of the shared keys that are kept: those that they need."""
    mask: Tensor | None
    """Additive ``[1, B, 1, S]`` over these; None where every key is visible."""


def find_groups(
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


def plan_group(
    shared: SharedPrefix,
    members: Tensor | None,
    positions: Tensor,
    *,
    num_live: int,
    window: int | None,
    prefix: int,
    dtype: torch.dtype,
) -> Group:
    """How many of the shared keys that are kept a group needs, and the mask over them.

    Args:
        shared: the group's prefix.
        members: its places in the batch, None for all.
        positions: ``[B]`` of the new tokens of the batch.
        num_live: how many of them are no padding.
        window: largest distance in positions that is still seen; None for no window.
        prefix: positions that no window hides.
        dtype: of the mask.
    """
    position = positions if members is None else positions[members]
    if window is None:
        return Group(shared, members, len(shared), None)
    kept = shared.kept(Span(window, prefix), len(shared))
    if int(position[:num_live].min()) - window >= len(shared):
        return Group(shared, members, kept.head, None)  # the window has left the shared part
    at = torch.arange(kept.num, device=positions.device)
    at += (at >= kept.head) * (kept.tail - kept.head)
    hidden = (position[:, None] - at > window) & (at >= prefix)
    return Group(shared, members, kept.num, additive(hidden, dtype)[None, :, None])


def lowest(dtype: torch.dtype) -> float:
    """HIDDEN, or what a dtype has room for."""
    return max(HIDDEN, torch.finfo(dtype).min / 2)


def additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask of the places that are hidden."""
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, lowest(dtype))


def score_shared(heads: Tensor, group: Group, layer: int, scores: Tensor) -> None:
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


def mix_shared(p: Tensor, group: Group, layer: int, out: Tensor) -> None:
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
