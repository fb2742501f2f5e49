"""The protocol between rollouts and whatever samples for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from components.rollout.types import SampleFailure, SampleRequest, SampleResult


class EngineError(RuntimeError):
    """An engine cannot go on: what it would sample would not come from the trainer's weights."""


class PolicyEngine(Protocol):
    """Samples turns from the current policy.

    An engine whose class has ``own_weights = True`` reads the model that it was given only when it
    is made and in ``sync``. Any other samples from that model itself, so where rollouts and
    training overlap it is given a copy.
    """

    policy_version: int
    """Stamped on every sampled token; the trainer raises it at each sync."""

    def generate(self, requests: Sequence[SampleRequest]) -> Sequence[SampleResult | SampleFailure]:
        """Sample one turn for each request; results in the order of the requests."""
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
