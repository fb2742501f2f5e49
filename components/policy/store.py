"""All keys and values that an engine keeps, and the memory that they may take."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

from components.policy.cache import RolloutCache, RowPool, SharedPrefix
from components.policy.spans import KvSizes
from components.rollout.types import SampleRequest

IDLE_PREFIXES = 4
"""Shared prefixes that are kept though no rollout has them: the next ones begin with them, too,
where all tasks have one system prompt. Where each has its own they would pile up."""


class CacheStore:
    """The caches of the rollouts and the prefixes they share, within a limit.

    Args:
        sizes: of the model's keys and values.
        num_kv_heads: its key heads.
        max_bytes: most bytes of all keys and values; None for no limit.
    """

    def __init__(self, *, sizes: KvSizes, num_kv_heads: int, max_bytes: int | None) -> None:
        self.caches: dict[str, RolloutCache] = {}
        self.shared: dict[tuple[int, ...], SharedPrefix] = {}
        self.pool = RowPool(
            spans=sizes.spans, num_kv_heads=num_kv_heads, exact=max_bytes is not None
        )
        self._num_forgotten = 0
        self._sizes, self._max_bytes = sizes, max_bytes

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Free what is kept for these rollouts; ids that are not known are passed over."""
        for rollout_id in rollout_ids:
            cache = self.caches.pop(rollout_id, None)
            if cache is not None:
                self.pool.release(cache.row)
        used = {id(cache.shared) for cache in self.caches.values()}
        idle = [ids for ids, shared in self.shared.items() if id(shared) not in used]
        for ids in idle[:-IDLE_PREFIXES]:
            del self.shared[ids]

    def num_bytes(self) -> int:
        """Memory of all keys and values, shared prefixes included."""
        return self.pool.num_bytes() + sum(s.num_bytes() for s in self.shared.values())

    def take_forgotten(self) -> int:
        """How many rollouts were forgotten since the last call of this."""
        count, self._num_forgotten = self._num_forgotten, 0
        return count

    def first(self, waiting: Sequence[tuple[int, SampleRequest]]) -> tuple[int, SampleRequest]:
        """Which of the requests that wait, in their order, enters next.

        With a limit, those whose rollouts are kept come before newcomers: these would find no room
        beside caches that wait behind them.
        """
        if self._max_bytes is not None:
            for entry in waiting:
                if entry[1].rollout_id in self.caches:
                    return entry
        return waiting[0]

    def make_room(
        self, request: SampleRequest, *, length: int, busy: Mapping[str, int], waiting: set[str]
    ) -> bool:
        """Make sure that one more turn fits, to its end.

        What no turn of this call needs is forgotten for it: prefixes that nobody has, then
        rollouts, those first that were sampled longest ago. A rollout that was forgotten is
        computed anew when it comes back. The caches of those that wait are touched only where
        nothing else runs.

        Args:
            request: the turn.
            length: most tokens that its rollout has when the turn ends.
            busy: those that the rollouts in the batch have at the end of theirs.
            waiting: rollouts of the other requests that wait.

        Returns:
            False if it must wait for a turn of the batch to end; nothing is forgotten then.
        """
        if self._max_bytes is None:
            return True
        lengths = {**busy, request.rollout_id: length}
        if busy:  # would it fit if all were forgotten that may be?
            kept = {n: c for n, c in self.caches.items() if n in lengths or n in waiting}
            used = {cache.shared for cache in kept.values() if cache.shared is not None}
            if self._needed(request, lengths, kept, used) > self._max_bytes:
                return False
        while self._needed(request, lengths, self.caches, self.shared.values()) > self._max_bytes:
            if not self._forget_one(request, busy, waiting):
                return False
        rows, longest, base = self._grid(request, lengths, self.caches)
        held = self._sizes.pool(
            rows=max(rows, self.pool.num_rows),
            longest=max(longest, self.pool.num_blocks),
            base=min(base, self.pool.base),
        )
        if held > self._max_bytes - self._shared_bytes(request, self.shared.values()):
            self._compact()
        return True

    def _grid(
        self,
        request: SampleRequest,
        lengths: Mapping[str, int],
        caches: Mapping[str, RolloutCache],
    ) -> tuple[int, int, int]:
        """Rows, blocks of the longest, and lowest base of a pool that holds these and one more."""
        own = {request.rollout_id: (lengths[request.rollout_id], len(shared_part(request)))}
        own |= {
            name: (lengths.get(name, len(cache.ids)), cache.base) for name, cache in caches.items()
        }
        longest = max(length - base for length, base in own.values())
        return len(own), -(-longest // self.pool.block), min(base for _, base in own.values())

    def _needed(
        self,
        request: SampleRequest,
        lengths: Mapping[str, int],
        caches: Mapping[str, RolloutCache],
        shared: Collection[SharedPrefix],
    ) -> int:
        """Bytes of a pool that holds these caches and the request's, and of these prefixes."""
        rows, longest, base = self._grid(request, lengths, caches)
        pool = self._sizes.pool(rows=rows, longest=longest, base=base)
        return pool + self._shared_bytes(request, shared)

    def _shared_bytes(self, request: SampleRequest, shared: Collection[SharedPrefix]) -> int:
        """Bytes of these prefixes, and of the request's if it brings one of its own."""
        lengths = [len(each) for each in shared]
        if request.rollout_id not in self.caches:
            prefix = shared_part(request)
            if self.shared.get(prefix) not in shared:
                lengths.append(len(prefix))
        return sum(map(self._sizes.shared, lengths))

    def _forget_one(self, request: SampleRequest, busy: Collection[str], waiting: set[str]) -> bool:
        """Forget what is needed last; False if all that is left is needed now."""
        used = {id(cache.shared) for cache in self.caches.values()}
        wanted = shared_part(request)
        for ids, shared in self.shared.items():
            if id(shared) not in used and ids != wanted:
                del self.shared[ids]
                return True
        others = [n for n in self.caches if n not in busy and n != request.rollout_id]
        idle = [name for name in others if name not in waiting]
        if not idle and (busy or not others):
            return False
        self.release([idle[0] if idle else others[-1]])
        self._num_forgotten += 1
        return True

    def _compact(self) -> None:
        """Move the rows that are in use together, and give the rest of the pool back."""
        caches = list(self.caches.values())
        longest = max((len(cache.ids) - cache.base for cache in caches), default=0)
        base = min((cache.base for cache in caches), default=sys.maxsize)
        self.pool.compact([cache.row for cache in caches], length=longest, base=base)
        for row, cache in enumerate(caches):
            cache.row = row


def shared_part(request: SampleRequest) -> tuple[int, ...]:
    """The ids that are kept once for all rollouts that begin with them.

    The last token of a context is always the rollout's own: its logits are wanted.
    """
    return request.context[: min(request.shared_len, len(request.context) - 1)]
