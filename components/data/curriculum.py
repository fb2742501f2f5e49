"""The order in which a dataset's tasks are drawn: shuffled anew each epoch, in stages if asked for.

A draw is a function of (seed, number of the draw) alone, so there is nothing to keep but these two.
"""

from __future__ import annotations

import difflib
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEYS = ("include", "exclude", "draws")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Tasks that are drawn for a while."""

    task_ids: tuple[str, ...]
    draws: int | None
    """How many draws it lasts; None: for ever."""


@functools.lru_cache(maxsize=64)
def shuffled(num_items: int, seed: str) -> tuple[int, ...]:
    """A permutation of ``range(num_items)``."""
    order = list(range(num_items))
    random.Random(seed).shuffle(order)
    return tuple(order)


def shuffled_draw(num_items: int, number: int, *, seed: int | str) -> int:
    """What the ``number``-th draw of an endless shuffle gives: each epoch is a permutation."""
    epoch, place = divmod(number, num_items)
    return shuffled(num_items, f"{seed}/{epoch}")[place]


def staged_draw(stages: Sequence[Stage], number: int, *, seed: int | str) -> str:
    """The task of the ``number``-th draw where stages follow each other.

    Args:
        stages: the last one lasts for ever. Each has a shuffle of its own.
        number: from 0, counted from the start of the first stage.
        seed: of all shuffles.
    """
    for index, stage in enumerate(stages):
        if stage.draws is None or number < stage.draws:
            own = seed if len(stages) == 1 else f"{seed}/stage {index}"
            return stage.task_ids[shuffled_draw(len(stage.task_ids), number, seed=own)]
        number -= stage.draws
    raise AssertionError("the last stage lasts for ever")


def parse_stages(
    curriculum: Sequence[Mapping[str, Any]], ids: Sequence[str], *, where: str
) -> tuple[Stage, ...]:
    """The stages that the setting ``curriculum`` describes.

    Args:
        curriculum: mappings with ``include``, ``exclude`` (as the dataset's own, among its tasks)
            and ``draws``, which every stage but the last has.
        ids: the dataset's tasks.
        where: ``domain/split``.

    Raises:
        ValueError: naming the stage and what is wrong with it.
    """
    if not curriculum:
        raise ValueError("curriculum: it has no stages; leave it out or set null")
    stages = []
    for index, given in enumerate(curriculum):
        setting = f"curriculum[{index}]"
        _check_keys(given, setting)
        draws, is_last = given.get("draws"), index == len(curriculum) - 1
        if is_last and draws is not None:
            raise ValueError(f"{setting}.draws: {draws!r}: the last stage goes on for ever")
        if not is_last and not (type(draws) is int and draws >= 1):
            raise ValueError(
                f"{setting}.draws: {draws!r} must be an integer of at least 1; only the last stage "
                "has none"
            )
        task_ids = _task_ids(given, ids, setting=setting, where=where)
        stages.append(Stage(task_ids=task_ids, draws=draws))
    return tuple(stages)


def _check_keys(given: Any, setting: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{setting}: {given!r} must be a mapping with {', '.join(KEYS)}")
    for key in given:
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{setting}.{key}: a stage has {', '.join(KEYS)}{hint}")


def _task_ids(
    given: Mapping[str, Any], ids: Sequence[str], *, setting: str, where: str
) -> tuple[str, ...]:
    from components.envs.task_lists import resolve

    wanted = list(ids)
    if given.get("include") is not None:
        wanted = resolve(given["include"], setting=f"{setting}.include", where=where, ids=ids)
    dropped = resolve(
        given.get("exclude") or (), setting=f"{setting}.exclude", where=where, ids=ids
    )
    task_ids = tuple(task_id for task_id in wanted if task_id not in dropped)
    if not task_ids:
        raise ValueError(f"{setting}: none of the dataset's tasks of {where} is in this stage")
    return task_ids
