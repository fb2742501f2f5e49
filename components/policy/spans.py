"""What a layer with a sliding window keeps of a rollout, and where.

A query sees the tokens up to ``window`` positions back, and those at positions below ``prefix``. So
of a rollout's own tokens such a layer keeps a *head*, those below the prefix (none where the shared
part covers it), and a *ring* of the last ``window + 1``: one more than the next query needs, for a
turn may begin by feeding the newest token again. With ``at`` counted from the first own token, a
token has the slot

    at < head:  at
    otherwise:  head + (at - head) % ring

Each token has one slot, so none is ever counted twice, and a row that has not outgrown its head and
ring is laid out like one without a window.

Suffixes: ``B`` rollouts, ``C`` slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from components.attention.sink_attention import SinkAttention
from components.models.decoder import PolicyModel


class Span(NamedTuple):
    """What a query of a layer sees."""

    window: int
    """Largest distance in positions."""
    prefix: int
    """Positions that the window does not hide."""

    @property
    def ring(self) -> int:
        """Last tokens of a row that are kept."""
        return self.window + 1

    def head(self, base: int) -> int:
        """First tokens of a row that are always visible; ``base`` is the position of its first."""
        return max(0, self.prefix - base)


Spans = Sequence[Span | None]
"""Of each layer; None keeps every token."""


class Kept(NamedTuple):
    """The tokens that a layer keeps of the first ``stop``, packed without a gap, in order."""

    head: int
    """One past the first ones."""
    tail: int
    """First of the last ones."""
    stop: int

    @property
    def num(self) -> int:
        """How many."""
        return self.head + self.stop - self.tail

    def find(self, first: int, last: int) -> tuple[int, int]:
        """Where the tokens ``[first, last)`` are among those that are kept."""
        if last <= self.head:
            return first, last
        gap = self.tail - self.head
        assert not gap or first >= self.tail, "these tokens are not kept"
        return first - gap, last - gap


def spans_of(model: PolicyModel) -> tuple[Span | None, ...]:
    """The span of each layer of a model."""
    spans: list[Span | None] = [None] * model.config.num_layers
    for module in model.modules():
        if isinstance(module, SinkAttention):
            spans[module.layer] = span_of(module.window, module.prefix)
    return tuple(spans)


def span_of(window: int | None, prefix: int) -> Span | None:
    """The span of a layer's settings; without a window the prefix says nothing."""
    return None if window is None else Span(window, prefix)


def keep(span: Span | None, *, base: int, stop: int, num_last: int) -> Kept:
    """What is kept of the first ``stop`` tokens: the head and some of the last.

    Args:
        span: of the layer.
        base: position of the first token.
        stop: how many tokens there are.
        num_last: how many of the last ones are kept.
    """
    if span is None:
        return Kept(stop, stop, stop)
    head = min(span.head(base), stop)
    return Kept(head, max(head, stop - num_last), stop)


def runs(span: Span, kept: Kept, *, base: int) -> list[tuple[int, int]]:
    """The slots of what is kept, as ranges in the order of the tokens.

    Args:
        span: of the layer.
        kept: at most ``span.ring`` tokens behind the head.
        base: position of the row's first token.
    """
    found = [(0, kept.head)] if kept.head else []
    num_last = kept.stop - kept.tail
    if num_last:
        start = span.head(base)
        end = start + span.ring
        first = start + (kept.tail - start) % span.ring
        last = first + num_last
        found.append((first, min(last, end)))
        if last > end:
            found.append((start, last - span.ring))
    return found


def slots(span: Span | None, at: Tensor, base: Tensor) -> Tensor:
    """The slot of each token, for places and bases of one shape."""
    if span is None:
        return at
    head = (span.prefix - base).clamp(min=0)
    return torch.where(at < head, at, head + (at - head).remainder(span.ring))


def hidden_slots(span: Span | None, slot: Tensor, new: Tensor, base: Tensor) -> Tensor:
    """Which slots a row's newest token does not see.

    Args:
        span: of the layer.
        slot: ``[C]``.
        new: place of the newest token of each row ``[B, 1]``.
        base: position of the first token of each row ``[B, 1]``.

    Returns:
        ``[B, C]``, true where there is nothing, or what does not belong to the row.
    """
    if span is None:
        return slot > new
    head = (span.prefix - base).clamp(min=0)
    at = new - (new - slot).remainder(span.ring)  # the newest token that has the slot
    beyond = (at < head) | (slot >= head + span.ring)
    return torch.where(slot < head, slot > new, beyond)


def num_blocks(span: Span | None, *, longest: int, block: int, base: int) -> int:
    """Blocks of a layer's rows.

    Args:
        span: of the layer.
        longest: blocks that hold every token of the longest row.
        block: tokens of a block.
        base: the lowest position at which a row begins; it has the longest head.
    """
    return longest if span is None else min(longest, -(-(span.head(base) + span.ring) // block))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizes:
    """Bytes of keys and values, before there are any."""

    spans: Spans
    token_bytes: int
    """Of one token in one layer."""
    block: int
    """Tokens by which a row grows."""

    def pool(self, *, rows: int, longest: int, base: int) -> int:
        """A pool of rollouts' own tokens.

        Args:
            rows: how many.
            longest: blocks that hold every token of the longest.
            base: the lowest position at which one begins.
        """
        blocks = sum(
            num * num_blocks(span, longest=longest, block=self.block, base=base)
            for span, num in Counter(self.spans).items()
        )
        return rows * blocks * self.block * self.token_bytes

    def shared(self, length: int) -> int:
        """A shared prefix of so many tokens."""
        tokens = sum(
            num * keep(span, base=0, stop=length, num_last=span.window if span else 0).num
            for span, num in Counter(self.spans).items()
        )
        return tokens * self.token_bytes

    def rollout(self, length: int) -> int:
        """A bound on one rollout of so many tokens, however many of them are shared."""
        tokens = 0
        for span, num in Counter(self.spans).items():
            # A window's length in the shared part and a ring behind it; the head is in one of them.
            most = length if span is None else min(length, span.prefix + 2 * span.window)
            tokens += num * (most + self.block)
        return tokens * self.token_bytes
