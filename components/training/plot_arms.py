"""Several runs in one picture: the seeds of an arm as their mean and a band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.training.metrics import read_metrics
from components.training.run_dir import flat

PANELS = (
    ("reward/mean", "Training reward"),
    ("eval/official_mean", "Official reward, held out"),
    ("loss/kl", "KL to the reference (nats per token)"),
    ("mismatch/kl", "KL of generator to trainer (nats per token)"),
    ("policy/entropy", "Entropy of the policy (nats per token)"),
    ("rollout/sampled_tokens", "Sampled tokens per rollout"),
)
NOT_OF_THE_ARM = ("seed", "output_dir", "resume", "tensorboard")
_MAX_NAMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Runs whose settings are alike but for the seed."""

    label: str
    runs: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A metric of an arm: at each step that all its runs have, their mean, least and most."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def group_arms(runs: Sequence[Path]) -> list[Arm]:
    """Put runs together whose ``config.yaml`` differs in nothing but the seed.

    An arm is called by the settings in which the arms differ, or by its first run's folder where
    it has no config.yaml, or more than two settings differ.

    Raises:
        ValueError: a run is named twice, or an arm has two runs of one seed.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError("the same run is named twice")
    configs = {run: _config(run) for run in runs}
    arms: dict[str, list[Path]] = {}
    for run in runs:
        config = configs[run]
        own = {k: v for k, v in (config or {}).items() if k not in NOT_OF_THE_ARM}
        key = str(run.resolve()) if config is None else repr(sorted(own.items(), key=str))
        arms.setdefault(key, []).append(run)
    for members in arms.values():
        seeds = [(configs[run] or {}).get("seed") for run in members]
        if len(set(seeds)) < len(seeds):
            names = ", ".join(map(str, members))
            raise ValueError(f"{names}: one config and one seed: the same run twice?")
    first = [configs[members[0]] for members in arms.values()]
    return [
        Arm(label=f"{label} ({len(members)} seeds)" if len(members) > 1 else label, runs=members)
        for label, members in zip(
            _labels(first, [m[0] for m in arms.values()]), map(tuple, arms.values()), strict=True
        )
    ]


def _config(run: Path) -> dict[str, Any] | None:
    import yaml

    path = run / "config.yaml"
    return flat(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _labels(configs: Sequence[Mapping[str, Any] | None], runs: Sequence[Path]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in config or {})
    differing = [
        key
        for key in keys
        if key not in NOT_OF_THE_ARM and len({repr((c or {}).get(key)) for c in configs}) > 1
    ]
    names = [run.resolve().name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run) for run in runs]
    if not 0 < len(differing) <= _MAX_NAMED or None in configs:
        return names
    return [", ".join(f"{k}={(c or {}).get(k)}" for k in differing) for c in configs]


def band(runs: Sequence[Sequence[Mapping[str, float]]], name: str) -> Band:
    """A metric over the runs of an arm, at each step that all of them have it finite.

    A step that one of them did not reach, or has without this metric, is left out: a mean of those
    that are left would move because another run is missing, and be called that of all seeds. Runs
    with a limit of time end at different steps, so their arm ends where the shortest does.

    Args:
        runs: the rows of each run's metrics.jsonl.
        name: of the metric.
    """
    found = [
        {int(row["step"]): row[name] for row in rows if name in row and math.isfinite(row[name])}
        for rows in runs
    ]
    steps = sorted(set(found[0]).intersection(*found[1:]))
    values = [[run[step] for run in found] for step in steps]
    return Band(
        steps=steps,
        mean=[math.fsum(of_step) / len(of_step) for of_step in values],
        low=[min(of_step) for of_step in values],
        high=[max(of_step) for of_step in values],
    )


def plot_arms(runs: Sequence[Path], path: Path) -> Path:
    """Draw the panels of several runs.

    Args:
        runs: their output_dirs.
        path: the picture, a PNG.

    Raises:
        ValueError: a run has no metrics, or see ``group_arms``.
    """
    rows = {run: read_metrics(run / "metrics.jsonl") for run in runs}
    for run in runs:
        if not rows[run]:
            raise ValueError(f"{run} has no finished step to draw")
    arms = group_arms(runs)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 3, figsize=(15, 7), layout="constrained")
    for axis, (name, title) in zip(axes.flat, PANELS, strict=True):
        for number, arm in enumerate(arms):
            found = band([rows[run] for run in arm.runs], name)
            if not found.steps:
                continue
            color = f"C{number}"
            axis.plot(found.steps, found.mean, marker=".", color=color, label=arm.label)
            if len(arm.runs) > 1:
                axis.fill_between(
                    found.steps, found.low, found.high, color=color, alpha=0.2, linewidth=0
                )
        axis.set(title=title, xlabel="step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axis.get_lines():
            axis.legend(fontsize="small")
    figure.suptitle(
        "Mean over seeds at the steps that all of them have; "
        "the band reaches from the least to the most"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
