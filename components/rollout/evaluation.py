"""What an evaluation reports: the official reward with failures in the denominator, per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean, stdev
from typing import Any

from components.envs.baselines import AGENTS, baselines
from components.rollout.intervals import interval
from components.rollout.types import Rollout


def pass_hat_k(num_trials: int, num_correct: int, k: int) -> float:
    """Unbiased estimate that k independent trials all succeed: C(c, k) / C(n, k).

    Source: tau-bench, https://arxiv.org/abs/2406.12045. n=4, c=3, k=2 gives 0.5.

    Raises:
        ValueError: if k is not in 1 to ``num_trials``, or ``num_correct`` not in 0 to it.
    """
    if not 1 <= k <= num_trials:
        raise ValueError(f"k = {k}: must be in 1 to num_trials = {num_trials}")
    if not 0 <= num_correct <= num_trials:
        raise ValueError(f"num_correct = {num_correct}: must be in 0 to num_trials = {num_trials}")
    return comb(num_correct, k) / comb(num_trials, k)


def pass_at_k(num_trials: int, num_correct: int, k: int) -> float:
    """Unbiased estimate that one of k independent trials succeeds or more: 1 - C(n-c, k) / C(n, k).

    Not pass^k, which asks that all do. n=4, c=1, k=2 gives 0.5.

    Source: M. Chen et al., https://arxiv.org/abs/2107.03374.

    Raises:
        ValueError: if k is not in 1 to ``num_trials``.
    """
    return 1.0 - pass_hat_k(num_trials, num_trials - num_correct, k)


def by_task(rollouts: Sequence[Rollout]) -> dict[tuple[str, str], list[Rollout]]:
    """Rollouts of each (domain, task id), in their order of appearance.

    An id alone is no name: retail and airline both have a task "0".
    """
    tasks: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in rollouts:
        tasks.setdefault((rollout.spec.domain, rollout.spec.task_id), []).append(rollout)
    return tasks


def official_reward(rollout: Rollout) -> float:
    """The official reward; a failed rollout stays in the denominator as 0."""
    return float(rollout.reward_breakdown.get("official", 0.0)) if rollout.valid else 0.0


def strict_reward(rollout: Rollout) -> float:
    """The strict reward; a failed rollout counts as 0."""
    return float(rollout.reward_breakdown.get("strict", 0.0)) if rollout.valid else 0.0


def evaluation_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """One line for the console."""
    values = "  ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in metrics.items())
    return f"eval {step:>3}/{num_steps}  {values}"


def evaluation_metrics(rollouts: Sequence[Rollout], *, num_trials: int) -> dict[str, float]:
    """Metrics of one evaluation of ``num_trials`` rollouts per task.

    Args:
        rollouts: all of them, failed ones too.
        num_trials: rollouts planned for each task.

    Returns:
        ``eval/official_mean`` (mean over tasks and trials), the same as ``eval/mean@k`` with k =
        ``num_trials``, ``eval/strict_mean``, ``eval/pass^k`` (all of k trials succeed) for each k
        up to ``num_trials`` and ``eval/pass@k`` (one of them does) from 2 on, ``eval/error_frac``,
        ``eval/turns``, ``eval/tool_calls``, and what agents get on these tasks that do not try
        (tau2-bench only): ``eval/do_nothing_mean``, ``eval/transfer_mean``, and
        ``eval/do_nothing_strict_mean``, ``eval/transfer_strict_mean``.
    """
    values = values_by_task(rollouts, num_trials=num_trials)
    metrics = {
        "eval/official_mean": fmean(official_reward(r) for r in rollouts),
        "eval/strict_mean": fmean(strict_reward(r) for r in rollouts),
        "eval/error_frac": fmean(not r.valid for r in rollouts),
        "eval/turns": fmean(r.stats.get("turns", 0) for r in rollouts),
        "eval/tool_calls": fmean(r.stats.get("tool_calls", 0) for r in rollouts),
    }
    given_away = [found for task in by_task(rollouts) if (found := baselines(*task))]
    for agent in AGENTS if given_away else ():
        for kind in ("official", "strict"):
            name = f"eval/{agent}_mean" if kind == "official" else f"eval/{agent}_strict_mean"
            metrics[name] = fmean(found[agent][kind] for found in given_away)
    return {**{name: fmean(of_tasks) for name, of_tasks in values.items()}, **metrics}


def values_by_task(rollouts: Sequence[Rollout], *, num_trials: int) -> dict[str, list[float]]:
    """The metrics that are means over tasks, as one value per task in order of appearance.

    Args:
        rollouts: all of them, failed ones too.
        num_trials: rollouts planned for each task.
    """
    groups = by_task(rollouts).values()
    correct = [sum(official_reward(r) >= 1.0 - 1e-9 for r in group) for group in groups]
    ks = range(1, num_trials + 1)
    return {
        "eval/official_mean": [fmean(map(official_reward, group)) for group in groups],
        "eval/strict_mean": [fmean(map(strict_reward, group)) for group in groups],
        f"eval/mean@{num_trials}": [fmean(map(official_reward, group)) for group in groups],
        **{f"eval/pass^{k}": [pass_hat_k(num_trials, c, k) for c in correct] for k in ks},
        **{f"eval/pass@{k}": [pass_at_k(num_trials, c, k) for c in correct] for k in ks[1:]},
    }


def evaluation_summary(
    rollouts: Sequence[Rollout],
    *,
    num_trials: int,
    of_seeds: Mapping[str, Sequence[Rollout]],
) -> dict[str, Any]:
    """How sure the means are.

    Args:
        rollouts: all of them, failed ones too.
        num_trials: rollouts planned for each task, over all seeds.
        of_seeds: the rollouts of each seed.

    Returns:
        ``intervals``: [low, high] of each metric that is a mean over tasks, 95 %, see
        :func:`components.rollout.intervals.interval`. ``seeds``: by seed ``official_mean`` and
        ``strict_mean``. ``seed_std``: the standard deviation of the seeds' official means; null
        for one seed.
    """
    values = values_by_task(rollouts, num_trials=num_trials)
    seeds = {
        seed: {
            "official_mean": fmean(map(official_reward, some)),
            "strict_mean": fmean(map(strict_reward, some)),
        }
        for seed, some in of_seeds.items()
    }
    official = [means["official_mean"] for means in seeds.values()]
    return {
        "intervals": {name: list(interval(of_tasks)) for name, of_tasks in values.items()},
        "seeds": seeds,
        "seed_std": stdev(official) if len(official) > 1 else None,
    }
