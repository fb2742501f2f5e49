"""Attention for the new tokens of several rollouts, side by side in one row without padding.

Suffixes: ``T`` packed new tokens, ``N`` query heads, ``K`` key heads, ``H`` head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.attention.folded import flash_forward
from components.attention.kernels import part_forward
from components.attention.lse import apply_sink, merge_
from components.attention.parts import BAND, CAUSAL, FULL, Chain, Part, split
from components.policy.cache import RolloutCache, SharedPrefix
from components.policy.dense import DenseRows, takes
from components.policy.spans import Span, keep, span_of


class Segment(NamedTuple):
    """New tokens of one rollout in a packed row."""

    first: int
    """First place in the packed row."""
    last: int
    """One past the last place."""
    store: RolloutCache | SharedPrefix
    """Where their keys and values go."""
    start: int
    """Tokens that the store already holds."""
    shared: SharedPrefix | None
    """What comes before the store's tokens."""


class PackedRow(NamedTuple):
    """One forward pass of new tokens."""

    segments: list[Segment]
    ids: list[int]
    positions: list[int]
    """Of each token in its own rollout."""
    ends: list[int]
    """Places of the tokens that end a context: their logits are wanted."""
    owners: list[int]
    """Index of the context that each of them ends."""


def pack_rows(
    contexts: Sequence[tuple[RolloutCache, Sequence[int]]], *, max_length: int
) -> Iterator[PackedRow]:
    """Cut what is new of some contexts into rows.

    The ids of a row are entered into the caches when it is yielded: run it before asking for the
    next one.

    Args:
        contexts: rollouts and all their ids so far.
        max_length: most tokens in one row.

    Yields:
        Full rows and a last one. Rollouts with the same shared prefix stand side by side, so that
        one product over it serves them all.
    """
    row = PackedRow([], [], [], [], [])
    last_user = {id(cache.shared): index for index, (cache, _) in enumerate(contexts)}
    order = sorted(range(len(contexts)), key=lambda i: (last_user[id(contexts[i][0].shared)], i))
    for index in order:
        cache, context = contexts[index]
        del cache.ids[len(context) - 1 :]  # the last token is fed again if it was kept
        cache.pool.reserve(len(context) - cache.base)
        while len(cache.ids) < len(context):
            at, first = len(cache.ids), len(row.ids)
            new = context[at : at + max_length - first]
            row.segments.append(
                Segment(first, first + len(new), cache, at - cache.base, cache.shared)
            )
            row.ids.extend(new)
            row.positions.extend(range(at, at + len(new)))
            cache.ids.extend(new)
            if len(cache.ids) == len(context):
                row.ends.append(len(row.ids) - 1)
                row.owners.append(index)
            if len(row.ids) == max_length:
                yield row
                row = PackedRow([], [], [], [], [])
    if row.ids:
        yield row


class _Call(NamedTuple):
    """A kernel call: queries ``part.q0:q1`` of the packed row, keys ``part.k0:k1`` of a source."""

    source: RolloutCache | SharedPrefix | None
    """What it kept before this pass, packed; None: the new tokens, by their places in the row."""
    part: Part


class _Writes(NamedTuple):
    """Where the new tokens of a row go in the layers of a span."""

    chosen: Tensor | None
    """``[T]``: those that stay, as places in the packed row; None for all."""
    places: Tensor
    """``[K * T]`` in the pool."""


class PrefillPass:
    """Attends for the new tokens of several rollouts, packed in one row, and stores their keys.

    Args:
        segments: the row, in order; segments with the same shared prefix side by side.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._calls: dict[tuple[int | None, int], list[_Call]] = {}
        self._dense = DenseRows()
        self._longest = max(
            last - first + start + (0 if prefix is None else len(prefix))
            for first, last, _, start, prefix in segments
        )
        self._writes: dict[Span | None, _Writes] = {}
        self._stops: dict[int, int] = {}  # tokens that each source held before this pass
        for _, _, store, start, prefix in segments:
            self._stops[id(store)] = start
            if prefix is not None:
                self._stops[id(prefix)] = len(prefix)

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
        """See ``components.attention.sink_attention.Attend``; the batch is one row."""
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        if window is None and takes(q, num_keys=self._longest, sinks=sinks):
            out = self._attend_dense(layer, q, k, v, scale=factor)
            self._write(layer, k[0], v[0], None)
            return out
        if (window, prefix) not in self._calls:
            self._calls[window, prefix] = self._plan(window, prefix)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty(q.shape, dtype=wide, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        held: dict[int, tuple[Tensor, Tensor]] = {}
        for source, part in self._calls[window, prefix]:
            rows, seen = slice(part.q0, part.q1), slice(part.k0, part.k1)
            if source is None:
                keys, values = k[:, :, seen], v[:, :, seen]
            else:
                if id(source) not in held:
                    held[id(source)] = source.read(layer, self._stops[id(source)])
                keys, values = (x[None, :, seen] for x in held[id(source)])
            new_out, new_lse = _part(q[:, :, rows], keys, values, part, window or 0, factor)
            if part.own:  # these come first, one for each query
                out[:, :, rows], lse[:, :, rows] = new_out, new_lse
                continue
            merge_(out[:, :, rows], lse[:, :, rows], new_out, new_lse)
        # Not before: in a ring the new tokens take the places of those that were just read.
        self._write(layer, k[0], v[0], span_of(window, prefix))
        if sinks is not None:
            out, _ = apply_sink(out, lse, sinks)
        return out.to(q.dtype)

    def _attend_dense(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        out = torch.empty_like(q)
        for first, last, store, _, prefix in self._segments:
            held = [x for x in (prefix, store) if x is not None and self._stops[id(x)]]
            pairs = [x.read(layer, self._stops[id(x)]) for x in held]
            pairs.append((k[0, :, first:last], v[0, :, first:last]))
            keys, values = (torch.cat(x, 1) for x in zip(*pairs, strict=True))
            out[0, :, first:last] = self._dense.attend(
                q[0, :, first:last], keys, values, scale=scale
            )
        return out

    def _write(self, layer: int, k: Tensor, v: Tensor, span: Span | None) -> None:
        """Store the new keys and values ``[K, T, H]``."""
        store = self._segments[0].store
        if isinstance(store, SharedPrefix):
            assert len(self._segments) == 1
            assert store.spans[layer] == span
            store.write(layer, self._segments[0].start, k, v)
            return
        assert store.pool.spans[layer] == span
        if span not in self._writes:
            self._writes[span] = self._plan_writes(span, k.device)
        chosen, places = self._writes[span]
        for kept, new in zip(store.pool.layer(layer, k), (k, v), strict=True):
            staying = new if chosen is None else new[:, chosen]
            kept.view(-1, k.shape[2]).index_copy_(0, places, staying.reshape(-1, k.shape[2]))

    def _plan_writes(self, span: Span | None, device: torch.device) -> _Writes:
        """No two tokens go to one place: of those with one slot only the newest stays."""
        chosen: list[int] = []
        rows: list[int] = []
        at: list[int] = []
        base: list[int] = []
        for first, last, store, start, _ in self._segments:
            assert isinstance(store, RolloutCache)
            end = start + last - first
            staying = [*range(start, end)]
            if span is not None:
                kept = keep(span, base=store.base, stop=end, num_last=span.ring)
                head = range(start, max(start, kept.head))
                staying = [*head, *range(max(start, kept.tail), end)]
            at += staying
            chosen += [first + place - start for place in staying]
            rows += [store.row] * len(staying)
            base += [store.base] * len(staying)
        store = self._segments[0].store
        assert isinstance(store, RolloutCache)
        places = store.pool.places(
            torch.tensor(rows), torch.tensor(at), torch.tensor(base), span=span
        )
        all_stay = len(chosen) == self._segments[-1].last
        picked = None if all_stay else torch.tensor(chosen, device=device)
        return _Writes(picked, places.flatten().to(device))

    def _plan(self, window: int | None, prefix: int) -> list[_Call]:
        """Kernel calls that cover every visible pair of a query and a key once."""
        if window is None:
            return self._plan_whole()
        calls = []
        for segment in self._segments:
            calls += _plan_window(segment, Span(window, prefix))
        return sorted(calls, key=lambda call: not call.part.own)

    def _plan_whole(self) -> list[_Call]:
        """Without a window a query sees all that came before: no mask but the causal one."""
        own, past, shared = [], [], []
        for first, last, store, start, prefix in self._segments:
            own.append(_Call(None, Part(first, last, first, last, CAUSAL, 0, True)))
            if start:
                past.append(_Call(store, Part(first, last, 0, start, FULL, 0, False)))
            if prefix is None:
                continue
            if shared and shared[-1].source is prefix and shared[-1].part.q1 == first:
                first = shared.pop().part.q0
            shared.append(_Call(prefix, Part(first, last, 0, len(prefix), FULL, 0, False)))
        return own + past + shared


def _plan_window(segment: Segment, span: Span) -> list[_Call]:
    """Calls of one segment, cut from its one path of positions: shared prefix, kept, new."""
    first, last, store, start, shared = segment
    base = 0 if shared is None else len(shared)
    edges = sorted({0, base, base + start, base + start + last - first})
    chains = [
        Chain(begin, end, begin, index - 1, begin if index else -1)
        for index, (begin, end) in enumerate(itertools.pairwise(edges))
    ]
    to_row = first - base - start
    kept = keep(span, base=base, stop=start, num_last=span.window)
    calls = []
    for part in split(chains, window=span.window, prefix=span.prefix):
        if part.q0 < base + start:
            continue  # queries of earlier passes
        part = part._replace(q0=part.q0 + to_row, q1=part.q1 + to_row)
        if part.k0 >= base + start:
            source, k0, k1 = None, part.k0 + to_row, part.k1 + to_row
        elif part.k0 >= base:
            source, (k0, k1) = store, kept.find(part.k0 - base, part.k1 - base)
        else:
            assert shared is not None
            source, (k0, k1) = shared, shared.kept(span, base).find(part.k0, part.k1)
        calls.append(_Call(source, part._replace(k0=k0, k1=k1)))
    return calls


def _part(
    q: Tensor, keys: Tensor, values: Tensor, part: Part, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """One kernel call; a lone query goes in with its heads as rows (5 times faster in bf16)."""
    if q.shape[2] > 1 or part.kind == BAND:
        return part_forward(q, keys, values, part, window=window, scale=scale)
    heads = q.reshape(1, keys.shape[1], -1, q.shape[3])
    out, lse = flash_forward(heads, keys, values, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])
