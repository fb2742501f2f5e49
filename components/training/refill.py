"""Rollouts of a step, with new tasks for those that taught nothing (dynamic sampling)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from components.envs.base import Task
from components.rl.advantages import group_advantages
from components.rl.groups import by_group
from components.rollout.types import Rollout
from components.training.parallelize import World


def play_groups(
    draw: Callable[[int], Sequence[Task]],
    play: Callable[[Sequence[Task], int], list[Rollout]],
    *,
    num_groups: int,
    max_refills: int,
    world: World,
) -> tuple[list[Rollout], dict[str, float]]:
    """Play ``num_groups`` groups; draw and play others for those without a signal. Collective.

    A group is without a signal when its rewards are all equal, or fewer than two of its rollouts
    are valid. All that was played is returned, for it is part of what the policy does; the groups
    without a signal are dropped later as always (dynamic sampling, DAPO,
    https://arxiv.org/abs/2503.14476). Every task that is drawn is played, so that the state of the
    loader after the step says where the next one begins.

    Args:
        draw: ``draw(n)`` gives the next n tasks, the same on every rank.
        play: ``play(tasks, first_group)`` gives this rank's rollouts of these tasks, whose groups
            are numbered from ``first_group``.
        num_groups: wanted, over all ranks.
        max_refills: how often others are drawn; 0 turns this off.
        world: this process among its peers.

    Returns:
        Rollouts of this rank; ``group/refilled``, groups that were drawn in place of others.
    """
    rollouts = play(draw(num_groups), 0)
    played = num_groups
    for _ in range(max_refills):
        rewards = [[r.reward for r in group] for group in by_group(rollouts)]
        num_kept = world.sum([sum(group_advantages(rewards).kept)])[0]
        missing = num_groups - int(num_kept)
        if missing <= 0:
            break
        rollouts = rollouts + play(draw(missing), played)
        played += missing
    return rollouts, {"group/refilled": float(played - num_groups)}
