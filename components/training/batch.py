"""The rollouts of one step, and how many they are to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from components.rollout.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Of ``Batches``."""

    num_groups: int
    """Tasks of a batch, over all ranks."""
    group_size: int
    """Rollouts of each."""
    temperature: float
    max_refills: int
    """See ``play_groups``."""
    max_staleness: int
    """Most steps between the weights that sample a batch and its training."""
    num_steps: int
    """No batch is played beyond."""


def batch_settings_from(options: Mapping[str, Any]) -> BatchSettings:
    """Those of a config."""
    rollout = options["rollout"]
    return BatchSettings(
        num_groups=options["tasks_per_step"],
        group_size=rollout["group_size"],
        temperature=rollout["temperature"],
        max_refills=options["dynamic_sampling"]["max_refills"],
        max_staleness=rollout["max_staleness"],
        num_steps=options["num_steps"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a step trains on."""

    rollouts: list[Rollout]
    """Of this rank."""
    metrics: dict[str, float]
    policy_version: int
    """Of the weights that sampled all of it."""
    loader_state: dict[str, Any]
    """Of the task loader once the tasks of this batch were drawn."""
    seconds: float
    """Wall time of playing it."""
