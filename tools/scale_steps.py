"""Steps of training on simulated rollouts, as ``Batches`` takes them; for ``simulate_scale.py``.

With a staleness of 0 a step plays its batch and trains on it. With 1 a batch is played while the
one before it trains, and the engine takes new weights between batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from tools.scale_local import play_local
from tools.scale_model import Costs, Episode, Played, play_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Some steps, one after the other."""

    step_s: list[float]
    update_s: list[float]
    """Of the rank with the most tokens, which the others wait for."""
    busy_s: list[float]
    """Mean over the ranks of what each spends on its own tokens."""
    played: list[Played]


def play(
    batch: Sequence[Sequence[Episode]],
    costs: Costs,
    *,
    servers: int,
    workers: int,
    reply_delay: int | None,
) -> Played:
    """Play a batch.

    Args:
        batch: of each rank, its episodes.
        costs: measured seconds.
        servers: how many.
        workers: rollouts alive at once on each rank.
        reply_delay: of the local engine, of which each rank has one; None: on servers apart.
    """
    if reply_delay is None:
        return play_apart(batch, costs, servers=servers, workers=workers)
    assert servers == len(batch), "each rank samples its own rollouts"
    return play_local(batch, costs, workers=workers, reply_delay=reply_delay)


def train(
    batches: Sequence[Sequence[Sequence[Episode]]],
    costs: Costs,
    *,
    servers: int,
    workers: int,
    staleness: int,
    reply_delay: int | None,
) -> Timeline:
    """Play and train all batches.

    Args:
        batches: of each step, of each rank, its episodes.
        costs: measured seconds.
        servers: how many.
        workers: rollouts alive at once on each rank.
        staleness: 0 or 1.
        reply_delay: see ``play``.

    Returns:
        Their times. Rollouts and training share nothing: with one processor for both, a staleness
        of 1 gains less than this says.

    Raises:
        ValueError: another staleness: then who is quick decides, and much more is to be known.
    """
    if staleness not in (0, 1):
        raise ValueError(f"rollout.max_staleness = {staleness}: only 0 and 1 are simulated")
    played = [
        play(batch, costs, servers=servers, workers=workers, reply_delay=reply_delay)
        for batch in batches
    ]
    updates, busy = [], []
    for batch in batches:
        tokens = [sum(episode.trained_tokens for episode in part) for part in batch]
        fixed = costs.update_fixed_s if max(tokens) else 0.0
        stale = costs.forward_token_s if staleness and updates else 0.0
        of_ranks = [fixed + (costs.update_token_s + stale) * num for num in tokens]
        updates.append(max(of_ranks))
        busy.append(fmean(of_ranks))
    now, ready, steps = 0.0, 0.0, []
    for number, (this, update) in enumerate(zip(played, updates, strict=True)):
        begin = now
        if staleness == 0 or number == 0:
            now = ready = now + this.seconds
        now = max(now, ready)
        if staleness == 0:
            now += costs.sync_s
        else:  # the next batch begins, by the weights that the engine now has
            now += costs.sync_s if number else 0.0
            ready = now + (played[number + 1].seconds if number + 1 < len(played) else 0.0)
        now += update + costs.other_s
        steps.append(now - begin)
    return Timeline(step_s=steps, update_s=updates, busy_s=busy, played=played)
