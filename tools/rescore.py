"""Score recorded rollouts again with another checker, without sampling anything.

    python tools/rescore.py runs/retail --checker components.envs.rewards.StrictReward
    python tools/rescore.py runs/retail --checker components.safety.gate.SafetyGated \\
        'checks=[S1, S2]' on_violation=penalty --only train/8/

Each rollout's turns are delivered to the run's own environment again (its ``config.yaml`` says
which) and every answer is compared with the record, so that what is scored is what was played. The
lines go to ``rollouts.rescored.jsonl`` in the run's directory, or to ``--out``, with the new reward
and breakdown and otherwise as they were. A rollout that failed keeps its missing reward, one that a
limit of the run cut short its 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from components.console import table_console
from components.disk import write_text
from components.rollout.replay import read_with_lines, rescored
from components.training.annotations import COMPONENT
from components.training.config import as_dict, as_partial, instantiate, load_config


def model_users(settings: Any, path: str) -> Iterator[str]:
    """Paths of the users that are not scripted, at any depth: an env may hold others.

    Args:
        settings: plain values of a config.
        path: where they stand in it.
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if key == "user" and not isinstance(value, str):
                yield f"{path}.user"
            else:
                yield from model_users(value, f"{path}.{key}")
    elif isinstance(settings, list):
        for place, value in enumerate(settings):
            yield from model_users(value, f"{path}[{place}]")


def rescore(run: Path, checker: Any, *, only: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(line before, line after) of each rollout whose id begins with ``only``."""
    cfg = load_config(run / "config.yaml")
    for path in model_users(as_dict(cfg.env), "env"):
        raise ValueError(f"{path} is a language model: what it said cannot be asked for again")
    env = as_partial(cfg.env, checker=checker)()
    pairs = []
    for before, rollout in read_with_lines(run / "rollouts.jsonl"):
        if not rollout.spec.rollout_id.startswith(only):
            continue
        reward = rescored(env, rollout)
        after = dict(before)
        if reward is not None:
            after |= {"reward": float(reward.value), "breakdown": dict(reward.breakdown)}
        pairs.append((before, after))
    env.close()
    if not pairs:
        raise ValueError(f"{run}: no rollout" + f" whose id begins with {only!r}" * bool(only))
    return pairs


def show(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """A row per phase of the run (``train/3``, ``eval/4``) and one for all."""
    from rich.markup import escape
    from rich.table import Table

    phases: dict[str, list] = {}
    for pair in pairs:
        # The rollout id is phase/group/domain/task/member, and a task's id may hold a slash.
        spec = pair[0]["spec"]
        end = f"/{spec['group']}/{spec['domain']}/{spec['task_id']}/{spec['member']}"
        phases.setdefault(spec["rollout_id"].removesuffix(end), []).append(pair)
    table = Table(show_edge=False, pad_edge=False)
    for column in ("phase", "rollouts", "without reward", "before", "after", "up", "down"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    rows = [*phases.items(), ("all", list(pairs))] if len(phases) > 1 else phases.items()
    for phase, of_phase in rows:
        values = [
            (before["reward"], after["reward"])
            for before, after in of_phase
            if after["reward"] is not None
        ]
        table.add_row(
            escape(phase),
            str(len(of_phase)),
            str(len(of_phase) - len(values)),
            *(f"{fmean(v):.3f}" if v else "-" for v in zip(*values, strict=True)),
            *([] if values else ["-", "-"]),
            str(sum(b > a for a, b in values)),
            str(sum(b < a for a, b in values)),
        )
    table_console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="output_dir of a run")
    parser.add_argument("--checker", required=True, help="its dotted path")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the checker")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rollout ids, e.g. eval/8/")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: in the run's directory")
    args = parser.parse_intermixed_args()
    out = args.out or args.run / "rollouts.rescored.jsonl"
    try:
        if out.exists():
            raise ValueError(f"--out: {out} exists")
        given = [text.partition("=") for text in args.settings]
        if wrong := [key for key, equals, _ in given if not equals]:
            raise ValueError(f"{wrong[0]!r}: must be key=value")
        settings = {key: yaml.safe_load(value) for key, _, value in given}
        checker = instantiate({COMPONENT: args.checker, **settings})
        pairs = rescore(args.run, checker, only=args.only)
        lines = (json.dumps(line, allow_nan=False, separators=(",", ":")) for _, line in pairs)
        write_text(out, "".join(line + "\n" for line in lines))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        print(f"rescore: {error}", file=sys.stderr)
        return 2
    show(pairs)
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
