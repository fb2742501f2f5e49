"""Sections of a config that several recipes share."""

from __future__ import annotations

from components.training.schema import Bool, Component, Float, Int, ListOf, Str

ROLLOUT = {
    "max_turns": Int(min=1),
    "max_turn_tokens": Int(min=1),
    "max_tokens": Int(min=1),
    "max_refused": Int(min=0),
    "num_workers": Int(min=1),
    "env_timeout_s": Float(gt=0),
    "preload": ListOf(Str(), default=[]),
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
