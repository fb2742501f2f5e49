"""How often each check is violated: per check and per task, with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

from components.rollout.types import Rollout
from components.safety.checks import CHECKS, checks_of, run_checks
from components.safety.conversation import Finding, from_records

NUM_EXAMPLES = 3
"""Violations of each check that a report quotes."""

_COUNTS: tuple[str, ...] = ("applied", "violated", "occasions", "broken")


def wilson(count: float, total: int, *, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a proportion; (0, 1) without trials.

    Args:
        count: of ``total`` trials; a sum of parts of successes where a trial has values between.
        total: how many there were.
        z: 1.96 for 95 %.

    Raises:
        ValueError: if not 0 <= count <= total.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209-212.
    """
    if not 0 <= count <= total:
        raise ValueError(f"count = {count}: must be in 0 to total = {total}")
    if total == 0:
        return 0.0, 1.0
    share, square = count / total, z * z
    centre = share + square / (2 * total)
    margin = z * sqrt(share * (1 - share) / total + square / (4 * total * total))
    scale = 1 + square / total
    return max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale)


def safety_report(rollouts: Iterable[Rollout]) -> dict[str, Any]:
    """Run every check over recorded rollouts.

    Rollouts that failed through no fault of the policy (``error_*``) are skipped and counted.

    Args:
        rollouts: of any domain, policy and step.

    Returns:
        A JSON-able mapping. ``checks``: for each check the rollouts to which it ``applied``, those
        that ``violated`` it, that ``rate`` (null where it never applied) with its 95 % Wilson
        interval ``low`` and ``high``, and the same counted by occasion (``occasions``, ``broken``:
        the measure for S5). ``any_hard``: rollouts that violate a hard check, of those to which one
        applied. ``tasks``: ``domain/id`` to ``rollouts`` and, by check, ``applied`` and
        ``violated``. ``examples``: some violations by check. ``num_rollouts``, ``num_skipped``, and
        ``unchecked``: domains without checks.
    """
    counts = {name: dict.fromkeys(_COUNTS, 0) for name in CHECKS}
    any_hard = dict.fromkeys(_COUNTS, 0)
    tasks: dict[str, dict[str, Any]] = {}
    examples: dict[str, list[dict[str, Any]]] = {}
    unchecked: set[str] = set()
    num_rollouts = num_skipped = 0
    for rollout in rollouts:
        spec = rollout.spec
        if not rollout.valid:
            num_skipped += 1
            continue
        num_rollouts += 1
        if not checks_of(spec.domain):
            unchecked.add(spec.domain)
            continue
        findings = run_checks(
            from_records(rollout.messages, domain=spec.domain, task_id=spec.task_id)
        )
        task = tasks.setdefault(
            f"{spec.domain}/{spec.task_id}", {"rollouts": 0, "applied": {}, "violated": {}}
        )
        task["rollouts"] += 1
        for name, found in findings.items():
            _count(counts[name], found)
            _add(task["applied"], name, bool(found))
            _add(task["violated"], name, any(not f.passed for f in found))
            _quote(examples, name, found, spec.rollout_id)
        _count(any_hard, [f for n, fs in findings.items() if CHECKS[n].hard for f in fs])
    return {
        "num_rollouts": num_rollouts,
        "num_skipped": num_skipped,
        "unchecked": sorted(unchecked),
        "checks": {
            name: {"title": check.title, "hard": check.hard, **_rate(counts[name])}
            for name, check in CHECKS.items()
        },
        "any_hard": _rate(any_hard),
        "tasks": tasks,
        "examples": examples,
    }


def _count(counts: dict[str, int], found: list[Finding]) -> None:
    broken = sum(not finding.passed for finding in found)
    counts["applied"] += bool(found)
    counts["violated"] += bool(broken)
    counts["occasions"] += len(found)
    counts["broken"] += broken


def _add(counts: dict[str, int], name: str, more: bool) -> None:
    if more:
        counts[name] = counts.get(name, 0) + 1


def _quote(
    examples: dict[str, list[dict[str, Any]]], name: str, found: list[Finding], rollout_id: str
) -> None:
    broken = next((finding for finding in found if not finding.passed), None)
    if broken is not None and len(examples.setdefault(name, [])) < NUM_EXAMPLES:
        examples[name].append(
            {"rollout_id": rollout_id, "message": broken.place, "text": broken.text}
        )


def _rate(counts: Mapping[str, int]) -> dict[str, Any]:
    low, high = wilson(counts["violated"], counts["applied"])
    rate = counts["violated"] / counts["applied"] if counts["applied"] else None
    return {**counts, "rate": rate, "low": low, "high": high}
