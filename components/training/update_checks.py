"""Which options of an update do not go together, said before compute is paid for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from components.training.component import locate
from components.training.sections import at


def update_options(cfg: Mapping[str, Any]) -> list[str]:
    """The problems of options of the update that do not go together."""
    problems = []
    over, divisor = cfg["aggregation"]["over"], cfg["aggregation"]["divisor"]
    if over == "constant" and divisor is None:
        problems.append("aggregation.divisor = None: aggregation.over = constant needs a number")
    if over != "constant" and divisor is not None:
        problems.append(
            f"aggregation.divisor = {divisor}: aggregation.over = {over} has no use for it; "
            "must be null"
        )
    cap = cfg["importance"]["cap"]
    if cfg["ratio"] == "generator" and cap is not None:
        problems.append(
            f"importance.cap = {cap}: ratio = generator holds this weight in its ratio already, "
            "it would count twice; must be null"
        )
    rollout, tokens = cfg["rollout"], cfg["tokens_per_batch"]
    if rollout["group_size"] < 2 and cfg["advantages"]["baseline"] == "group":
        problems.append(
            f"rollout.group_size = {rollout['group_size']}: an advantage compares rollouts of one "
            "task; must be at least 2"
        )
    most = cfg["tasks_per_step"] * rollout["group_size"] * rollout["max_tokens"]
    if tokens > most:
        problems.append(
            f"tokens_per_batch = {tokens}: the rollouts of a step have {most} tokens at most "
            "(tasks_per_step x rollout.group_size x rollout.max_tokens); must not be more"
        )
    return problems + _stale_options(cfg) + _stale_ranks(cfg) + _without_baseline(cfg)


def _stale_options(cfg: Mapping[str, Any]) -> list[str]:
    """The problem of an option that mistakes older weights for a fault."""
    stale = at(cfg, "rollout.max_staleness")
    if not stale or cfg["ratio"] != "generator" or at(cfg, "guards.mismatch") is None:
        return []
    return [
        f"guards.mismatch: with ratio = generator and rollout.max_staleness = {stale} the mismatch "
        "contains what the policy has moved since it sampled; must be null, or ratio = proximal"
    ]


def _stale_ranks(cfg: Mapping[str, Any]) -> list[str]:
    """What several ranks cannot do while a thread of each samples ahead."""
    ranks, stale = int(os.environ.get("WORLD_SIZE", "1")), at(cfg, "rollout.max_staleness")
    problems = []
    if ranks == 1 or not stale:
        return problems
    refills = at(cfg, "dynamic_sampling.max_refills")
    if problem := refills_ahead(refills, ranks=ranks, max_staleness=stale):
        problems.append(problem)
    if stale > 1 and cfg["ratio"] == "proximal":
        problems.append(
            f"rollout.max_staleness = {stale}: must be at most 1 with {ranks} ranks and ratio = "
            "proximal, which computes with the weights that sampled a batch: the ranks together, "
            "but with more than 1 each may have sampled with others"
        )
    return problems


def refills_ahead(max_refills: int, *, ranks: int, max_staleness: int) -> str | None:
    """Why several ranks cannot refill groups while they train; None if they need not."""
    if ranks == 1 or not max_refills or not max_staleness:
        return None
    return (
        f"dynamic_sampling.max_refills = {max_refills}: with {ranks} ranks and "
        f"rollout.max_staleness = {max_staleness} it must be 0: the ranks would have to agree on "
        "refills while they train"
    )


def engine_apart(cfg: Mapping[str, Any]) -> bool:
    """Whether the engine samples from the model that it is given while the trainer works."""
    if cfg["rollout"]["max_staleness"] == 0:
        return False
    return not getattr(locate(cfg["engine"]["_component_"]), "own_weights", False)


def _without_baseline(cfg: Mapping[str, Any]) -> list[str]:
    """The problems of options of the group's baseline where there is none."""
    if cfg["advantages"]["baseline"] != "none":
        return []
    problems = [
        f"advantages.{key} = true: advantages.baseline = none has no group to normalise with; "
        "must be false"
        for key in ("normalize_std", "leave_one_out")
        if cfg["advantages"][key]
    ]
    if (refills := cfg["dynamic_sampling"]["max_refills"]) > 0:
        problems.append(
            f"dynamic_sampling.max_refills = {refills}: it replaces groups of equal rewards, which "
            "advantages.baseline = none trains on; must be 0"
        )
    return problems
