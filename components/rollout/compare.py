"""Two evaluations of the same tasks, side by side: the difference, task by task, and its interval.

For one checkpoint under two sets of paraphrases this is a measure of how far it was fitted to the
simulated user that it trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from components.rollout.intervals import difference_interval, sign_flip_test


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the contents of two eval.json files.

    Args:
        first: e.g. with the paraphrases of the training.
        second: e.g. with those that were held out; the same tasks.

    Returns:
        ``metrics``: name to [first, second, difference]. ``official`` and ``strict``: the mean over
        tasks of the second's mean reward less the first's, ``low`` and ``high`` of its 95 %
        interval (:func:`~components.rollout.intervals.difference_interval`; null for a single
        task), ``p`` of the paired sign-flip test, two-sided, and ``num_differ``, the tasks whose
        mean differs: where it is 0, the interval says no more than that. ``tasks``: by
        ``domain/id`` [first, second] official mean of the tasks on which these differ.
        ``settings``: what differs, [first, second].

    Raises:
        ValueError: not eval.json of this version, or not of the same tasks.
    """
    means = [_task_means(result, f"eval.json {i}") for i, result in enumerate((first, second), 1)]
    only = [sorted(map("/".join, a.keys() - b.keys())) for a, b in (means, means[::-1])]
    if any(only):
        raise ValueError(
            f"the evaluations are of different tasks: only in the first {only[0][:10]}, "
            f"only in the second {only[1][:10]}"
        )
    pairs = [(means[0][task], means[1][task]) for task in means[0]]
    changed = {
        "/".join(task): [means[0][task][0], means[1][task][0]]
        for task in means[0]
        if means[0][task][0] != means[1][task][0]
    }
    names = [name for name in first["metrics"] if name in second["metrics"]]
    values = {name: (first["metrics"][name], second["metrics"][name]) for name in names}
    return {
        "num_tasks": len(pairs),
        "official": _paired([b[0] - a[0] for a, b in pairs]),
        "strict": _paired([b[1] - a[1] for a, b in pairs]),
        "metrics": {name: [a, b, b - a] for name, (a, b) in values.items()},
        "tasks": changed,
        "settings": _differences(first.get("settings", {}), second.get("settings", {})),
    }


def _task_means(
    result: Mapping[str, Any], where: str
) -> dict[tuple[str, str], tuple[float, float]]:
    """Mean official and strict reward by (domain, task id)."""
    try:
        rows = {
            (row["domain"], row["task_id"]): (fmean(row["official"]), fmean(row["strict"]))
            for row in result["tasks"]
        }
        if rows and result["metrics"]:
            return rows
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: not written by eval_agentic, or by one before rows had a domain: {error!r}"
        ) from None
    raise ValueError(f"{where}: holds no task")


def _paired(differences: Sequence[float]) -> dict[str, float | None]:
    """Mean of paired differences, its interval, its test, and how many differ from 0."""
    low, high = difference_interval([differences]) if len(differences) > 1 else (None, None)
    return {
        "difference": fmean(differences),
        "low": low,
        "high": high,
        "p": sign_flip_test(differences),
        "num_differ": sum(difference != 0 for difference in differences),
    }


def _differences(first: Any, second: Any, path: str = "") -> dict[str, list[Any]]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        found: dict[str, list[Any]] = {}
        for key in dict.fromkeys([*first, *second]):
            inner = f"{path}.{key}" if path else str(key)
            found |= _differences(first.get(key), second.get(key), inner)
        return found
    return {} if first == second else {path: [first, second]}
