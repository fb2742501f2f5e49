"""Solo mode of tau2-bench: no user; the agent works a ticket with the tools of both sides."""

from __future__ import annotations

import functools
from typing import Any

from components.envs import tau2_players
from components.envs.base import ToolSpec
from components.envs.tau2_data import domain_data, find_task, load_tau2, tool_spec


def require_solo(
    domain: str, *, user: Any = "scripted", tasks: str = "official", task_id: str | None = None
) -> None:
    """Check that something can be played solo.

    Raises:
        ValueError: for a domain or a task without solo mode, for generated tasks, and for a user.
    """
    if not domain_data(domain).has_solo:
        names = [name for name in ("telecom", "mock") if domain_data(name).has_solo]
        raise ValueError(f"solo: {domain} has no solo mode (allowed: {', '.join(names)})")
    if tasks != "official":
        raise ValueError(f"tasks: {tasks!r} cannot be played solo: generated tasks have no ticket")
    if user != "scripted":
        raise ValueError("user: there is no user in solo mode; leave the setting out")
    if task_id is not None and task_id not in solo_ids(domain):
        shown = ", ".join(solo_ids(domain)[:20])
        raise ValueError(f"task_id: {task_id!r} cannot be played solo (allowed: {shown})")


@functools.cache
def solo_ids(domain: str) -> tuple[str, ...]:
    """Ids of the official tasks that the official solo agent takes."""
    load_tau2()
    tasks = domain_data(domain).tasks
    return tuple(id_ for id_ in tasks if tau2_players.plays_solo(find_task(domain, id_)))


@functools.cache
def solo_tools(domain: str) -> tuple[ToolSpec, ...]:
    """Tools of the agent, of the user, and ``done``."""
    data = domain_data(domain)
    done = tuple(tool_spec(tool) for tool in tau2_players.solo_tools())
    return (*data.tools, *data.user_tools, *done)
