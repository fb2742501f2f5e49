"""Evaluate a checkpoint on a task split with the benchmark's own reward.

    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml
    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml model_dir=runs/retail/step_3

Prints the mean official reward with its interval beside what agents get that do not try, a table by
task, and how often the policy's safety rules were violated. A run that was killed goes on with
``resume=true``.
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
from components.rollout.evaluation import evaluation_metrics, evaluation_summary
from components.rollout.progress import play_rollouts
from components.rollout.recorder import Recorder, read_rollouts
from components.rollout.specs import trial_specs
from components.rollout.types import Rollout, RolloutSpec
from components.rollout.workers import WorkerPool, WorkerRefused, worker_pool
from components.safety.report import safety_report
from components.safety.table import print_reports
from components.training import parallelize, run_dir
from components.training.config import as_dict, as_partial, config_errors, instantiate, parse
from components.training.parallelize import World
from components.training.precision import settle_dtype
from components.training.schema import Bool, Component, Float, Int, OneOf, Str
from components.training.sections import ROLLOUT, at_most, same_tasks
from components.training.stop import StopRequested, StopSignal

SCHEMA = {
    "output_dir": Str(),
    "resume": Bool(default=False),
    "seed": Int(min=0),
    "device": OneOf("auto", "cpu", "cuda", default="auto"),
    "dtype": OneOf("auto", "bf16", "fp32"),
    "model_dir": Str(),
    "model": Component(positional=1, provided=("dtype",)),
    "renderer": Component(provided=("tokenizer_dir",)),
    "env": Component(),
    "dataset": Component(),
    "num_trials": Int(min=1),
    "num_seeds": Int(min=1, default=1),
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
        self.dtype = settle_dtype(cfg)
        self.world = World.alone()
        self.stop = StopSignal()
        self.pool: WorkerPool | None = None
        self.recorder: Recorder | None = None
        self.earlier: list[Rollout] = []

    def setup(self) -> None:
        """Build everything. What is wrong with the config is said before compute is paid for."""
        cfg = self.cfg
        self.stop.install()
        self.world = parallelize.init_world(cfg.device)
        torch.manual_seed(cfg.seed)
        source_dir = model_dir(cfg.model_dir)
        dataset = instantiate(cfg.dataset)
        self.output_dir = run_dir.check(cfg.output_dir, resume=cfg.resume, recipe="eval_agentic")
        self.specs = self._specs([(task.domain, task.id) for task in dataset.tasks])
        if cfg.resume:
            self._take_earlier()
        self.pool = worker_pool(
            make_env=as_partial(cfg.env),
            make_renderer=as_partial(cfg.renderer, tokenizer_dir=str(source_dir)),
            **as_dict(cfg.rollout),
        )
        model = instantiate(cfg.model, source_dir, dtype=self.dtype).to(self.world.device)
        self.engine = instantiate(
            cfg.engine,
            model.requires_grad_(False),
            max_tokens=cfg.rollout.max_tokens,
            max_batch_size=cfg.rollout.num_workers,
        )
        run_dir.claim_together(
            self.output_dir,
            self.world,
            resume=cfg.resume,
            recipe="eval_agentic",
            config_yaml=OmegaConf.to_yaml(cfg),
        )
        if self.world.is_main:
            self.recorder = Recorder(self.output_dir / "rollouts.jsonl")

    def _specs(self, tasks: list[tuple[str, str]]) -> list[RolloutSpec]:
        """Every rollout of every seed; with one seed the names say nothing of it."""
        cfg = self.cfg
        self.seeds = range(cfg.seed, cfg.seed + cfg.num_seeds)
        return [
            spec
            for seed in self.seeds
            for spec in trial_specs(
                tasks,
                group_size=cfg.num_trials,
                seed=seed,
                phase="eval" if cfg.num_seeds == 1 else f"eval/{seed}",
            )
        ]

    def _take_earlier(self) -> None:
        """What an earlier launch of this evaluation played, under the same settings."""
        path = self.output_dir / "rollouts.jsonl"
        if not path.exists():
            return
        if changed := run_dir.changed_settings(self.output_dir, as_dict(self.cfg)):
            raise ValueError(
                f"resume: {self.output_dir} holds rollouts played with other settings: "
                + "; ".join(changed)
            )
        wanted = {spec.rollout_id: spec for spec in self.specs}
        self.earlier = [record.rollout for record in read_rollouts(path)]
        if any(wanted.get(r.spec.rollout_id) != r.spec for r in self.earlier):
            raise ValueError(f"resume: {path} holds rollouts that are not of this evaluation")

    def evaluate(self) -> None:
        """Play every task ``num_trials`` times a seed, score, print and write the results.

        With several ranks each plays its share; what a stop leaves is recorded, not reported.
        """
        assert self.pool is not None
        played: list[Rollout] = []
        stopped: StopRequested | None = None
        done = {rollout.spec.rollout_id for rollout in self.earlier}
        left = [spec for spec in self.specs if spec.rollout_id not in done]
        if done:
            self.say(f"resuming: {len(done)} of {len(self.specs)} rollouts were played before")
        try:
            with self.stop.apart(self.world) as check_stop:
                play_rollouts(
                    self.pool,
                    self.engine,
                    left[self.world.rank :: self.world.size],
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
            everyone = [*self.earlier, *played, *others]
            self._report(sorted(everyone, key=lambda r: place[r.spec.rollout_id]))

    def _keep(self, played: list[Rollout], rollout: Rollout) -> None:
        played.append(rollout)
        if self.recorder is not None:
            self.recorder.write(0, [rollout])

    def _report(self, rollouts: list[Rollout]) -> None:
        num_trials = self.cfg.num_trials * self.cfg.num_seeds
        metrics = evaluation_metrics(rollouts, num_trials=num_trials)
        rows, safety = task_rows(rollouts), safety_report(rollouts)
        size = len(rollouts) // len(self.seeds)
        of_seeds = {
            str(seed): rollouts[i * size : (i + 1) * size] for i, seed in enumerate(self.seeds)
        }
        result = {
            "metrics": metrics,
            **evaluation_summary(rollouts, num_trials=num_trials, of_seeds=of_seeds),
            "tasks": rows,
            "num_trials": num_trials,
            "safety": safety,
            "settings": as_dict(self.cfg, without=["output_dir", "resume"]),
        }
        write_text(self.output_dir / "eval.json", json.dumps(result, indent=2) + "\n")
        print_evaluation(rows, metrics, result["intervals"])
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
