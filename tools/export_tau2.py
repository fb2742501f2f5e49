"""The rollouts of a run as a results file that tau2-bench's own viewer and metrics read.

    python tools/export_tau2.py runs/retail_eval
    python tools/export_tau2.py runs/retail --only eval/8/
    python -m tau2.metrics.agent_metrics --results runs/retail_eval/tau2_results.json

The official record of each rollout is made by delivering its turns again (see
``components/rollout/replay.py``), and scored by the official evaluator, which must agree with what
was recorded. Rollouts that failed are in it with reward 0. ``tau2 view`` finds the file in tau2's
folder ``data/simulations``. Runs of one tau2 domain with the scripted user.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.disk import write_text
from components.envs.tau2_results import Played, tau2_results
from components.rollout.evaluation import official_reward
from components.rollout.replay import read_with_lines, replay
from components.training.config import as_dict, as_partial, load_config


def played(run: Path, env: Any, *, only: str) -> Iterator[Played]:
    """What tau2 needs of each rollout whose id begins with ``only``."""
    trials: Counter[str] = Counter()
    for _, rollout in read_with_lines(run / "rollouts.jsonl"):
        spec = rollout.spec
        if not spec.rollout_id.startswith(only):
            continue
        info = replay(env, rollout) if rollout.valid else {}
        trajectory = info.get("trajectory")
        yield Played(
            rollout_id=spec.rollout_id,
            task_id=spec.task_id,
            trial=trials[spec.task_id],
            seed=spec.env_seed % 2**31,
            status=rollout.status,
            official=official_reward(rollout),
            trajectory=trajectory,
            messages=env.official_messages if info and trajectory is None else (),
        )
        trials[spec.task_id] += 1


def export(run: Path, *, only: str) -> Any:
    """The tau2 ``Results`` of a run."""
    cfg = load_config(run / "config.yaml")
    settings = as_dict(cfg.env)
    scripted = settings.get("user", "scripted") == "scripted"
    if not (scripted and settings["_component_"].endswith(".Tau2Env")):
        raise ValueError(
            "env: only Tau2Env with user: scripted can be replayed into tau2's own record"
        )
    env = as_partial(cfg.env)()
    found = list(played(run, env, only=only))
    if not found:
        raise ValueError(f"{run}: no rollout" + f" whose id begins with {only!r}" * bool(only))
    return tau2_results(
        found,
        domain=settings["domain"],
        env=settings,
        agent=str(cfg.model_dir),
        num_trials=max(one.trial for one in found) + 1,
        seed=cfg.seed,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rollout ids, e.g. eval/8/")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: in the run's directory")
    args = parser.parse_args()
    try:
        results = export(args.run, only=args.only)
        out = args.out or args.run / "tau2_results.json"
        write_text(out, results.model_dump_json(indent=4) + "\n")
    except (OSError, ValueError) as error:
        print(f"export_tau2: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {len(results.simulations)} simulations of {len(results.tasks)} tasks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
