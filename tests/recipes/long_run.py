"""One step of GRPO on two rollouts of 120 tool calls each, measured.

    python -m tests.recipes.long_run OUTPUT_DIR

Plays, packs and trains with the recipe as it is, on the CPU in fp32, and prints a report as JSON
(``OUTPUT_DIR/report.json``). The whole ledgers are in ``OUTPUT_DIR/run/ledgers.jsonl``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from components.policy.engine import in_rounds
from components.rollout.recorder import Recorder
from components.training.config import load_config, validate
from recipes.grpo_agentic import SCHEMA, GRPOAgentic, check
from tests.memory import peak_bytes
from tests.recipes import long_model

NUM_CALLS, WORDS_PER_PAGE, GROUP_SIZE = 120, 220, 2
AROUND = 5
"""Times of a turn are medians over this many turns on either side of it."""
CONFIG: dict[str, Any] = {
    "device": "cpu",
    "dtype": "fp32",
    "num_steps": 1,
    "model": {"_component_": "components.models.gpt_oss.gpt_oss", "checkpoint_activations": False},
    "env": {
        "_component_": "tests.recipes.long_env.ArchiveEnv",
        "num_calls": NUM_CALLS,
        "words_per_page": WORDS_PER_PAGE,
    },
    "checker": {"_component_": "tests.recipes.long_env.MeanPage"},
    "dataset": {"_component_": "tests.recipes.long_env.Archives", "number": 1},
    "tasks_per_step": 1,
    "tokens_per_batch": 80_000,
    "eval": None,
}
ROLLOUT = {
    "group_size": GROUP_SIZE,
    "max_turns": NUM_CALLS,
    "max_turn_tokens": 128,
    "max_tokens": long_model.CONTEXT,
    "max_refused": 0,
    "num_workers": GROUP_SIZE,
    "preload": [],
}


def config(model_dir: Path, output_dir: Path) -> DictConfig:
    """``configs/mock.yaml`` with another environment and model, and limits that cut nothing."""
    cfg = load_config("mock")
    for key, value in CONFIG.items():
        cfg[key] = value
    cfg.rollout = {**cfg.rollout, **ROLLOUT}
    cfg.warm_start.num_steps = 0
    cfg.model_dir, cfg.output_dir = str(model_dir), str(output_dir)
    return validate(cfg, SCHEMA, check=check)


class MeasuredRun(GRPOAgentic):
    """The recipe, with a watch on its rollouts and its update."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg)
        self.report: dict[str, Any] = {}
        self._calls: list[tuple[float, float, float]] = []  # begin, end, CPU time of the process

    def _play(self, *args: Any, **kwargs: Any) -> list:
        generate = self.engine.generate

        def round_of(requests: Sequence[Any]) -> list:
            begin, used = time.perf_counter(), time.process_time()
            results = generate(requests)
            self._calls.append((begin, time.perf_counter(), time.process_time() - used))
            self.report["cache_mib"] = round(self.engine.cache_bytes() / 2**20, 1)
            return results

        # Rounds, which continuous batching has not: a turn of every rollout is one thing to time.
        self.engine.generate = lambda requests, *, feed=None: in_rounds(round_of, requests, feed)
        rollouts = super()._play(*args, **kwargs)
        with Recorder(Path(self.cfg.output_dir) / "ledgers.jsonl", full_tokens=True) as recorder:
            recorder.write(self.step + 1, rollouts)
        self.report["turn_ms"] = {f"turn_{turn}": self._turn_ms(turn) for turn in (10, 110)}
        return rollouts

    def _turn_ms(self, turn: int) -> dict[str, float]:
        """Of a round, a turn of every rollout: CPU time in the engine, wall time outside it."""
        around = range(turn - AROUND, turn + AROUND + 1)
        engine = [self._calls[i][2] for i in around]
        host = [self._calls[i][0] - self._calls[i - 1][1] for i in around]
        pair = {"engine": statistics.median(engine), "host": statistics.median(host)}
        return {name: round(1000 * seconds, 2) for name, seconds in pair.items()}

    def _update(self, items: Any) -> Any:
        done = []
        peak = peak_bytes(lambda: done.append(super(MeasuredRun, self)._update(items)))
        metrics, probe = done[0]
        self.report["row_tokens"] = len(probe[0].tokens)
        self.report["update_peak_mib"] = round(peak / 2**20, 1)
        return metrics, probe


def main(output_dir: Path) -> None:
    """Make the model, run one step, write and print the report."""
    torch.set_num_threads(1)
    run_dir = output_dir / "run"
    recipe = MeasuredRun(config(long_model.write(output_dir / "model"), run_dir))
    try:
        recipe.setup()
        recipe.train()
    finally:
        recipe.cleanup()
    (metrics,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    report = recipe.report | {
        "rollouts_jsonl_bytes": (run_dir / "rollouts.jsonl").stat().st_size,
        "metrics": metrics,
    }
    text = json.dumps(report, indent=2)
    (output_dir / "report.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
