"""The protocol between rollouts and whatever samples for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from components.rollout.types import SampleFailure, SampleRequest, SampleResult

Feed = Callable[[Sequence[tuple[int, SampleResult | SampleFailure]]], Sequence[SampleRequest]]
"""Takes turns that have ended, each with the running number of its request, and gives the requests
that enter now. Those of the call have the first numbers, those that it gives the next ones, in
order. It may be called with no turns. Where nothing is being sampled and it gives nothing, the call
is over. It may release rollouts that have no request in the call."""


class EngineError(RuntimeError):
    """An engine cannot go on: what it would sample would not come from the trainer's weights."""


class PolicyEngine(Protocol):
    """Samples turns from the current policy.

    An engine whose class has ``own_weights = True`` reads the model that it was given only when it
    is made and in ``sync``. Any other samples from that model itself, so where rollouts and
    training overlap it is given a copy.

    One whose class has ``clocked = False`` calls ``feed`` at times that no equal run repeats. Any
    other calls it in logical time: when depends on the requests and the tokens alone.
    """

    policy_version: int
    """Stamped on every sampled token; the trainer raises it at each sync."""

    def generate(
        self, requests: Sequence[SampleRequest], *, feed: Feed | None = None
    ) -> Sequence[SampleResult | SampleFailure]:
        """Sample one turn for each request, and for each that ``feed`` gives.

        Args:
            requests: those that are there at the start.
            feed: called after each step of the engine, and no later than when a turn has ended,
                from one thread at a time. What it raises ends the call.

        Returns:
            All turns in the order of their requests' numbers.
        """
        ...

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Free what is kept for these rollouts."""
        ...

    def sync(self, policy_version: int) -> Mapping[str, float]:
        """The weights have changed: serve them, drop every cache and stamp the new version.

        Returns:
            Metrics of the sync by name.

        Raises:
            EngineError: the engine does not serve them.
        """
        ...


def in_rounds(
    sample_all: Callable[[Sequence[SampleRequest]], Sequence[SampleResult | SampleFailure]],
    requests: Sequence[SampleRequest],
    feed: Feed | None,
) -> list[SampleResult | SampleFailure]:
    """``generate`` for an engine that answers all requests that are there at once.

    Args:
        sample_all: one turn for each request.
        requests: those that are there at the start.
        feed: gives further ones.

    Returns:
        All turns in the order of their requests' numbers.
    """
    results: list[SampleResult | SampleFailure] = []
    while requests:
        ended = list(enumerate(sample_all(requests), len(results)))
        results += [result for _, result in ended]
        requests = () if feed is None else feed(ended)
    return results
