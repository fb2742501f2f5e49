"""From tasks to orders for rollouts: names and seeds that depend on the plan alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from components.rollout.types import RolloutSpec


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts: the same in every process, unlike ``hash``."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def group_specs(
    tasks: Sequence[tuple[str, str]],
    *,
    group_size: int,
    seed: int,
    phase: str,
    first_group: int = 0,
) -> list[RolloutSpec]:
    """Orders for ``group_size`` rollouts of each task.

    Args:
        tasks: (domain, task id) of each group.
        group_size: rollouts per task.
        seed: the run's seed.
        phase: makes names and draws unique within a run, e.g. ``"train/3"`` for step 3.
        first_group: index of the first group in the step (the ranks before this one come first).

    Returns:
        Groups in order, members in order. Siblings share ``env_seed``: the same start, without
        which their rewards could not be compared within the group.
    """
    specs = []
    for offset, (domain, task_id) in enumerate(tasks):
        group = first_group + offset
        for member in range(group_size):
            rollout_id = f"{phase}/{group}/{domain}/{task_id}/{member}"
            specs.append(
                RolloutSpec(
                    rollout_id=rollout_id,
                    task_id=task_id,
                    domain=domain,
                    group=group,
                    member=member,
                    seed=derive_seed(seed, rollout_id),
                    env_seed=derive_seed(seed, phase, group),
                )
            )
    return specs


def trial_specs(
    tasks: Sequence[tuple[str, str]],
    *,
    group_size: int,
    seed: int,
    phase: str,
    first_group: int = 0,
) -> list[RolloutSpec]:
    """Orders for an evaluation: as :func:`group_specs`, but each trial with a start of its own.

    pass^k asks for independent trials, and tau2-bench gives each trial a seed of its own
    (``tau2.run.run_tasks``). ``env_seed`` depends on the run's seed, the task and the trial alone,
    not on the phase or the tasks beside it: two checkpoints meet the same users, trial by trial.

    Args:
        tasks: (domain, task id) of each, every task once.
        group_size: trials of each task.
        seed: as in :func:`group_specs`, and so are ``phase`` and ``first_group``.
        phase: e.g. ``"eval/8"`` for the evaluation after step 8.
        first_group: index of the first task.
    """
    specs = group_specs(
        tasks, group_size=group_size, seed=seed, phase=phase, first_group=first_group
    )
    return [
        replace(spec, env_seed=derive_seed(seed, "trial", spec.domain, spec.task_id, spec.member))
        for spec in specs
    ]
