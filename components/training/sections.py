"""Sections of a config that several recipes share, and checks across their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.training.schema import Bool, Component, Float, Int, ListOf, OneOf, Section, Str

ROLLOUT = {
    "max_turns": Int(min=1),
    "max_turn_tokens": Int(min=1),
    "max_tokens": Int(min=1),
    "max_refused": Int(min=0),
    "num_workers": Int(min=1),
    "env_timeout_s": Float(gt=0),
    "preload": ListOf(Str(), default=[]),
    "worker_memory_mib": Int(min=1, default=None),
}
"""The limits of a rollout and the workers that play it; see ``worker_pool``."""

WARM_START = {
    "num_steps": Int(min=0),
    "num_demonstrations": Int(min=1),
    "demonstrations_per_step": Int(min=1),
    "max_tokens": Int(min=1),
    "oracle": Component(positional=1),
    "optimizer": Component(positional=1),
    "use_cache": Bool(default=True),
}
"""Supervised steps on demonstrations; see ``warm_start``."""

EVALUATION = {
    "dataset": Component(),
    "before": Bool(default=False),
    "every": Int(min=1),
    "num_trials": Int(min=1),
    "temperature": Float(min=0),
}
"""Held-out tasks during training."""

CHECKPOINTS = {
    "keep_last": Int(min=0, default=1),
    "keep_best": Section(
        {
            "metric": Str(),
            "mode": OneOf("max", "min", default="max"),
            "num": Int(min=1, default=1),
        },
        default=None,
    ),
    "exports": OneOf("all", "kept", default="all"),
    "export": OneOf("full", "adapter", default="full"),
    "in_background": Bool(default=False),
}
"""What checkpoints hold, how they are written and which are kept; see ``Checkpoints``."""


def _at(cfg: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: Any = cfg
    for key in path.split("."):
        value = None if value is None else value.get(key)
    return value


def at_most(cfg: Mapping[str, Any], key: str, limit: str) -> list[str]:
    """The problem of one numeric setting being above another, if it is."""
    value, bound = _at(cfg, key), _at(cfg, limit)
    return [f"{key} = {value}: must be at most {limit} = {bound}"] if value > bound else []


def train_split(cfg: Mapping[str, Any]) -> list[str]:
    """The problems of training on what is held out: another split (unless it is asked for), and the
    paraphrases that only evaluation uses."""
    problems = []
    if cfg["env"].get("paraphrases") == "held_out":
        problems.append(
            "env.paraphrases = held_out: these are for evaluation alone and never trained on"
        )
    split = cfg["dataset"].get("split", "train")
    if split == "train" or cfg["train_on_any_split"]:
        return problems
    return [
        *problems,
        f"dataset.split = {split}: training is on the train split; "
        "train_on_any_split=true allows another",
    ]


def same_tasks(cfg: Mapping[str, Any], dataset: str) -> list[str]:
    """The problems of a dataset that draws tasks which the environment does not have.

    Args:
        cfg: a config with ``env`` and perhaps that dataset.
        dataset: key of the dataset's component.
    """
    problems = []
    for key in ("domain", "tasks"):
        wanted = _at(cfg, f"{dataset}.{key}")
        if wanted is not None and wanted != cfg["env"].get(key, wanted):
            problems.append(f"{dataset}.{key} = {wanted}: must be env.{key} = {cfg['env'][key]}")
    return problems


def best_metric(cfg: Mapping[str, Any]) -> list[str]:
    """The problem of keeping the best checkpoints by an evaluation that is not made."""
    metric = _at(cfg, "checkpoints.keep_best.metric")
    if metric is None or not metric.startswith("eval/") or cfg["eval"] is not None:
        return []
    return [f"checkpoints.keep_best.metric = {metric}: needs an evaluation, and eval is null"]
