"""Demonstrations for sft_agentic: an oracle plays the training tasks with the scripted user.

    python tools/make_demonstrations.py --config configs/mock_sft.yaml
    python tools/make_demonstrations.py --config configs/retail_sft.yaml demonstrations.per_task=4

Plays each task of the config's ``dataset`` ``demonstrations.per_task`` times, keeps what earned the
full official reward and broke none of the safety checks S1 to S4 and S7, and writes
``demonstrations.path``: ``rollouts.jsonl`` (the format of every run, with all tokens) and
``demonstrations.json``. Training tasks alone: another split, or an oracle's refusal, ends it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from components.data.demonstration_file import check_folder, made_with, write_demonstrations
from components.data.demonstrations import UNLIMITED, Demonstrations
from components.models.paths import model_dir
from components.rollout.workers import WorkerRefused, worker_pool
from components.training.config import as_dict, as_partial, instantiate, load_config, validate
from components.training.parallelize import World
from components.training.schema import Anything
from components.training.sections import DEMONSTRATED, demonstrated
from components.training.stop import StopRequested, StopSignal
from components.training.warm_start import demonstrate_tasks


def checked(config: str, overrides: list[str]) -> Any:
    """The config, of which only what is needed here is looked at."""
    loaded = load_config(config, overrides)
    others = {str(key): Anything(default=None) for key in loaded if key not in DEMONSTRATED}
    return validate(loaded, {**DEMONSTRATED, **others}, check=demonstrated)


def play(cfg: Any, tokenizer_dir: str) -> Demonstrations:
    """Demonstrations of every task of the dataset."""
    tasks = instantiate(cfg.dataset).tasks
    stop = StopSignal()
    stop.install()
    pool = worker_pool(
        make_env=as_partial(cfg.env),
        make_renderer=as_partial(cfg.renderer, tokenizer_dir=tokenizer_dir),
        temperature=1.0,
        **as_dict(cfg.rollout),
    )
    with pool:
        return demonstrate_tasks(
            pool,
            tasks,
            make_oracle=as_partial(cfg.demonstrations.oracle),
            num_demonstrations=len(tasks),
            max_tokens=UNLIMITED.max_tokens,
            seed=cfg.seed,
            world=World.alone(),
            stop=stop,
            per_task=cfg.demonstrations.per_task,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="a config of sft_agentic: path or name")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `tune run`")
    args = parser.parse_args()
    try:
        cfg = checked(args.config, args.overrides)
        check_folder(cfg.demonstrations.path)
        source_dir = model_dir(cfg.model_dir)
        made = play(cfg, str(source_dir))
        facts = {name: as_dict(cfg)[name] for name in ("seed", "dataset", "demonstrations")}
        path = write_demonstrations(
            cfg.demonstrations.path,
            made,
            settings=made_with(as_dict(cfg), model_dir=source_dir),
            facts=facts,
        )
    except StopRequested:
        print("make_demonstrations: stopped; nothing was written", file=sys.stderr)
        return 130
    except (OSError, ValueError, WorkerRefused) as error:
        print(f"make_demonstrations: {error}", file=sys.stderr)
        return 2
    lengths = sorted(len(rollout.tokens) for rollout in made.rollouts)
    for why, ids in made.dropped.items():
        if ids:
            print(f"dropped ({why}): {len(ids)}, e.g. {', '.join(ids[:3])}")
    print(
        f"{path}: {len(lengths)} demonstrations of "
        f"{len({(r.spec.domain, r.spec.task_id) for r in made.rollouts})} tasks, {lengths[0]} to "
        f"{lengths[-1]} tokens (median {lengths[len(lengths) // 2]})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
