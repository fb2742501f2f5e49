"""Evaluate a checkpoint on a task split with the benchmark's own reward.

    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml
    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml model_dir=runs/retail/step_3

Prints the mean official reward beside what agents get that do not try, a table by task, and how
often the policy's safety rules were violated.
A failed rollout (environment, user, deadline) stays in the denominator as 0 and is counted.
recipes/eval_agentic.md explains every setting and what is written.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
from omegaconf import DictConfig, OmegaConf

from components.disk import write_text
from components.models.paths import model_dir
from components.rollout.eval_table import print_evaluation, task_rows
from components.rollout.evaluation import evaluation_metrics
from components.rollout.progress import play_rollouts
from components.rollout.recorder import Recorder
from components.rollout.specs import group_specs
from components.rollout.types import Rollout
from components.rollout.workers import WorkerPool, WorkerRefused, worker_pool
from components.safety.report import safety_report
from components.safety.table import print_reports
from components.training import parallelize, run_dir
from components.training.config import as_dict, as_partial, config_errors, instantiate, parse
from components.training.parallelize import World
from components.training.schema import Component, Float, Int, OneOf, Str
from components.training.sections import ROLLOUT, at_most, same_tasks
from components.training.stop import StopRequested, StopSignal

SCHEMA = {
    "output_dir": Str(),
    "seed": Int(min=0),
    "device": OneOf("auto", "cpu", "cuda", default="auto"),
    "dtype": OneOf("bf16", "fp32"),
    "model_dir": Str(),
    "model": Component(positional=1, provided=("dtype",)),
    "renderer": Component(provided=("tokenizer_dir",)),
    "env": Component(),
    "dataset": Component(),
    "num_trials": Int(min=1),
    "rollout": {"temperature": Float(min=0), **ROLLOUT},
    "engine": Component(positional=1, provided=("max_tokens", "max_batch_size")),
}


def check(cfg: DictConfig) -> list[str]:
    """What is wrong between settings that are each right alone."""
    return same_tasks(cfg, "dataset") + at_most(
        cfg, "rollout.max_turn_tokens", "rollout.max_tokens"
    )


class EvalAgentic:
    """Wires the components of a config together and evaluates."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.world = World.alone()
        self.stop = StopSignal()
        self.pool: WorkerPool | None = None
        self.recorder: Recorder | None = None

    def setup(self) -> None:
        """Build everything. What is wrong with the config is said before compute is paid for."""
        cfg = self.cfg
        self.stop.install()
        self.world = parallelize.init_world(cfg.device)
        torch.manual_seed(cfg.seed)
        source_dir = model_dir(cfg.model_dir)
        dataset = instantiate(cfg.dataset)
        self.output_dir = run_dir.check(cfg.output_dir, resume=False, recipe="eval_agentic")
        self.specs = group_specs(
            [(task.domain, task.id) for task in dataset.tasks],
            group_size=cfg.num_trials,
            seed=cfg.seed,
            phase="eval",
        )
        self.pool = worker_pool(
            make_env=as_partial(cfg.env),
            make_renderer=as_partial(cfg.renderer, tokenizer_dir=str(source_dir)),
            **as_dict(cfg.rollout),
        )
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.dtype]
        model = instantiate(cfg.model, source_dir, dtype=dtype).to(self.world.device)
        self.engine = instantiate(
            cfg.engine,
            model.requires_grad_(False),
            max_tokens=cfg.rollout.max_tokens,
            max_batch_size=cfg.rollout.num_workers,
        )
        run_dir.claim_together(
            self.output_dir,
            self.world,
            resume=False,
            recipe="eval_agentic",
            config_yaml=OmegaConf.to_yaml(cfg),
        )
        if self.world.is_main:
            self.recorder = Recorder(self.output_dir / "rollouts.jsonl")

    def evaluate(self) -> None:
        """Play every task ``num_trials`` times, score, print and write the results.

        With several ranks each plays its share; what a stop leaves is recorded, not reported.
        """
        assert self.pool is not None
        played: list[Rollout] = []
        stopped: StopRequested | None = None
        try:
            with self.stop.apart(self.world) as check_stop:
                play_rollouts(
                    self.pool,
                    self.engine,
                    self.specs[self.world.rank :: self.world.size],
                    temperature=self.cfg.rollout.temperature,
                    label="eval",
                    show=self.world.is_main,
                    check_stop=check_stop,
                    on_done=partial(self._keep, played),
                )
        except StopRequested as request:
            stopped = request
        others = self.world.gather([] if self.world.is_main else played)
        if self.recorder is not None:  # it wrote the main rank's own as they ended
            self.recorder.write(0, others)
        if stopped is not None:
            raise stopped
        if self.world.is_main:
            place = {spec.rollout_id: number for number, spec in enumerate(self.specs)}
            self._report(sorted([*played, *others], key=lambda r: place[r.spec.rollout_id]))

    def _keep(self, played: list[Rollout], rollout: Rollout) -> None:
        played.append(rollout)
        if self.recorder is not None:
            self.recorder.write(0, [rollout])

    def _report(self, rollouts: list[Rollout]) -> None:
        metrics = evaluation_metrics(rollouts, num_trials=self.cfg.num_trials)
        rows, safety = task_rows(rollouts), safety_report(rollouts)
        result = {
            "metrics": metrics,
            "tasks": rows,
            "num_trials": self.cfg.num_trials,
            "safety": safety,
            "settings": as_dict(self.cfg, without=["output_dir"]),
        }
        write_text(self.output_dir / "eval.json", json.dumps(result, indent=2) + "\n")
        print_evaluation(rows, metrics)
        print_reports({self.output_dir.name: safety})

    def say(self, text: str) -> None:
        """Print a line, on one rank."""
        if self.world.is_main:
            print(text, flush=True)

    def cleanup(self) -> None:
        """Stop the workers and close what is open."""
        if self.pool is not None:
            self.pool.close()
        parallelize.leave_world(self.world)
        if self.recorder is not None:
            self.recorder.close()


@parse(SCHEMA, check=check)
def recipe_main(cfg: DictConfig) -> int:
    """Evaluate a checkpoint on a task split."""
    recipe = EvalAgentic(cfg)
    with run_dir.disk_errors(cfg.output_dir):
        try:
            with config_errors():
                recipe.setup()
            with config_errors(WorkerRefused):
                recipe.evaluate()
        except StopRequested:
            recipe.say(f"stopped: {cfg.output_dir} holds what was played, and no result")
            return 130
        finally:
            recipe.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(recipe_main())
