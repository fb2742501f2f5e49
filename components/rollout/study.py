"""What several runs of several arms say: the warm start that they share, and their differences.

An arm is one way to train. Every arm of a seed starts from the same checkpoint and is evaluated on
the same tasks with the same seed, so all differences are paired by seed and task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from components.rollout.intervals import difference_interval

BEFORE = "before"
"""The arm that is not trained: the warm start itself, evaluated once for each seed."""


def pick_warm_start(
    measured: Sequence[tuple[int, float]], *, low: float, high: float
) -> int | None:
    """The rule: the first checkpoint whose reward on the validation tasks is ``low`` or more.

    Later ones are not looked at, so nothing is selected for being lucky, and the tasks that decide
    are not those that the arms are evaluated on.

    Args:
        measured: (step, mean official reward) of the checkpoints so far, in order of step.
        low: least reward.
        high: most reward: above it there is little left to learn.

    Returns:
        The step, or None where the next checkpoint has to be measured.

    Raises:
        ValueError: if that checkpoint is above ``high``.
    """
    for step, reward in measured:
        if reward > high:
            raise ValueError(
                f"warm start: the reward went past {low} to {high} between two checkpoints: "
                f"{_listed(measured)}; save them more often (save_every) or learn more slowly"
            )
        if reward >= low:
            return step
    return None


def none_fits(measured: Sequence[tuple[int, float]], *, low: float) -> ValueError:
    """The error of a warm start that ended below ``low``."""
    return ValueError(
        f"warm start: no checkpoint reached {low}: {_listed(measured)}; give it more steps "
        "(num_steps)"
    )


def _listed(measured: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"step {step}: {reward:.3f}" for step, reward in measured)


Rewards = Mapping[int, Mapping[str, float]]
"""Seed -> task id -> mean official reward over the trials."""


def paired(before: Rewards, after: Rewards) -> dict[str, Any]:
    """The difference of two arms over the seeds that both have.

    Args:
        before: of one arm.
        after: of the other; the same tasks.

    Returns:
        ``seeds``; ``reward_before``, ``reward_after``, means over seeds and tasks; ``delta``, their
        difference; ``ci_low``, ``ci_high`` of its 95 % interval, from a paired bootstrap over
        tasks and seeds (:func:`~components.rollout.intervals.difference_interval`); ``by_seed``,
        the difference of each seed.

    Raises:
        ValueError: no seed in common, or other tasks.
    """
    seeds = sorted(before.keys() & after.keys())
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(before)} and {sorted(after)}")
    tasks = sorted(before[seeds[0]])
    for seed in seeds:
        if any(sorted(rewards[seed]) != tasks for rewards in (before, after)):
            raise ValueError(f"seed {seed}: evaluated on other tasks than seed {seeds[0]}")
    rows = [[after[seed][task] - before[seed][task] for task in tasks] for seed in seeds]
    first, second = (
        fmean(rewards[seed][task] for seed in seeds for task in tasks)
        for rewards in (before, after)
    )
    low, high = difference_interval(rows)
    return {
        "seeds": seeds,
        "reward_before": first,
        "reward_after": second,
        "delta": second - first,
        "ci_low": low,
        "ci_high": high,
        "by_seed": {str(seed): fmean(row) for seed, row in zip(seeds, rows, strict=True)},
    }


def summary(results: Sequence[Mapping[str, Any]], *, arms: Sequence[str]) -> dict[str, Any]:
    """What the results so far say.

    Args:
        results: of single arms and seeds: ``arm``, ``seed``, ``same`` (what all of them have to
            have in common) and ``evals``: by set of tasks, ``tasks``: task id to the official
            rewards of its trials.
        arms: the trained ones, the first of which is compared with the others.

    Returns:
        By set of tasks: ``change`` (each arm against the warm start) and ``comparison`` (the first
        arm against each other: ``reward_before`` is the other's reward, ``delta`` the advantage
        of the first), each as :func:`paired` has it. Where nothing is there yet, nothing stands.

    Raises:
        ValueError: results that do not belong together.
    """
    first = results[0]
    for result in results:
        if result["same"] != first["same"]:
            raise ValueError(
                f"{result['arm']}_{result['seed']} has {result['same']}, "
                f"{first['arm']}_{first['seed']} has {first['same']}: not of one study"
            )
    found: dict[str, Any] = {}
    for name in first["evals"]:
        rewards: dict[str, dict[int, dict[str, float]]] = {}
        for result in results:
            tasks = result["evals"][name]["tasks"]
            means = {task: fmean(trials) for task, trials in tasks.items()}
            rewards.setdefault(result["arm"], {})[result["seed"]] = means
        found[name] = {
            "change": {
                arm: paired(rewards[BEFORE], rewards[arm])
                for arm in arms
                if _common(rewards, BEFORE, arm)
            },
            "comparison": {
                f"{arms[0]}-{other}": paired(rewards[other], rewards[arms[0]])
                for other in arms[1:]
                if _common(rewards, arms[0], other)
            },
        }
    return found


def _common(rewards: Mapping[str, Rewards], *arms: str) -> bool:
    """Whether these arms have a seed in common."""
    first, second = (set(rewards.get(arm, {})) for arm in arms)
    return bool(first & second)
