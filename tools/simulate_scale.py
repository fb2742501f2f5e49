"""Predict step time and idle share for 1 to 64 GPUs from what a run has measured.

    python tools/simulate_scale.py runs/retail --json scale.json
    python tools/simulate_scale.py runs/retail --check runs/retail_ahead   # held against a run
    python tools/simulate_scale.py runs/retail --costs gpu.json --groups 64 --gpus 8 16 32

RUN has metrics.jsonl, rollouts.jsonl and config.yaml of a run with rollout.max_staleness 0. Its
rollouts are played again in a simulation (tools/scale_model.py), turn by turn with their lengths
and the time of their environments, drawn in groups, so that long ones are as frequent as they were.

What a token costs is fitted to the run's own steps, or given with ``--costs``: a JSON object with
the fields that ``--write-costs`` writes, for instance of another machine. Nothing is assumed about
hardware that was not measured, and what two ranks cost in communication is not known to a run of
one: put it into ``update_fixed_s``. Saving and evaluation are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.scale_model import Costs, Episode, Timeline, Turn, play, train

TOLERANCE = 0.2
NOMINAL = Costs(prefill_token_s=1e-3, decode_step_s=1e-2)
"""The counts of a batch hardly depend on the seconds; these are for counting alone."""

Group = list[Episode]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A recorded step."""

    metrics: dict[str, float]
    groups: list[Group]

    @property
    def rollout_s(self) -> float:
        return self.metrics.get("perf/rollout_s", self.metrics["time/rollout_s"])

    @property
    def trained_tokens(self) -> float:
        return sum(episode.trained_tokens for group in self.groups for episode in group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has recorded."""

    steps: list[Step]
    staleness: int
    workers: int
    shared_tokens: int


def read_run(directory: Path) -> Run:
    """Read a run of one rank.

    Raises:
        ValueError: a file is missing, or there is no step in it.
    """
    for name in ("metrics.jsonl", "rollouts.jsonl", "config.yaml"):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    config = yaml.safe_load((directory / "config.yaml").read_text())
    records: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for line in (directory / "rollouts.jsonl").open():
        record = json.loads(line)
        if record["spec"]["rollout_id"].startswith("train/"):
            groups = records.setdefault(record["step"], {})
            groups.setdefault(record["spec"]["group"], []).append(record)
    played = [r for groups in records.values() for g in groups.values() for r in g if r["turns"]]
    # All prompts begin with the domain's: the engine computes that once for each version.
    shared = min((r["turns"][0]["start"] for r in played), default=1) - 1
    steps = []
    for row in rows:
        if "time/step_s" in row and row["step"] in records:
            groups = records[row["step"]]
            saving = row.get("pack/saving", 1.0)
            steps.append(
                Step(
                    metrics=row,
                    groups=[episodes(groups[g], shared, saving) for g in sorted(groups)],
                )
            )
    if not steps:
        raise ValueError(f"{directory} has no finished step with its rollouts")
    rollout = config["rollout"]
    return Run(
        steps=steps,
        staleness=rollout.get("max_staleness", 0),
        workers=rollout["num_workers"],
        shared_tokens=shared,
    )


def episodes(group: Sequence[dict[str, Any]], shared: int, saving: float) -> Group:
    """The rollouts of a group: their turns, and the tokens that training computes of them."""
    rewards = {record["reward"] for record in group if record["reward"] is not None}
    found = []
    for record in group:
        end, turns = shared, []
        env_s = record["stats"].get("env_time_s", 0.0) / max(len(record["turns"]), 1)
        for turn in record["turns"]:
            turns.append(
                Turn(
                    new_tokens=turn["start"] - end,
                    sampled_tokens=turn["end"] - turn["start"],
                    env_s=env_s,
                )
            )
            end = turn["end"]
        trained = len(rewards) > 1 and record["reward"] is not None
        found.append(Episode(turns=tuple(turns), trained_tokens=end * saving if trained else 0.0))
    return found


def flat(groups: Sequence[Group]) -> list[Episode]:
    """All episodes in their order."""
    return [episode for group in groups for episode in group]


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
        raise ValueError("costs are fitted to a run with rollout.max_staleness 0")
    nominal = dataclasses.replace(NOMINAL, shared_tokens=run.shared_tokens)
    counted = [
        play([flat(step.groups)], nominal, servers=1, workers=run.workers) for step in run.steps
    ]
    prefill, decode = nonnegative(
        [[p.prefill_tokens for p in counted], [p.decode_steps for p in counted]],
        [step.rollout_s - p.env_s for step, p in zip(run.steps, counted, strict=True)],
    )
    trained = [step for step in run.steps if step.trained_tokens]
    fixed, token = 0.0, 0.0
    if trained:
        fixed, token = nonnegative(
            [[1.0] * len(trained), [step.trained_tokens for step in trained]],
            [step.metrics["time/update_s"] for step in trained],
        )
    phases = ("time/rollout_s", "time/update_s", "time/sync_s")
    rows = [step.metrics for step in run.steps]
    return Costs(
        prefill_token_s=prefill,
        decode_step_s=decode,
        shared_tokens=run.shared_tokens,
        update_fixed_s=fixed,
        update_token_s=token,
        sync_s=fmean(row.get("time/sync_s", 0.0) for row in rows),
        other_s=fmean(row["time/step_s"] - sum(row.get(p, 0.0) for p in phases) for row in rows),
    )


def check(run: Run, costs: Costs) -> dict[str, float]:
    """Predicted against measured mean seconds of a step of a run on one device."""
    batches = [[flat(step.groups)] for step in run.steps]
    found = train(batches, costs, servers=1, workers=run.workers, staleness=run.staleness)
    measured = fmean(step.metrics["time/step_s"] for step in run.steps)
    predicted = fmean(found.step_s)
    return {
        "staleness": run.staleness,
        "measured_step_s": measured,
        "predicted_step_s": predicted,
        "error": predicted / measured - 1.0,
    }


def workload(run: Run, *, groups: int, steps: int, seed: int) -> list[list[Group]]:
    """Steps of so many groups each, drawn from the recorded ones."""
    draw = random.Random(seed)
    recorded = [group for step in run.steps for group in step.groups]
    return [[draw.choice(recorded) for _ in range(groups)] for _ in range(steps)]


def row_of(
    found: Timeline, *, servers: int, ranks: int, staleness: int, shared: bool, sync_s: float
) -> dict[str, Any]:
    """A row of the table, of the steps after the first."""
    total, num = sum(found.step_s[1:]), len(found.step_s) - 1
    sampling = sum(p.server_busy_s for p in found.played[1:])
    updating = sum(found.update_s[1:])
    gpus = servers if shared else servers + ranks
    busy = sampling + updating if shared else (sampling * servers + updating * ranks) / gpus
    playing = sum(p.seconds for p in found.played[1:])
    parts: dict[str, float] = {"training": updating, "sync": sync_s * num}
    if playing > updating or staleness == 0:
        env = sum(p.env_s for p in found.played[1:])
        tail = sum(p.tail_s for p in found.played[1:])
        slow_tail = tail > playing / 2
        parts["long rollouts" if slow_tail else "sampling"] = playing - env
        parts["environments"] = env
    return {
        "gpus": gpus,
        "servers": servers,
        "ranks": ranks,
        "shared": shared,
        "staleness": staleness,
        "step_s": total / num,
        "idle": 1.0 - busy / total,
        "bottleneck": max(parts, key=lambda name: parts[name]),
    }


def table(
    run: Run, costs: Costs, *, gpus: Sequence[int], groups: int, steps: int, workers: int, seed: int
) -> list[dict[str, Any]]:
    """For each number of GPUs: all of them sampling, then training (the local engine), and the best
    split into servers and trainer ranks without and with playing ahead."""
    drawn = workload(run, groups=groups, steps=steps + 1, seed=seed)

    def simulate(servers: int, ranks: int, staleness: int, shared: bool) -> dict[str, Any]:
        batches = [[flat(step[r::ranks]) for r in range(ranks)] for step in drawn]
        found = train(batches, costs, servers=servers, workers=workers, staleness=staleness)
        return row_of(
            found,
            servers=servers,
            ranks=ranks,
            staleness=staleness,
            shared=shared,
            sync_s=costs.sync_s,
        )

    rows = []
    for num in gpus:
        rows.append(simulate(num, num, 0, True))
        shares = sorted({max(1, min(num - 1, round(num * part / 8))) for part in range(1, 8)})
        for staleness in (0, 1) if num > 1 else ():
            tried = [simulate(s, num - s, staleness, False) for s in shares]
            rows.append(min(tried, key=lambda row: row["step_s"]))
    return rows


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """The table for the console."""
    lines = [
        f"{'GPUs':>4} {'servers':>8} {'ranks':>6} {'ahead':>6} {'s/step':>8} {'idle':>6}  limit"
    ]
    for row in rows:
        servers = "the same" if row["shared"] else str(row["servers"])
        lines.append(
            f"{row['gpus']:>4} {servers:>8} {row['ranks']:>6} {row['staleness']:>6} "
            f"{row['step_s']:>8.2f} {row['idle']:>6.0%}  {row['bottleneck']}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, check, predict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument("--costs", type=Path, help="JSON with costs instead of fitted ones")
    parser.add_argument("--write-costs", type=Path, help="write the costs there")
    parser.add_argument("--check", type=Path, nargs="*", default=[], help="runs to hold against")
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--groups", type=int, help="of a step; default: as in the run")
    parser.add_argument("--workers", type=int, help="rollouts alive on each rank; as in the run")
    parser.add_argument("--steps", type=int, default=8, help="to simulate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything there")
    options = parser.parse_args(argv)
    try:
        run = read_run(options.run)
        costs = Costs(**json.loads(options.costs.read_text())) if options.costs else fit(run)
        checks = [check(read_run(path), costs) for path in (options.run, *options.check)]
        rows = table(
            run,
            costs,
            gpus=options.gpus,
            groups=options.groups or len(run.steps[0].groups),
            steps=options.steps,
            workers=options.workers or run.workers,
            seed=options.seed,
        )
    except (ValueError, TypeError, OSError) as error:
        print(f"simulate_scale: {error}", file=sys.stderr)
        return 1
    for found in [] if options.costs else checks:
        print(
            f"max_staleness {found['staleness']}: predicted {found['predicted_step_s']:.2f} s per "
            f"step, measured {found['measured_step_s']:.2f} ({found['error']:+.0%})"
        )
    print(text_of(rows))
    report = {"costs": dataclasses.asdict(costs), "checks": checks, "rows": rows}
    if options.write_costs:
        options.write_costs.write_text(json.dumps(report["costs"], indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    missed = any(abs(found["error"]) > TOLERANCE for found in checks)
    return 1 if missed and not options.costs else 0


if __name__ == "__main__":
    sys.exit(main())
