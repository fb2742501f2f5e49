"""What tau2-bench ships, parsed once per process: tasks, splits, policies, databases.

Building an official environment re-reads its JSON (0.1 s for retail, 0.4 s for airline); here each
environment starts from one parsed database and copies a record when it is first looked at.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.envs.base import ToolSpec
from components.envs.tau2_records import base_database, class_state, fresh_database

SPLITS = ("train", "test", "all")


@functools.cache
def load_tau2() -> Any:
    """Import tau2 quietly and offline.

    Returns:
        tau2's registry.
    """
    # litellm fetches a price list at import unless told not to, and both packages log at INFO.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from loguru import logger

    logger.disable("tau2")
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)
    # Tools store what the agent sends without validation; pydantic then warns at each dump.
    warnings.filterwarnings("ignore", message="Pydantic serializer warnings")
    from tau2.registry import registry

    return registry


@dataclass(frozen=True, kw_only=True)
class DomainData:
    """One domain, parsed."""

    name: str
    system_prompt: str
    """What the official agent is told: instructions and policy."""
    tools: tuple[ToolSpec, ...]
    user_tools: tuple[ToolSpec, ...]
    """Tools of the user, where it has some (telecom)."""
    tool_types: Mapping[str, str]
    """``read``, ``write``, ``generic`` or ``think`` for each tool of the agent."""
    user_tool_types: Mapping[str, str]
    tasks: Mapping[str, Any]
    """The official tasks by id, in the benchmark's order."""
    splits: Mapping[str, tuple[str, ...]]
    """Official task ids of ``train``, ``test`` and ``all``."""
    build: Callable[..., Any]
    """Makes a fresh environment, as the official constructor does."""
    cached_name: str
    """Name under which tau2's registry, hence its evaluator, finds ``build``."""
    has_solo: bool
    """Whether the domain can be played without a user, from a ticket."""


@functools.cache
def domain_data(domain: str) -> DomainData:
    """Parse a domain once per process.

    Raises:
        ValueError: for a domain that tau2 does not have.
    """
    registry = load_tau2()
    names = [name for name in registry.get_domains() if not name.startswith("sinkflex:")]
    if domain not in names:
        raise ValueError(f"domain: {domain!r} is unknown{_suggest(domain, names)}")
    from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT

    constructor = registry.get_env_constructor(domain)
    first = constructor()
    build = _builder(constructor, first)
    cached_name = f"sinkflex:{domain}"
    registry.register_domain(build, cached_name)
    tools, tool_types = _toolkit(first.tools)
    user_tools, user_tool_types = _toolkit(first.user_tools)
    tasks = {task.id: task for task in registry.get_tasks_loader(domain)()}
    return DomainData(
        name=domain,
        system_prompt=SYSTEM_PROMPT.format(
            agent_instruction=AGENT_INSTRUCTION, domain_policy=first.get_policy()
        ),
        tools=tools,
        user_tools=user_tools,
        tool_types=tool_types,
        user_tool_types=user_tool_types,
        tasks=tasks,
        splits=_splits(registry, domain, tasks),
        build=build,
        cached_name=cached_name,
        has_solo=_has_solo(build),
    )


def _builder(constructor: Any, first: Any) -> Callable[..., Any]:
    """What makes environments equal to ``constructor()`` from the databases of the first one."""
    accepted = inspect.signature(constructor).parameters
    bases = {"db": base_database(first.tools.db)}
    if first.user_tools is not None:
        bases["user_db"] = base_database(first.user_tools.db)
    bases = {key: base for key, base in bases.items() if key in accepted}
    kept = {name: class_state(getattr(first, name)) for name in ("tools", "user_tools")}

    def copies() -> dict[str, Any]:
        return {key: fresh_database(base) for key, base in bases.items()}

    @functools.cache
    def solo_policy() -> str:
        return constructor(solo_mode=True, **copies()).get_policy()

    def build(solo_mode: bool = False) -> Any:
        environment = constructor(**copies())
        if solo_mode:
            # What the constructor does, less 40 ms: it looks for tool names that both sides have,
            # for which it describes every tool.
            environment.policy = solo_policy()
            environment.solo_mode = True
        for toolkit, values in kept.items():
            for name, value in values.items():
                setattr(getattr(environment, toolkit), name, value.model_copy(deep=True))
        return environment

    return build


def _has_solo(build: Callable[..., Any]) -> bool:
    try:
        build(solo_mode=True)
    except ValueError:  # what retail and airline say
        return False
    return True


def _toolkit(toolkit: Any) -> tuple[tuple[ToolSpec, ...], dict[str, str]]:
    """Tools of one side, and their types by name."""
    if toolkit is None:
        return (), {}
    tools = tuple(tool_spec(tool) for tool in toolkit.get_tools().values())
    return tools, {tool.name: toolkit.tool_type(tool.name).value for tool in tools}


def tool_spec(tool: Any) -> ToolSpec:
    """One of tau2's tools, as the agent is told of it."""
    schema = tool.openai_schema["function"]
    return ToolSpec(
        name=schema["name"], description=schema["description"], parameters=schema["parameters"]
    )


def _splits(registry: Any, domain: str, tasks: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    loader = registry.get_task_splits_loader(domain)
    if loader is None:  # mock: nine tasks without a split are for evaluation only
        return {"train": (), "test": tuple(tasks), "all": tuple(tasks)}
    official = loader()
    splits = {split: tuple(official[split]) for split in ("train", "test")}
    splits["all"] = tuple(official.get("base", tasks))
    return splits


def _suggest(word: str, allowed: Sequence[str]) -> str:
    """The end of an error message: did-you-mean and what is allowed."""
    close = difflib.get_close_matches(str(word), allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    shown = ", ".join(allowed[:20]) + (", ..." if len(allowed) > 20 else "")
    return f"{hint} (allowed: {shown})"


def parse_tasks_setting(domain: str, tasks: str) -> tuple[str, int, int] | None:
    """Read the ``tasks`` setting.

    Returns:
        None for ``"official"``, (kind, seed, count) for ``"<kind>:<seed>:<count>"``.

    Raises:
        ValueError: for anything else, or for generated tasks of a domain but mock.
    """
    if tasks == "official":
        return None
    from components.envs.mock_tasks import KINDS

    kind, *numbers = str(tasks).split(":")
    if kind not in KINDS or len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
        hint = "" if kind in KINDS else _suggest(kind, ("official", *KINDS))
        raise ValueError(
            f"tasks: {tasks!r} is neither 'official' nor '<kind>:<seed>:<count>' with a kind of "
            f"generated tasks ({', '.join(KINDS)}) and two whole numbers{hint}"
        )
    if domain != "mock":
        raise ValueError(f"tasks: {tasks!r} needs domain 'mock', got domain {domain!r}")
    seed, count = int(numbers[0]), int(numbers[1])
    if count < 1:
        raise ValueError(f"tasks: {tasks!r} asks for no task; the count must be at least 1")
    return kind, seed, count


def task_ids(domain: str, split: str, tasks: str = "official") -> tuple[str, ...]:
    """Ids of a split.

    Args:
        domain: ``"retail"``, ``"airline"``, ``"telecom"``, ``"mock"``...
        split: ``"train"``, ``"test"`` or ``"all"``.
        tasks: ``"official"``, or ``"<kind>:<seed>:<count>"`` (mock; kinds in
            :data:`components.envs.mock_tasks.KINDS`): the training tasks are then generated ones,
            and the test tasks still the benchmark's. Of a held-out kind it is the test tasks that
            are generated, and there is nothing to train on.

    Raises:
        ValueError: for an unknown domain or split, or one without tasks.
    """
    data = domain_data(domain)
    generated = parse_tasks_setting(domain, tasks)
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is unknown{_suggest(split, SPLITS)}")
    ids = data.splits[split]
    if generated is not None:
        from components.envs.mock_tasks import KINDS, generated_ids

        kind, seed, count = generated
        made = generated_ids(seed, count, kind=kind)
        if KINDS[kind].held_out:
            ids = {"train": (), "test": made, "all": (*made, *ids)}[split]
        elif split != "test":
            ids = (*made, *ids)
    if not ids:
        found = "no official" if generated is None else f"with tasks {tasks!r} no"
        raise ValueError(
            f"split: {domain} has {found} {split!r} tasks; "
            "set tasks to 'generated:<seed>:<count>', e.g. 'generated:0:64'"
        )
    return ids


@functools.lru_cache(maxsize=4096)
def find_task(domain: str, task_id: str) -> Any:
    """The tau2 ``Task`` of an id, official or generated. Shared: do not change it.

    Raises:
        ValueError: for an id that the domain does not have.
    """
    data = domain_data(domain)
    if task_id in data.tasks:
        return data.tasks[task_id]
    if domain == "mock":
        from components.envs.mock_tasks import generated_task, kind_of

        if kind_of(task_id):
            return generated_task(task_id)
    raise ValueError(
        f"task_id: {task_id!r} is not a task of {domain}{_suggest(task_id, list(data.tasks))}"
    )


def split_of(domain: str, task_id: str) -> str:
    """``"train"``, ``"test"`` or, for neither, ``"all"``."""
    splits = domain_data(domain).splits
    if task_id not in domain_data(domain).tasks:
        from components.envs.mock_tasks import kind_of

        kind = kind_of(task_id)
        return "test" if kind and kind.held_out else "train"
    return next((split for split in ("train", "test") if task_id in splits[split]), "all")


def preload(*domains: str) -> None:
    """Import tau2 and parse some domains, e.g. in a fork server before its workers start."""
    load_tau2()
    for domain in domains:
        domain_data(domain)
