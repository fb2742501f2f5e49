"""Predict step time, idle share and what limits them for 1 to 64 GPUs from a run's recorded times.

    python tools/simulate_scale.py runs/retail --groups 64 --workers 32 --json scale.json
    python tools/simulate_scale.py runs/retail --check runs/retail_again runs/retail_ahead
    python tools/simulate_scale.py runs/retail --costs gpu.json --groups 64 --gpus 8 16 32

RUN has metrics.jsonl, rollouts.jsonl and config.yaml of a run of one rank with
rollout.max_staleness 0. Its rollouts are played again in a simulation, turn by turn with their
lengths and the time of their environments, drawn in groups, so that long ones are as frequent as
they were: on the local engine (tools/scale_local.py) or on servers apart (tools/scale_model.py).

What a token costs is fitted to the run's own steps (tools/scale_run.py), or given with ``--costs``:
a JSON object with the fields that ``--write-costs`` writes, for instance of another machine. Which
rates were measured and which are assumed is printed. The fit is then held against steps that it has
not seen: every other one of the run, and all of those of ``--check``. If a prediction is off by
more than 20 %, the command fails. Nothing beyond one device is checked by that. Saving and
evaluation are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.scale_model import Costs, Episode
from tools.scale_run import (
    ASSUMED,
    MIN_HELD_OUT,
    Group,
    Run,
    check,
    check_text,
    fit,
    holdout,
    rates_text,
    read_run,
)
from tools.scale_steps import Timeline, train

TOLERANCE = 0.2


def flat(groups: Sequence[Group]) -> list[Episode]:
    """All episodes in their order."""
    return [episode for group in groups for episode in group]


def workload(run: Run, *, groups: int, steps: int, seed: int) -> list[list[Group]]:
    """Steps of so many groups each, drawn from the recorded ones."""
    draw = random.Random(seed)
    recorded = [group for step in run.steps for group in step.groups]
    return [[draw.choice(recorded) for _ in range(groups)] for _ in range(steps)]


def row_of(
    found: Timeline, costs: Costs, *, servers: int, ranks: int, staleness: int, shared: bool
) -> dict[str, Any]:
    """A row of the table, of the steps after the first."""
    total, num = sum(found.step_s[1:]), len(found.step_s) - 1
    sampling = sum(p.server_busy_s for p in found.played[1:])
    updating = sum(found.busy_s[1:])
    gpus = servers if shared else servers + ranks
    busy = sampling + updating if shared else (sampling * servers + updating * ranks) / gpus
    return {
        "gpus": gpus,
        "servers": servers,
        "ranks": ranks,
        "shared": shared,
        "staleness": staleness,
        "step_s": total / num,
        "idle": 1.0 - busy / total,
        "bottleneck": _bottleneck(found, costs, staleness=staleness),
    }


def _bottleneck(found: Timeline, costs: Costs, *, staleness: int) -> str:
    """What takes most of the time that a step waits for: of both phases, or of the longer one."""
    num = len(found.step_s) - 1
    training = {
        "training": sum(found.update_s[1:]),
        "sync": costs.sync_s * num,
        "the rest of a step": costs.other_s * num,
    }
    playing = sum(p.seconds for p in found.played[1:])
    env = sum(p.env_s for p in found.played[1:])
    tail = sum(p.tail_s for p in found.played[1:])
    rollouts = {
        "long rollouts" if tail > playing / 2 else "sampling": playing - env,
        "environments": env,
    }
    if staleness == 0:
        parts = training | rollouts
    else:
        parts = rollouts if playing > sum(training.values()) else training
    return max(parts, key=lambda name: parts[name])


def table(
    run: Run, costs: Costs, *, gpus: Sequence[int], groups: int, steps: int, workers: int, seed: int
) -> list[dict[str, Any]]:
    """For each number of GPUs: all of them sampling, then training (the local engine, with the
    run's ``rollout.reply_delay``), and the best split into servers, which wait for no environment,
    and trainer ranks without and with playing ahead."""
    drawn = workload(run, groups=groups, steps=steps + 1, seed=seed)

    def simulate(servers: int, ranks: int, staleness: int, shared: bool) -> dict[str, Any]:
        batches = [[flat(step[r::ranks]) for r in range(ranks)] for step in drawn]
        found = train(
            batches,
            costs,
            servers=servers,
            workers=workers,
            staleness=staleness,
            reply_delay=run.reply_delay if shared else None,
        )
        return row_of(
            found, costs, servers=servers, ranks=ranks, staleness=staleness, shared=shared
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


def checks_of(run: Run, others: Sequence[Path], costs: Costs, *, name: Path, given: bool) -> list:
    """Predictions of steps that the rates were not fitted to.

    Args:
        run: that they were fitted to, unless they were ``given``.
        others: directories of other runs.
        costs: the rates.
        name: directory of ``run``.
        given: the rates are of another machine: they say nothing about ``run``.
    """
    found = []
    if not given and len(run.steps) >= MIN_HELD_OUT:
        found.append({"name": f"{name}, fitted to the steps between", **holdout(run)})
    elif not given:
        print(f"{name} has {len(run.steps)} steps: too few to hold some out", file=sys.stderr)
    return found + [{"name": str(path), **check(read_run(path), costs)} for path in others]


def read_costs(path: Path, run: Run) -> Costs:
    """Costs of another machine; what the prompts share is the run's.

    Raises:
        ValueError: naming the file and the field.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    allowed = {each.name: each.default for each in dataclasses.fields(Costs)}
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be an object with the fields {', '.join(allowed)}")
    for name, value in found.items():
        if name not in allowed:
            raise ValueError(f"{path}: {name} is none of the costs {', '.join(allowed)}")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{path}: {name} = {value!r}: must be a number, 0 or more")
    missing = [n for n, d in allowed.items() if d is dataclasses.MISSING and n not in found]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} is missing")
    return Costs(**found | {"shared_tokens": run.shared_tokens})


def check_counts(options: argparse.Namespace) -> None:
    """Raise for a count below 1.

    Raises:
        ValueError: naming the option.
    """
    for name in ("gpus", "groups", "workers", "steps"):
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                raise ValueError(f"--{name} {number}: must be at least 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, check, predict; 1 if a check misses."""
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
        check_counts(options)
        run, given = read_run(options.run), options.costs is not None
        costs = read_costs(options.costs, run) if given else fit(run)
        checks = checks_of(run, options.check, costs, name=options.run, given=given)
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
    print(rates_text(costs, num_steps=len(run.steps), given=given))
    for found in checks:
        print(check_text(found))
    print(text_of(rows))
    print("Beyond one GPU nothing was measured: it follows from the rates and the assumptions.")
    report = {"costs": dataclasses.asdict(costs), "assumed": ASSUMED}
    report |= {"checks": checks, "rows": rows}
    if options.write_costs:
        options.write_costs.write_text(json.dumps(report["costs"], indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(abs(found["error"]) > TOLERANCE for found in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
