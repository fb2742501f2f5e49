"""A directory of demonstrations: ``rollouts.jsonl`` as a run writes it, and how they were made.

``demonstrations.json`` holds what the tokens depend on (environment, chat format, tokenizer), so
that a run does not train on prompts that it will never see again.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.data.demonstrations import Demonstrations
from components.disk import flush, remove_tree, write_text
from components.envs.base import Task
from components.rollout.recorder import Recorder, read_rollouts
from components.rollout.types import Rollout

SCHEMA = 1


def made_with(settings: Mapping[str, Any], *, model_dir: Path) -> dict[str, Any]:
    """What the tokens of demonstrations depend on, as JSON-able values.

    Args:
        settings: a whole config, plain; of it ``env`` (its checker apart) and ``renderer``.
        model_dir: whose ``tokenizer.json`` is used.
    """
    env = {key: value for key, value in settings["env"].items() if key != "checker"}
    tokenizer = hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest()
    return json.loads(
        json.dumps({"env": env, "renderer": settings["renderer"], "tokenizer": tokenizer})
    )


def check_folder(folder: str | Path) -> Path:
    """Where demonstrations can be written: a directory that is not there yet, or is empty.

    Raises:
        ValueError: if something is there.
    """
    path = Path(folder).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"demonstrations.path: {path} exists and is not an empty directory; delete it, or give "
            "another demonstrations.path"
        )
    return path


def write_demonstrations(
    folder: str | Path,
    made: Demonstrations,
    *,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> Path:
    """Write a directory of demonstrations, whole or not at all.

    Args:
        folder: must not exist, or be empty.
        made: what came of playing them.
        settings: of :func:`made_with`.
        facts: more to remember: seed, oracle...

    Returns:
        The directory, absolute.

    Raises:
        ValueError: if nothing was demonstrated, or something is there.
    """
    path = check_folder(folder)
    dropped = {why: list(ids) for why, ids in made.dropped.items()}
    if not made.rollouts:
        raise ValueError(f"not one demonstration succeeded: {dropped}")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        with Recorder(temporary / "rollouts.jsonl", full_tokens=True) as recorder:
            recorder.write(0, made.rollouts)
        flush(temporary / "rollouts.jsonl")
        manifest = {
            "schema": SCHEMA,
            "num_demonstrations": len(made.rollouts),
            "made_with": settings,
            "dropped": dropped,
            **facts,
        }
        write_text(temporary / "demonstrations.json", json.dumps(manifest, indent=2) + "\n")
        temporary.replace(path)
    except BaseException:
        remove_tree(temporary)
        raise
    return path


def read_demonstrations(
    folder: str | Path, *, tasks: Iterable[Task], settings: Mapping[str, Any]
) -> list[Rollout]:
    """The demonstrations of a directory, each checked.

    Args:
        folder: written by :func:`write_demonstrations`.
        tasks: the training tasks; a demonstration of another one is refused.
        settings: of :func:`made_with`, now.

    Raises:
        ValueError: no demonstrations there, or made with other settings, damaged, of a task that is
            not trained on, or without the full official reward.
    """
    path = Path(folder).expanduser().absolute()
    where = f"demonstrations.path: {path}"
    try:
        manifest = json.loads((path / "demonstrations.json").read_text(encoding="utf-8"))
        number, made = manifest["num_demonstrations"], manifest["made_with"]
        schema = manifest["schema"]
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{where} holds no demonstrations; python tools/make_demonstrations.py with the same "
            "--config makes them"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: demonstrations.json is damaged: {error!r}") from None
    if schema != SCHEMA:
        raise ValueError(f"{where}: schema {schema!r}, this version reads {SCHEMA}")
    if changed := _changed(made, settings):
        raise ValueError(
            f"{where} was made with other settings, so its tokens are not what this run's policy "
            f"will see: {'; '.join(changed)}"
        )
    rollouts = [record.rollout for record in read_rollouts(path / "rollouts.jsonl")]
    if len(rollouts) != number:
        raise ValueError(f"{where}: rollouts.jsonl holds {len(rollouts)} of {number} rollouts")
    known = {(task.domain, task.id) for task in tasks}
    for rollout in rollouts:
        _check(rollout, known, where)
    return rollouts


def _check(rollout: Rollout, known: set[tuple[str, str]], where: str) -> None:
    spec = rollout.spec
    if (spec.domain, spec.task_id) not in known:
        raise ValueError(
            f"{where}: task {spec.domain}/{spec.task_id} is not among the training tasks of "
            "dataset; make the demonstrations of these tasks"
        )
    if rollout.reward_breakdown.get("official") != 1.0:
        raise ValueError(
            f"{where}: {spec.rollout_id} has official reward "
            f"{rollout.reward_breakdown.get('official')}: not a demonstration"
        )
    if not any(rollout.tokens.loss_mask):
        raise ValueError(f"{where}: {spec.rollout_id} was written without its tokens")


def _changed(before: Any, now: Any, path: str = "") -> list[str]:
    """What differs, one sentence each."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        found = []
        for key in dict.fromkeys([*before, *now]):
            inner = f"{path}.{key}" if path else str(key)
            found += _changed(before.get(key), now.get(key), inner)
        return found
    return [] if before == now else [f"{path} was {before}, is {now}"]


def split_by_task(
    rollouts: Sequence[Rollout], *, held_out_frac: float, seed: int
) -> tuple[list[Rollout], list[Rollout]]:
    """Demonstrations to train on, and those of held-out tasks, which are never trained on.

    Args:
        rollouts: in any order; theirs is kept.
        held_out_frac: share of the tasks, at least one of them unless it is 0.
        seed: of the choice.

    Returns:
        (trained, held out).

    Raises:
        ValueError: if no task is left to train on.
    """
    tasks = sorted({(r.spec.domain, r.spec.task_id) for r in rollouts})
    number = max(1, round(held_out_frac * len(tasks))) if held_out_frac > 0 else 0
    if number >= len(tasks):
        raise ValueError(
            f"held_out_frac = {held_out_frac}: of {len(tasks)} demonstrated tasks none is left to "
            "train on"
        )
    out = set(random.Random(f"{seed}/held_out_demonstrations").sample(tasks, number))
    apart: tuple[list[Rollout], list[Rollout]] = ([], [])
    for rollout in rollouts:
        apart[(rollout.spec.domain, rollout.spec.task_id) in out].append(rollout)
    return apart
