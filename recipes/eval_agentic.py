"""Evaluate a checkpoint on a task split with the benchmark's own reward.

    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml
    tune run recipes/eval_agentic.py --config configs/retail_eval.yaml model_dir=runs/retail/step_3

Prints the mean official reward beside what an agent gets that does nothing, and a table by task.
A failed rollout (environment, user, deadline) stays in the denominator as 0 and is counted.
recipes/eval_agentic.md explains every setting and what is written.
"""

from __future__ import annotations

import json
import sys

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from components.models.paths import model_dir
from components.rollout.evaluation import by_task, do_nothing, evaluation_metrics, official_reward
from components.rollout.recorder import Recorder
from components.rollout.specs import group_specs
from components.rollout.types import Rollout
from components.rollout.workers import WorkerPool, WorkerRefused, worker_pool
from components.training import run_dir
from components.training.config import (
    Component,
    Float,
    Int,
    OneOf,
    Str,
    as_dict,
    as_partial,
    config_errors,
    instantiate,
    parse,
)
from components.training.sections import ROLLOUT

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


class EvalAgentic:
    """Wires the components of a config together and evaluates."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.pool: WorkerPool | None = None

    def setup(self) -> None:
        """Build everything. What is wrong with the config is said before compute is paid for."""
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        source_dir = model_dir(cfg.model_dir)
        self.dataset = instantiate(cfg.dataset)
        self.output_dir = run_dir.check(cfg.output_dir, resume=False, recipe="eval_agentic")
        self.pool = worker_pool(
            make_env=as_partial(cfg.env),
            make_renderer=as_partial(cfg.renderer, tokenizer_dir=str(source_dir)),
            **as_dict(cfg.rollout),
        )
        device = cfg.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.dtype]
        model = instantiate(cfg.model, source_dir, dtype=dtype).to(device).requires_grad_(False)
        self.engine = instantiate(
            cfg.engine,
            model,
            max_tokens=cfg.rollout.max_tokens,
            max_batch_size=cfg.rollout.num_workers,
        )
        run_dir.claim(self.output_dir, resume=False, recipe="eval_agentic")
        run_dir.describe(self.output_dir, OmegaConf.to_yaml(cfg))

    def evaluate(self) -> None:
        """Play every task ``num_trials`` times, score, print and write the results."""
        cfg = self.cfg
        assert self.pool is not None
        specs = group_specs(
            [(task.domain, task.id) for task in self.dataset.tasks],
            group_size=cfg.num_trials,
            seed=cfg.seed,
            phase="eval",
        )
        recorder = Recorder(self.output_dir / "rollouts.jsonl")
        with tqdm(total=len(specs), desc="eval", unit="rollout", leave=False, disable=None) as bar:

            def on_done(rollout: Rollout) -> None:
                recorder.write(0, [rollout])
                bar.update()

            rollouts = self.pool.run(specs, self.engine, on_done=on_done)
        recorder.close()
        self._report(rollouts)

    def _report(self, rollouts: list[Rollout]) -> None:
        metrics = evaluation_metrics(rollouts, num_trials=self.cfg.num_trials)
        rows = []
        for task_id, group in by_task(rollouts).items():
            nothing = do_nothing(group[0].spec.domain, task_id) or {}
            rows.append(
                {
                    "task_id": task_id,
                    "official": [official_reward(r) for r in group],
                    "strict": [r.reward_breakdown.get("strict", 0.0) for r in group],
                    "do_nothing": nothing.get("official"),
                    "do_nothing_strict": nothing.get("strict"),
                    "status": [r.status for r in group],
                    "tool_calls": [r.stats.get("tool_calls", 0) for r in group],
                }
            )
        result = {"metrics": metrics, "tasks": rows, "num_trials": self.cfg.num_trials}
        run_dir.write_text(self.output_dir / "eval.json", json.dumps(result, indent=2) + "\n")
        print_table(rows)
        for name, value in metrics.items():
            print(f"{name:<28} {value:.3f}")

    def cleanup(self) -> None:
        """Stop the workers."""
        if self.pool is not None:
            self.pool.close()


def print_table(rows: list[dict]) -> None:
    """One line per task: mean rewards, the do-nothing agent beside them, how the rollouts ended."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for column in ("task", "official", "strict", "do-nothing", "calls", "ended"):
        table.add_column(column, justify="left" if column in ("task", "ended") else "right")
    for row in rows:
        number = len(row["official"])
        ends = {status: row["status"].count(status) for status in dict.fromkeys(row["status"])}
        table.add_row(
            row["task_id"],
            f"{sum(row['official']) / number:.2f}",
            f"{sum(row['strict']) / number:.2f}",
            "-" if row["do_nothing"] is None else f"{row['do_nothing']:.2f}",
            f"{sum(row['tool_calls']) / number:.1f}",
            ", ".join(f"{status} {n}" for status, n in ends.items()),
        )
    Console().print(table)


@parse(SCHEMA)
def recipe_main(cfg: DictConfig) -> None:
    """Evaluate a checkpoint on a task split."""
    recipe = EvalAgentic(cfg)
    try:
        with config_errors():
            recipe.setup()
        with config_errors(WorkerRefused), run_dir.disk_errors(recipe.output_dir):
            recipe.evaluate()
    finally:
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
