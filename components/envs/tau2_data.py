"""What tau2-bench ships, parsed once per process: tasks, splits, policies, databases.

Building an official environment re-reads its JSON (0.1 s for retail, 0.4 s for airline); here each
environment starts from one parsed database and copies a record when it is first looked at.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import logging
import os
import warnings
from collections.abc import Callable, ItemsView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import Any

from components.envs.base import ToolSpec

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


class SharedRecords(dict):
    """Records of a database, shared with a base until looked at: then a copy of our own.

    Writes to a record never reach the base. pydantic dumps the dict's own storage, so a dump (and
    the official hash) sees base records and copies alike.
    """

    def __init__(self, base: Mapping[str, Any]) -> None:
        super().__init__(base)
        self._own: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        record = super().__getitem__(key)
        if key not in self._own:
            record = record.model_copy(deep=True)
            self[key] = record
        return record

    def __setitem__(self, key: str, record: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, record)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def values(self) -> ValuesView:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView:  # type: ignore[override]
        return ItemsView(self)

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            record = self[key]
            del self[key]
            return record
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def popitem(self) -> Any:
        raise TypeError("SharedRecords has no popitem")


def _fresh_database(base: Any) -> Any:
    """A database equal to ``base`` whose changes stay its own."""
    from pydantic import BaseModel

    fresh = base.model_copy()
    for name, value in base.__dict__.items():
        if isinstance(value, dict) and all(isinstance(v, BaseModel) for v in value.values()):
            fresh.__dict__[name] = SharedRecords(value)
        else:
            fresh.__dict__[name] = copy.deepcopy(value)
    return fresh


@dataclass(frozen=True, kw_only=True)
class DomainData:
    """One domain, parsed."""

    name: str
    system_prompt: str
    """What the official agent is told: instructions and policy."""
    tools: tuple[ToolSpec, ...]
    tool_types: Mapping[str, str]
    """``read``, ``write``, ``generic`` or ``think`` for each tool of the agent."""
    tasks: Mapping[str, Any]
    """The official tasks by id, in the benchmark's order."""
    splits: Mapping[str, tuple[str, ...]]
    """Official task ids of ``train``, ``test`` and ``all``."""
    build: Callable[..., Any]
    """Makes a fresh environment, as the official constructor does."""
    cached_name: str
    """Name under which tau2's registry, hence its evaluator, finds ``build``."""


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
    bases = {"db": first.tools.db}
    if first.user_tools is not None:
        bases["user_db"] = first.user_tools.db
    accepted = inspect.signature(constructor).parameters
    bases = {key: base for key, base in bases.items() if key in accepted}

    def build(solo_mode: bool = False) -> Any:
        copies = {key: _fresh_database(base) for key, base in bases.items()}
        return constructor(solo_mode=solo_mode, **copies)

    cached_name = f"sinkflex:{domain}"
    registry.register_domain(build, cached_name)
    schemas = [tool.openai_schema["function"] for tool in first.get_tools()]
    tasks = {task.id: task for task in registry.get_tasks_loader(domain)()}
    return DomainData(
        name=domain,
        system_prompt=SYSTEM_PROMPT.format(
            agent_instruction=AGENT_INSTRUCTION, domain_policy=first.get_policy()
        ),
        tools=tuple(
            ToolSpec(name=s["name"], description=s["description"], parameters=s["parameters"])
            for s in schemas
        ),
        tool_types={s["name"]: first.tools.tool_type(s["name"]).value for s in schemas},
        tasks=tasks,
        splits=_splits(registry, domain, tasks),
        build=build,
        cached_name=cached_name,
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


def parse_tasks_setting(domain: str, tasks: str) -> tuple[int, int] | None:
    """Read the ``tasks`` setting.

    Returns:
        None for ``"official"``, (seed, count) for ``"generated:<seed>:<count>"``.

    Raises:
        ValueError: for anything else, or for generated tasks of a domain but mock.
    """
    if tasks == "official":
        return None
    kind, *numbers = str(tasks).split(":")
    if kind != "generated" or len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
        raise ValueError(
            f"tasks: {tasks!r} is neither 'official' nor 'generated:<seed>:<count>' "
            "with two whole numbers"
        )
    if domain != "mock":
        raise ValueError(f"tasks: {tasks!r} needs domain 'mock', got domain {domain!r}")
    seed, count = int(numbers[0]), int(numbers[1])
    if count < 1:
        raise ValueError(f"tasks: {tasks!r} asks for no task; the count must be at least 1")
    return seed, count


def task_ids(domain: str, split: str, tasks: str = "official") -> tuple[str, ...]:
    """Ids of a split.

    Args:
        domain: ``"retail"``, ``"airline"``, ``"telecom"``, ``"mock"``...
        split: ``"train"``, ``"test"`` or ``"all"``.
        tasks: ``"official"``, or ``"generated:<seed>:<count>"`` (mock): the training tasks are then
            generated ones, and the test tasks still the benchmark's.

    Raises:
        ValueError: for an unknown domain or split, or one without tasks.
    """
    data = domain_data(domain)
    generated = parse_tasks_setting(domain, tasks)
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is unknown{_suggest(split, SPLITS)}")
    ids = data.splits[split]
    if generated is not None and split != "test":
        from components.envs.mock_tasks import generated_ids

        ids = (*generated_ids(*generated), *ids)
    if not ids:
        raise ValueError(
            f"split: {domain} has no official {split!r} tasks; "
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
        from components.envs.mock_tasks import generated_task, is_generated_id

        if is_generated_id(task_id):
            return generated_task(task_id)
    raise ValueError(
        f"task_id: {task_id!r} is not a task of {domain}{_suggest(task_id, list(data.tasks))}"
    )


def split_of(domain: str, task_id: str) -> str:
    """``"train"``, ``"test"`` or, for neither, ``"all"``."""
    splits = domain_data(domain).splits
    if task_id not in domain_data(domain).tasks:
        return "train"
    return next((split for split in ("train", "test") if task_id in splits[split]), "all")


def preload(*domains: str) -> None:
    """Import tau2 and parse some domains, e.g. in a fork server before its workers start."""
    load_tau2()
    for domain in domains:
        domain_data(domain)
