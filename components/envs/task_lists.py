"""Named lists of official tasks, for ``dataset.exclude`` and ``dataset.include``.

What is in them and why stands in task_lists.json beside this file.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@functools.cache
def task_lists() -> Mapping[str, Mapping[str, Any]]:
    """Every list by name: ``why``, ``source``, and ``tasks`` (domain -> ids)."""
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def resolve(
    wanted: str | Sequence[str | int], *, setting: str, where: str, ids: Sequence[str]
) -> list[str]:
    """The task ids that a setting names, the ids of named lists in place of the lists.

    Args:
        wanted: ids and names of lists, or one name alone. A task id wins over a list of its name.
        setting: for the message.
        where: ``domain/split``.
        ids: the tasks that there are. A list's ids outside them (of the other split) are left out.

    Raises:
        ValueError: for what is neither a task that there is nor a list of the domain.
    """
    domain, known = where.partition("/")[0], set(ids)
    found: list[str] = []
    unknown: list[str | int] = []
    for item in [wanted] if isinstance(wanted, str) else wanted:
        of_domain = task_lists().get(str(item), {}).get("tasks", {}).get(domain)
        if str(item) in known:
            found.append(str(item))
        elif of_domain is not None:
            found += [task_id for task_id in of_domain if task_id in known]
        else:
            unknown.append(item)
    if unknown:
        raise ValueError(_unknown(unknown, setting=setting, where=where, ids=ids))
    return list(dict.fromkeys(found))


def _unknown(items: Sequence[str | int], *, setting: str, where: str, ids: Sequence[str]) -> str:
    domain = where.partition("/")[0]
    names = [name for name, entry in task_lists().items() if domain in entry["tasks"]]
    close = difflib.get_close_matches(str(items[0]), [*names, *ids], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    lists = f"the lists {', '.join(names)}" if names else "no named lists"
    shown = ", ".join(ids[:20]) + ("..." if len(ids) > 20 else "")
    return (
        f"{setting}: task ids {list(items)} are not in {where}{hint} ({domain} has {lists}; "
        f"{where} has {len(ids)} tasks: {shown})"
    )
