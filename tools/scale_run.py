"""What a recorded run says about costs, for ``simulate_scale.py``: rates fitted to its own steps.

A rate is worth what it predicts. ``holdout`` fits to every other step and predicts the rest, and
``check`` predicts the steps of another run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import yaml

from tools.scale_model import Costs, Episode, Turn
from tools.scale_steps import play, train

FIRST = Costs(prefill_token_s=1e-3, decode_step_s=1e-2)
NUM_FITS = 10
"""How many steps a batch takes and how long it waits for environments may depend on the costs (not
with a ``reply_delay`` of 0): the fit begins with the first, and goes on with what it finds."""

MEASURED = {
    "prefill_token_s": "fitted to the sampling times of {steps} steps",
    "decode_step_s": "fitted to the sampling times of {steps} steps",
    "shared_tokens": "the shortest prompt: the common start of all is not longer",
    "update_fixed_s": "fitted to the update times of {steps} steps",
    "update_token_s": "fitted to the update times of {steps} steps",
    "forward_token_s": "the probe's forward pass, mean of {steps} steps",
    "sync_s": "mean of {steps} steps",
    "other_s": "what is left of a step, mean of {steps} steps",
}
"""Where a rate comes from."""

ASSUMED = {
    "decode_token_s": "a decode step takes as long for one live rollout as for many",
    "environments": "a rollout's time is the same in all its answers, and on all machines",
    "servers": "wait for no environment; on the same GPUs, as the run's rollout.reply_delay says",
    "other GPUs": "each is as fast as the one that was measured",
    "communication": "none between ranks, and a sync takes as long for many servers as for one; "
    "what is known of it belongs into update_fixed_s and sync_s of --costs",
    "rollouts": "as long as the recorded ones, whatever the policy learns",
}
"""What a run on one device cannot show."""

MIN_HELD_OUT = 4
"""Steps of a run of which half are held out."""

Group = list[Episode]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A recorded step."""

    metrics: dict[str, float]
    groups: list[Group]

    @property
    def rollout_s(self) -> float:
        """Of sampling its batch, whether the trainer waited for it or not."""
        return self.metrics.get("perf/rollout_s", self.metrics["time/rollout_s"])

    @property
    def episodes(self) -> list[Episode]:
        """In the order in which they were begun."""
        return [episode for group in self.groups for episode in group]

    @property
    def trained_tokens(self) -> float:
        """That training computed."""
        return sum(episode.trained_tokens for episode in self.episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has recorded."""

    steps: list[Step]
    staleness: int
    workers: int
    clocked: bool
    """Whether its engine waits for environments; see ``PolicyEngine``."""
    reply_delay: int
    """Of an engine that does, as ``scale_steps.play`` takes it."""
    shared_tokens: int
    ratio: str
    """Against what the loss takes it: ``proximal`` costs a forward pass for each stale batch."""

    @property
    def own_delay(self) -> int | None:
        """How it was played, as ``play`` takes it."""
        return self.reply_delay if self.clocked else None


def read_run(directory: Path) -> Run:
    """Read a run of one rank: of several, each has played a part that the files do not tell.

    Raises:
        ValueError: a file is missing, or there is no step in it.
    """
    for name in ("metrics.jsonl", "rollouts.jsonl", "config.yaml"):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}")
    from components.training.metrics import read_metrics  # JSON Lines; half a last one is left out

    rows = cast("list[dict[str, Any]]", read_metrics(directory / "metrics.jsonl"))
    config = yaml.safe_load((directory / "config.yaml").read_text())
    records: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for record in cast("list[dict[str, Any]]", read_metrics(directory / "rollouts.jsonl")):
        if record["spec"]["rollout_id"].startswith("train/"):
            groups = records.setdefault(record["step"], {})
            groups.setdefault(record["spec"]["group"], []).append(record)
    played = [r for groups in records.values() for g in groups.values() for r in g if r["turns"]]
    # All prompts of a domain begin alike: the engine computes that once for each version. What
    # is common to them is not recorded; the shortest prompt bounds it.
    shared = min((r["turns"][0]["start"] for r in played), default=1) - 1
    plain = config.get("advantages", {}).get("baseline") == "none"
    steps = []
    for row in rows:
        if "time/step_s" in row and row["step"] in records:
            groups = records[row["step"]]
            if list(groups) != sorted(groups):  # ranks write one after the other
                raise ValueError(f"{directory}: step {row['step']} was played by several ranks")
            if row.get("group/refilled", 0):
                raise ValueError(
                    f"{directory}: in step {row['step']} groups were played in place of others "
                    "(dynamic_sampling.max_refills); that is not simulated"
                )
            saving = row.get("pack/saving", 1.0)
            found = [_episodes(group, shared, saving, plain) for group in groups.values()]
            steps.append(Step(metrics=row, groups=found))
    if not steps:
        raise ValueError(f"{directory} has no finished step with its rollouts")
    rollout = config["rollout"]
    return Run(
        steps=steps,
        staleness=rollout.get("max_staleness", 0),
        workers=rollout["num_workers"],
        clocked=_is_clocked(config),
        reply_delay=rollout.get("reply_delay", 0),
        shared_tokens=shared,
        ratio=config.get("ratio", "proximal"),
    )


def _is_clocked(config: Mapping[str, Any]) -> bool:
    """Whether the engine of a config waits for environments. Without one: as the local one."""
    if "engine" not in config:
        return True
    from components.training.component import locate  # the engines import torch

    return getattr(locate(config["engine"]["_component_"]), "clocked", True)


def _episodes(group: Sequence[dict[str, Any]], shared: int, saving: float, plain: bool) -> Group:
    """The rollouts of a group: their turns, and the tokens that training computes of them.

    Args:
        group: their records.
        shared: tokens at the start of all prompts.
        saving: tokens of the packed rows per token of their rollouts.
        plain: advantages are the rewards themselves: equal ones are a signal, but for 0.
    """
    rewards = {record["reward"] for record in group if record["reward"] is not None}
    found = []
    for record in group:
        seen, end, turns = shared, 0, []
        env_s = record["stats"].get("env_time_s", 0.0) / (len(record["turns"]) + 1)  # and a reset
        for turn in record["turns"]:
            turns.append(
                Turn(
                    new_tokens=turn["start"] - seen,
                    sampled_tokens=turn["end"] - turn["start"],
                    env_s=env_s,
                )
            )
            end = turn["end"]
            seen = end - 1  # a turn's last token is computed with what follows
        signal = record["reward"] != 0 if plain else len(rewards) > 1
        trained = signal and record["reward"] is not None
        tokens = end * saving if trained else 0.0
        found.append(Episode(turns=tuple(turns), end_s=env_s, trained_tokens=tokens))
    return found


def nonnegative(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares with two unknowns, none of them negative."""
    matrix, target = np.array(columns, float).T, np.array(values, float)
    best = np.linalg.lstsq(matrix, target, rcond=None)[0]
    if (best >= 0).all() and np.linalg.matrix_rank(matrix) == 2:
        return best.tolist()
    choices = []
    for index in (0, 1):
        column = matrix[:, index]
        value = max(float(column @ target) / max(float(column @ column), 1e-12), 0.0)
        choices.append((float(((column * value - target) ** 2).sum()), index, value))
    _, index, value = min(choices)
    return [value if i == index else 0.0 for i in (0, 1)]


def fit(run: Run) -> Costs:
    """What things cost, from the steps of a run on one device.

    Raises:
        ValueError: a run that played ahead: its times are of two things at once.
    """
    if run.staleness:
        raise ValueError(
            f"rollout.max_staleness = {run.staleness}: costs are fitted to a run with 0 alone"
        )
    sampling = dataclasses.replace(FIRST, shared_tokens=run.shared_tokens)
    for _ in range(NUM_FITS):
        sampling = _fit_sampling(run, sampling)
    trained = [step for step in run.steps if step.trained_tokens]
    fixed, token = 0.0, 0.0
    if trained:
        fixed, token = nonnegative(
            [[1.0] * len(trained), [step.trained_tokens for step in trained]],
            [step.metrics["time/update_s"] for step in trained],
        )
    phases = ("time/rollout_s", "time/update_s", "time/sync_s")
    rows = [step.metrics for step in run.steps]
    return dataclasses.replace(
        sampling,
        update_fixed_s=fixed,
        update_token_s=token,
        forward_token_s=_forward_token_s(trained) if run.ratio == "proximal" else 0.0,
        sync_s=fmean(row.get("time/sync_s", 0.0) for row in rows),
        other_s=fmean(row["time/step_s"] - sum(row.get(p, 0.0) for p in phases) for row in rows),
    )


def _fit_sampling(run: Run, guess: Costs) -> Costs:
    """What sampling costs, where the guess gives the steps and the waiting."""
    counted = [
        play([s.episodes], guess, servers=1, workers=run.workers, reply_delay=run.own_delay)
        for s in run.steps
    ]
    prefill, decode = nonnegative(
        [[p.prefill_tokens for p in counted], [p.decode_steps for p in counted]],
        [step.rollout_s - p.env_s for step, p in zip(run.steps, counted, strict=True)],
    )
    return dataclasses.replace(guess, prefill_token_s=prefill, decode_step_s=decode)


def _forward_token_s(steps: Sequence[Step]) -> float:
    """Seconds of a forward pass per token: the probe's, which is one over the first row."""
    probed = [step for step in steps if "time/probe_s" in step.metrics]
    seconds = sum(step.metrics["time/probe_s"] for step in probed)
    tokens = sum(step.trained_tokens / step.metrics.get("pack/num_batches", 1) for step in probed)
    return seconds / tokens if tokens else 0.0


def rates_text(costs: Costs, *, num_steps: int, given: bool) -> str:
    """A line for each rate: its value, and whether it was measured or is assumed."""
    lines, rates = [], dataclasses.asdict(costs)
    for name, value in rates.items():
        if given:
            source = "given with --costs"
        elif name in ASSUMED:
            source = f"assumed: {ASSUMED[name]}"
        else:
            source = "measured: " + MEASURED[name].format(steps=num_steps)
            source += "; 0 where they do not tell it apart" if value == 0 else ""
            if name == "forward_token_s" and value == 0:
                source = "not measured: no probe (probe_update: false), or ratio: generator"
        lines.append(f"{name:<16} {value:>9.4g}  {source}")
    for name, what in ASSUMED.items():
        if name not in rates:
            lines.append(f"{name:<16} {'':>9}  assumed: {what}")
    return "\n".join(lines)


def check(run: Run, costs: Costs) -> dict[str, Any]:
    """Predicted against measured mean seconds of a step of a run on one device."""
    batches = [[step.episodes] for step in run.steps]
    found = train(
        batches,
        dataclasses.replace(costs, shared_tokens=run.shared_tokens),  # of its own prompts
        servers=1,
        workers=run.workers,
        staleness=run.staleness,
        reply_delay=run.own_delay,
    )
    measured = [step.metrics["time/step_s"] for step in run.steps]
    return {
        "staleness": run.staleness,
        "steps": [int(step.metrics["step"]) for step in run.steps],
        "measured_step_s": fmean(measured),
        "predicted_step_s": fmean(found.step_s),
        "error": fmean(found.step_s) / fmean(measured) - 1.0,
        "each": [
            {"measured_s": m, "predicted_s": p} for m, p in zip(measured, found.step_s, strict=True)
        ],
    }


def holdout(run: Run) -> dict[str, Any]:
    """Fit to every other step, the first included, and predict those between.

    Args:
        run: of at least ``MIN_HELD_OUT`` steps.
    """
    costs = fit(dataclasses.replace(run, steps=run.steps[::2]))
    return check(dataclasses.replace(run, steps=run.steps[1::2]), costs)


def check_text(found: Mapping[str, Any]) -> str:
    """A check on one line."""
    return (
        f"{found['name']}: predicted {found['predicted_step_s']:.2f} s per step, measured "
        f"{found['measured_step_s']:.2f} ({found['error']:+.0%}), max_staleness "
        f"{found['staleness']}, steps {', '.join(map(str, found['steps']))}"
    )
