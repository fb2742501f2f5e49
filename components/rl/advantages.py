"""Group-normalised advantages: one number per rollout, computed within the rollouts of one task.

There is no value model: the other rollouts of the same task are the baseline (DeepSeekMath,
https://arxiv.org/abs/2402.03300). Options by name: without division by the standard deviation
(Dr. GRPO, https://arxiv.org/abs/2503.20783), with the leave-one-out mean as the baseline (RLOO,
https://arxiv.org/abs/2402.14740), with the rollouts of a group whose rewards differ most (PODS,
https://arxiv.org/abs/2504.13818), and without a baseline (REINFORCE, R. J. Williams, Machine
Learning 8 (1992) 229-256), to compare with.

Suffixes: ``P`` tasks, ``G`` group.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Rewards are sums and products of a few checks: what differs by less than this is rounding.
_SAME_REWARD = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """The advantages of a step and which groups carry a signal.

    Rewards ``[[1, 0, None], [1, 1, 1]]`` give values ``[[+1, -1, None], [0, 0, 0]]`` and kept
    ``[True, False]``.
    """

    values: list[list[float | None]]
    """[P][G] one per rollout; None where the rollout failed or was left out (``num_trained``), 0
    everywhere else in a dropped group."""
    kept: list[bool]
    """[P] False for a group without a signal: its rollouts are not trained."""
    num_too_small: int
    """Groups dropped because fewer than two of their rollouts are valid (without a baseline: none).
    """
    num_no_variance: int
    """Groups dropped because all their valid rollouts have the same reward (without a baseline: the
    reward 0)."""


def group_advantages(
    rewards: Sequence[Sequence[float | None]],
    *,
    normalize_std: bool = True,
    leave_one_out: bool = False,
    baseline: Literal["group", "none"] = "group",
    eps: float = 1e-6,
    num_trained: int | None = None,
    shaping: Sequence[Sequence[float]] | None = None,
) -> GroupAdvantages:
    """Advantages ``(R - mean) / (std + eps)`` over the valid rollouts of each task.

    The standard deviation is the population's. Failed rollouts (reward None) take no part: they
    count neither in the mean nor in the standard deviation. Whether a group has a signal is decided
    by the training reward alone, before shaping: a length bonus makes no signal where every rollout
    failed alike.

    Args:
        rewards: [P][G] training rewards before shaping, one per rollout (not per turn); groups may
            differ in size. None where the rollout failed.
        normalize_std: divide by the group's standard deviation.
        leave_one_out: the baseline of a rollout is the mean of the *other* rollouts.
        baseline: ``none``: the advantage is the reward itself. A group whose rewards are all equal
            is then trained unless they are 0, and so is a group of one.
        eps: added to the standard deviation.
        num_trained: of a kept group with more valid rollouts only so many are trained, those whose
            rewards have the largest variance. Mean and standard deviation are then theirs.
        shaping: [P][G] additive terms (length, format, time), added to the rewards of kept groups.

    Returns:
        Advantages in the shape of ``rewards``, the kept groups and how many were dropped, and why.

    Raises:
        ValueError: a reward or shaping term that is not finite, a shape that differs, eps < 0,
            num_trained < 2, an unknown baseline, or options of the group's baseline without it.
    """
    _check_options(
        baseline=baseline,
        normalize_std=normalize_std,
        leave_one_out=leave_one_out,
        eps=eps,
        num_trained=num_trained,
    )
    _check_numbers(rewards, name="rewards")
    if shaping is not None:
        _check_numbers(shaping, name="shaping")
        sizes, expected = [len(group) for group in shaping], [len(group) for group in rewards]
        if sizes != expected:
            raise ValueError(f"shaping has groups of {sizes}, rewards has groups of {expected}")

    values: list[list[float | None]] = []
    kept: list[bool] = []
    num_too_small = num_no_variance = 0
    for p, group in enumerate(rewards):
        valid = [g for g, reward in enumerate(group) if reward is not None]
        present = [float(reward) for reward in group if reward is not None]
        # What the rewards are told apart from: each other, or 0.
        rivals = [0.0] if baseline == "none" else []
        too_small = len(present) + len(rivals) < 2
        no_variance = not too_small and _spread(present + rivals) <= _SAME_REWARD
        num_too_small += too_small
        num_no_variance += no_variance
        kept.append(not (too_small or no_variance))
        if kept[-1] and num_trained is not None:
            chosen = _most_varied(present, num_trained)
            valid, present = [valid[i] for i in chosen], [present[i] for i in chosen]
        advantages = [0.0] * len(present)
        if kept[-1]:
            if shaping is not None:
                present = [x + shaping[p][g] for x, g in zip(present, valid, strict=True)]
            advantages = present
            if baseline == "group":
                advantages = _normalise(
                    present, normalize_std=normalize_std, leave_one_out=leave_one_out, eps=eps
                )
        row: list[float | None] = [None] * len(group)
        for g, advantage in zip(valid, advantages, strict=True):
            row[g] = advantage
        values.append(row)
    return GroupAdvantages(
        values=values, kept=kept, num_too_small=num_too_small, num_no_variance=num_no_variance
    )


def _most_varied(values: list[float], size: int) -> list[int]:
    """Indices of the ``size`` values whose variance is largest, ascending; all if there are fewer.

    These are always some of the least and some of the greatest. Of equal values the first count as
    less, and among equal variances the one with fewest of the greatest wins.
    """
    if len(values) <= size:
        return list(range(len(values)))
    order = sorted(range(len(values)), key=lambda i: values[i])
    choices = [order[: size - top] + order[len(order) - top :] for top in range(size + 1)]
    return sorted(max(choices, key=lambda c: statistics.pvariance([values[i] for i in c])))


def _spread(values: list[float]) -> float:
    return max(values) - min(values)


def _normalise(
    rewards: list[float], *, normalize_std: bool, leave_one_out: bool, eps: float
) -> list[float]:
    """Advantages of one group of at least two valid rollouts."""
    size = len(rewards)
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if leave_one_out:
        # R_i - mean of the others = (R_i - mean of all) * G / (G - 1)
        centred = [value * size / (size - 1) for value in centred]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / size)
    if std <= _SAME_REWARD:  # shaping cancelled the variance of the rewards
        return [0.0] * size
    return [value / (std + eps) for value in centred]


def _check_options(
    *, baseline: str, normalize_std: bool, leave_one_out: bool, eps: float, num_trained: int | None
) -> None:
    if baseline not in ("group", "none"):
        raise ValueError(f"baseline: {baseline!r} is neither 'group' nor 'none'")
    if baseline == "none" and (normalize_std or leave_one_out):
        raise ValueError(
            f"normalize_std = {normalize_std}, leave_one_out = {leave_one_out}: with baseline "
            "'none' there is no group to normalise with; both must be False"
        )
    if not (math.isfinite(eps) and eps >= 0.0):
        raise ValueError(f"eps = {eps}: must be a finite number >= 0")
    if num_trained is not None and num_trained < 2:
        raise ValueError(f"num_trained = {num_trained}: must be at least 2, or None for all")


def _check_numbers(groups: Sequence[Sequence[float | None]], *, name: str) -> None:
    for p, group in enumerate(groups):
        for g, value in enumerate(group):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name}[{p}][{g}] = {value}: must be finite")
