"""Sections of a config that several recipes share, and checks across their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.training.optimizers import OptimizerComponent
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
    "reply_delay": Int(min=0, default=0),
}
"""The limits of a rollout and the workers that play it; see ``worker_pool``."""

TRAINED_ROLLOUT = {
    "group_size": Int(min=1),
    "temperature": Float(gt=0),
    "max_staleness": Int(min=0, default=0),
    **ROLLOUT,
}
"""Those that are trained on; see ``Batches``."""

OPTIMIZER = OptimizerComponent()
"""Called with the fp32 weights."""

WARM_START = {
    "num_steps": Int(min=0),
    "num_demonstrations": Int(min=1),
    "demonstrations_per_step": Int(min=1),
    "max_tokens": Int(min=1),
    "oracle": Component(positional=1),
    "optimizer": OPTIMIZER,
    "use_cache": Bool(default=True),
}
"""Supervised steps on demonstrations; see ``warm_start``."""

DEMONSTRATIONS = {
    "path": Str(),
    "oracle": Component(positional=1),
    "per_task": Int(min=1, default=1),
}
"""A directory of demonstrations and how it is made; see ``demonstration_file``."""

DEMONSTRATED = {
    "seed": Int(min=0),
    "model_dir": Str(),
    "renderer": Component(provided=("tokenizer_dir",)),
    "env": Component(),
    "dataset": Component(),
    "demonstrations": DEMONSTRATIONS,
    "rollout": ROLLOUT,
}
"""What of a config demonstrations are made with."""

UPDATE = {
    "dynamic_sampling": {"max_refills": Int(min=0, default=0)},
    "advantages": {
        "normalize_std": Bool(),
        "leave_one_out": Bool(default=False),
        "baseline": OneOf("group", "none", default="group"),
        "eps": Float(min=0, default=1e-6),
        "num_trained": Int(min=2, default=None),
    },
    "mask_overlong": Bool(default=False),
    "loss": Component(),
    "aggregation": {
        "over": OneOf("token", "sequence", "constant", default="token"),
        "divisor": Float(gt=0, default=None),
    },
    "ratio": OneOf("proximal", "generator", default="proximal"),
    "importance": {
        "level": OneOf("token", "sequence", default="token"),
        "cap": Float(min=1, default=None),
        "mask_below": Float(gt=0, lt=1, default=None),
        "mask_above": Float(gt=1, default=None),
    },
    "entropy_bonus": Float(min=0, default=0.0),
    "updates_per_batch": Int(min=1, default=1),
    "probe_noise": Bool(default=False),
}
"""From the rollouts of a step to its gradient; see ``trained_items`` and ``Objective``."""

_LIMIT = OneOf("stop", "skip", "warn")

TRAINER = {
    "compile": OneOf("auto", True, False, default="auto"),
    "sharding": {"shard_size": Int(min=1, default=None), "cpu_offload": Bool(default=False)},
    "reference": {"offload": Bool(default=False), "reset_every": Int(min=1, default=None)},
    "guards": {
        "non_finite": OneOf("stop", "skip", default="stop"),
        "max_skips": Int(min=0, default=10),
        "grad_spike": Section(
            {"factor": Float(gt=1), "window": Int(min=2), "action": _LIMIT}, default=None
        ),
        "entropy_collapse": Section({"below": Float(gt=0), "action": _LIMIT}, default=None),
        "mismatch": Section({"above": Float(gt=0), "action": _LIMIT}, default=None),
        "flat_reward": Section(
            {
                "steps": Int(min=2),
                "tolerance": Float(min=0, default=0.0),
                "action": OneOf("stop", "warn"),
            },
            default=None,
        ),
    },
}
"""How the model is run and watched; see ``build_policy``, ``ReferencePolicy`` and ``Guards``."""

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


def at(cfg: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: Any = cfg
    for key in path.split("."):
        value = None if value is None else value.get(key)
    return value


def at_most(cfg: Mapping[str, Any], key: str, limit: str) -> list[str]:
    """The problem of one numeric setting being above another, if it is."""
    value, bound = at(cfg, key), at(cfg, limit)
    return [f"{key} = {value}: must be at most {limit} = {bound}"] if value > bound else []


def check_context(cfg: Mapping[str, Any], limit: int) -> None:
    """Raise for tokens beyond the model's positions.

    Args:
        cfg: a config.
        limit: positions of the model.

    Raises:
        ValueError: naming the setting.
    """
    for setting in ("rollout.max_tokens", "warm_start.max_tokens"):
        if (value := at(cfg, setting)) > limit:
            raise ValueError(f"{setting} = {value}: the model's context is {limit}")


def _leaves(node: Mapping[str, Any], path: str, inside: str) -> dict[str, Mapping[str, Any]]:
    """The components that a component is made of, by path; itself where it is made of none.

    Args:
        node: of a dataset or an environment.
        path: its key.
        inside: its argument that holds others by name: ``datasets`` or ``envs``.
    """
    if not isinstance(parts := node.get(inside), Mapping):
        return {path: node}
    found: dict[str, Mapping[str, Any]] = {}
    for name, part in parts.items():
        if isinstance(part, Mapping):
            found |= _leaves(part, f"{path}.{inside}.{name}", inside)
    return found


def train_split(cfg: Mapping[str, Any]) -> list[str]:
    """The problems of training on what is held out: another split (unless the recipe has a setting
    for it that asks for it), and the paraphrases that only evaluation uses."""
    problems = [
        f"{path}.paraphrases = held_out: these are for evaluation alone and never trained on"
        for path, env in _leaves(cfg["env"], "env", "envs").items()
        if env.get("paraphrases") == "held_out"
    ]
    if (asked := cfg.get("train_on_any_split")) is True:
        return problems
    for path, dataset in _leaves(cfg["dataset"], "dataset", "datasets").items():
        split = dataset.get("split", "train")
        if split != "train":
            problems.append(
                f"{path}.split = {split}: training is on the train split"
                + ("" if asked is None else "; train_on_any_split=true allows another")
            )
    return problems


def whole_distribution(cfg: Mapping[str, Any]) -> list[str]:
    """The problems of training on tokens from a truncated distribution.

    The trainer's log-probabilities know the temperature alone: against those of the renormalised
    distribution that top_p or top_k leaves, every ratio would be off (tokens with p = .5 .3 .2 and
    top_p = .75: the first is sampled with .625).
    """
    engine = cfg["engine"]
    return [
        f"engine.{key} = {engine[key]}: training samples from the whole distribution; "
        "it is for evaluation (recipes/eval_agentic.py)"
        for key, neutral in (("top_p", 1), ("top_k", None))
        if key in engine and engine[key] != neutral
    ]


def demonstrated(cfg: Mapping[str, Any]) -> list[str]:
    """The problems of what demonstrations are made of."""
    return train_split(cfg) + same_tasks(cfg, "dataset")


def same_tasks(cfg: Mapping[str, Any], dataset: str) -> list[str]:
    """The problems of a dataset that draws tasks which the environment does not have.

    Args:
        cfg: a config with ``env`` and perhaps that dataset.
        dataset: key of the dataset's component.
    """
    if (node := at(cfg, dataset)) is None:
        return []
    problems = []
    for path, part in _leaves(node, dataset, "datasets").items():
        env, env_path = cfg["env"], "env"
        if isinstance(by_domain := env.get("envs"), Mapping) and "domain" in part:
            if part["domain"] not in by_domain:
                problems.append(
                    f"{path}.domain = {part['domain']}: must be one of env.envs: "
                    f"{', '.join(map(str, by_domain))}"
                )
                continue
            env, env_path = by_domain[part["domain"]], f"env.envs.{part['domain']}"
        for key in ("domain", "tasks"):
            wanted = part.get(key)
            if wanted is not None and wanted != env.get(key, wanted):
                problems.append(f"{path}.{key} = {wanted}: must be {env_path}.{key} = {env[key]}")
    return problems


def best_metric(cfg: Mapping[str, Any]) -> list[str]:
    """The problem of keeping the best checkpoints by an evaluation that is not made."""
    metric = at(cfg, "checkpoints.keep_best.metric")
    if metric is None or not metric.startswith("eval/") or cfg["eval"] is not None:
        return []
    return [f"checkpoints.keep_best.metric = {metric}: needs an evaluation, and eval is null"]
