"""Two evaluations of the same tasks, side by side: the difference, task by task, and its interval.

For one checkpoint under two sets of paraphrases this is a measure of how far it was fitted to the
simulated user that it trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from components.rollout.intervals import bootstrap, sign_flip_test


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the contents of two eval.json files.

    Args:
        first: e.g. with the paraphrases of the training.
        second: e.g. with those that were held out; the same tasks.

    Returns:
        ``metrics``: name to [first, second, difference]. ``official`` and ``strict``: the mean over
        tasks of the second's mean reward less the first's, ``low`` and ``high`` of its 95 %
        interval (bootstrap over tasks, seeded; null for a single task) and ``p`` of the paired
        sign-flip test, two-sided. ``tasks``: [first, second] official mean of the tasks on which
        these differ. ``settings``: what differs, [first, second].

    Raises:
        ValueError: not eval.json of this version, or not of the same tasks.
    """
    means = [_task_means(result, f"eval.json {i}") for i, result in enumerate((first, second), 1)]
    only = [sorted(a.keys() - b.keys()) for a, b in (means, means[::-1])]
    if any(only):
        raise ValueError(
            f"the evaluations are of different tasks: only in the first {only[0][:10]}, "
            f"only in the second {only[1][:10]}"
        )
    pairs = [(means[0][task_id], means[1][task_id]) for task_id in means[0]]
    changed = {
        task_id: [means[0][task_id][0], means[1][task_id][0]]
        for task_id in means[0]
        if means[0][task_id][0] != means[1][task_id][0]
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


def _task_means(result: Mapping[str, Any], where: str) -> dict[str, tuple[float, float]]:
    """Mean official and strict reward by task."""
    try:
        rows = {
            row["task_id"]: (fmean(row["official"]), fmean(row["strict"]))
            for row in result["tasks"]
        }
        if rows and result["metrics"]:
            return rows
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: not written by eval_agentic: {error!r}") from None
    raise ValueError(f"{where}: holds no task")


def _paired(differences: Sequence[float]) -> dict[str, float | None]:
    """Mean of paired differences, its interval and its test."""
    low, high = bootstrap(differences) if len(differences) > 1 else (None, None)
    p = sign_flip_test(differences)
    return {"difference": fmean(differences), "low": low, "high": high, "p": p}


def _differences(first: Any, second: Any, path: str = "") -> dict[str, list[Any]]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        found: dict[str, list[Any]] = {}
        for key in dict.fromkeys([*first, *second]):
            inner = f"{path}.{key}" if path else str(key)
            found |= _differences(first.get(key), second.get(key), inner)
        return found
    return {} if first == second else {path: [first, second]}
