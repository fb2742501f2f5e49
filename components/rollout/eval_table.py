"""An evaluation by task: what is written to eval.json and printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from components.console import table_console
from components.envs.baselines import AGENTS, baselines
from components.rollout.evaluation import by_task, official_reward, strict_reward
from components.rollout.types import Rollout


def task_rows(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """One JSON-able row per task, the agents that do not try beside the rewards.

    ``official``, ``strict``, ``status`` and ``tool_calls`` are lists over the trials;
    ``do_nothing``, ``transfer`` and the same with ``_strict`` are null outside tau2-bench.
    """
    rows = []
    for (domain, task_id), group in by_task(rollouts).items():
        free = baselines(domain, task_id)
        row: dict[str, Any] = {
            "domain": domain,
            "task_id": task_id,
            "official": [official_reward(r) for r in group],
            "strict": [strict_reward(r) for r in group],
        }
        for agent in AGENTS:
            row[agent] = free.get(agent, {}).get("official")
            row[f"{agent}_strict"] = free.get(agent, {}).get("strict")
        row["status"] = [r.status for r in group]
        row["tool_calls"] = [r.stats.get("tool_calls", 0) for r in group]
        rows.append(row)
    return rows


def print_evaluation(
    rows: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float],
    intervals: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    """A line per task (mean rewards, the agents that do not try, how it ended), then the means.

    A task is named with its domain where there are several.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for column in ("task", "official", "strict", "do-nothing", "transfer", "calls", "ended"):
        table.add_column(column, justify="left" if column in ("task", "ended") else "right")
    several = len({row["domain"] for row in rows}) > 1
    for row in rows:
        number = len(row["official"])
        ends = {status: row["status"].count(status) for status in dict.fromkeys(row["status"])}
        table.add_row(
            escape(f"{row['domain']}/{row['task_id']}" if several else row["task_id"]),
            f"{sum(row['official']) / number:.2f}",
            f"{sum(row['strict']) / number:.2f}",
            *("-" if row[agent] is None else f"{row[agent]:.2f}" for agent in AGENTS),
            f"{sum(row['tool_calls']) / number:.1f}",
            ", ".join(f"{status} {n}" for status, n in ends.items()),
        )
    table_console().print(table)
    for name, value in metrics.items():
        low_high = intervals.get(name)
        shown = "" if low_high is None else f"  95 % [{low_high[0]:.3f}, {low_high[1]:.3f}]"
        print(f"{name:<28} {value:.3f}{shown}")
