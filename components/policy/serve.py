"""The book of one call of the local engine: who waits, who is being sampled, who has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from components.policy.engine import Feed
from components.policy.turn import Turn
from components.rollout.types import SampleRequest, SampleResult


class Check(Protocol):
    """Refuses requests, given the rollouts that have others in the call."""

    def __call__(self, requests: Sequence[SampleRequest], *, pending: set[str]) -> None: ...


class Call:
    """The requests of a call of ``LocalEngine.generate``.

    Args:
        requests: those that are there at the start.
        feed: see ``PolicyEngine.generate``.
        check: of requests, before they wait.
        policy_version: stamped on the turns.

    Raises:
        ValueError: what ``check`` refuses, here and in ``settle``.
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        *,
        feed: Feed | None,
        check: Check,
        policy_version: int,
    ) -> None:
        self.waiting: deque[tuple[int, SampleRequest]] = deque()
        """In the order in which they came, which is that of their numbers."""
        self.live: list[Turn] = []
        self._done: dict[int, SampleResult] = {}
        self._num_requests = 0
        self._feed, self._check, self._policy_version = feed, check, policy_version
        self._enter(requests)

    def _enter(self, requests: Sequence[SampleRequest]) -> None:
        pending = {request.rollout_id for _, request in self.waiting}
        pending |= {turn.request.rollout_id for turn in self.live}
        self._check(requests, pending=pending)
        self.waiting += enumerate(requests, self._num_requests)
        self._num_requests += len(requests)

    def settle(self) -> bool:
        """After a step: turns that ended leave, and what feed gives for them waits.

        Returns:
            Whether a turn has left.
        """
        ended = [turn for turn in self.live if turn.finish_reason]
        self.live = [turn for turn in self.live if not turn.finish_reason]
        results = {turn.index: turn.result(policy_version=self._policy_version) for turn in ended}
        self._done |= results
        if self._feed is not None:
            # After every step, with or without an end: steps are the clock of who feeds.
            requests = self._feed(sorted(results.items()))
            if requests:
                self._enter(requests)
        return bool(ended)

    def results(self) -> list[SampleResult]:
        """All turns in the order of their numbers."""
        return [self._done[index] for index in range(self._num_requests)]
