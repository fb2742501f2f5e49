"""The TRL arm of ``tools/bench_training.py``; runs in an environment that has TRL.

    .venv-trl/bin/python tools/bench_training_trl.py JOB.json ANSWER.json

``GRPOTrainer`` as it is: its ``rollout_func`` gives the job's rollouts at once and its reward
function their rewards, so that a step is padding, scoring, forward, backward and the optimizer.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func says that its interface may change

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.bench_training_job import (
    EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Job,
    Stopwatch,
    answer,
    peak_gib,
    read_job,
)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM_UP_TOKENS = 8


def new_clock() -> Any:
    """A callback that times each optimizer step and keeps the gradient norms that are logged."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.watch = Stopwatch()
            self.grad_norms: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.watch.start()  # before the rollouts are scored

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.watch.stop()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "grad_norm" in logs:
                self.grad_norms.append(logs["grad_norm"])

    return Clock()


def train(job: Job, output_dir: str) -> Any:
    """One update that warms up and the job's; returns the clock."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    clock = new_clock()
    size = len(job.responses)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        cut = WARM_UP_TOKENS if not clock.watch.wall_s else None
        completions = [ids[:cut] for ids in job.responses[: len(prompts)]]
        prompt = job.prompt[:cut]
        return {
            "prompt_ids": [prompt for _ in prompts],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
        }

    arguments = GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        per_device_train_batch_size=job.rows_at_once,
        gradient_accumulation_steps=size // job.rows_at_once,
        num_generations=size,
        max_completion_length=max(map(len, job.responses)),
        max_steps=1 + job.num_updates,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        weight_decay=0.0,
        optim="adamw_torch_fused",
        beta=0.0,
        epsilon=EPS,
        scale_rewards="none",  # its standard deviation is the sample's, ours the population's
        loss_type="dapo",  # the mean over all tokens of the batch, as ours by default
        bf16=False,  # weights and products in the dtype that the model is loaded in
        gradient_checkpointing=job.checkpoint_activations,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(job.model, dtype=DTYPES[job.dtype]),
        reward_funcs=lambda completions, **_: job.rewards[: len(completions)],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * size),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        rollout_func=rollout,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return clock


def main() -> None:
    """Read the job, train, answer."""
    job = read_job(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as output_dir:
        clock = train(job, output_dir)
    answer(
        Path(sys.argv[2]),
        wall_s=clock.watch.wall_s[1:],
        cpu_s=clock.watch.cpu_s[1:],
        grad_norm=clock.grad_norms[1:],
        peak_gib=peak_gib(),
        versions={name: version(name) for name in ("trl", "transformers", "torch")},
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main()
