"""Supervised fine-tuning on demonstrations of agentic tasks: one device, or many with FSDP2.

    python tools/make_demonstrations.py --config configs/retail_sft.yaml
    tune run recipes/sft_agentic.py --config configs/retail_sft.yaml

One step: draw demonstrations of training tasks, pack them into prefix trees, and take one step of
cross entropy on what the demonstrator wrote. Demonstrations are rollouts: the same ledger, masks,
packing, checkpoints and resume as in grpo_agentic, whose warm start is made of the same parts.

recipes/sft_agentic.md explains every setting and every metric.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from components.data.demonstration_file import made_with, read_demonstrations, split_by_task
from components.data.demonstrations import cut_to
from components.envs.base import Task
from components.models.export import Exporter
from components.models.paths import model_dir
from components.rollout.evaluation import evaluation_line, evaluation_metrics
from components.rollout.progress import play_rollouts
from components.rollout.recorder import Recorder
from components.rollout.specs import trial_specs
from components.rollout.types import Rollout
from components.rollout.workers import WorkerPool, WorkerRefused, worker_pool
from components.training import checkpoint, parallelize, run_dir, sections
from components.training.config import as_dict, as_partial, config_errors, instantiate, parse
from components.training.metrics import MetricsLog, Timer, peak_gib
from components.training.parallelize import World
from components.training.precision import MasterWeights, settle_dtype
from components.training.rng import seed_everything
from components.training.schema import Bool, Component, Float, Int, OneOf, Section, Str
from components.training.stop import StopRequested, StopSignal
from components.training.supervised import SupervisedUpdate, supervised_settings_from

SCHEMA = {
    "output_dir": Str(),
    "resume": Bool(default=False),
    "device": OneOf("auto", "cpu", "cuda", default="auto"),
    "dtype": OneOf("auto", "bf16", "fp32"),
    "num_steps": Int(min=0),
    "save_every": Int(min=1),
    "checkpoints": sections.CHECKPOINTS,
    "tensorboard": Bool(default=False),
    "model": Component(positional=1, provided=("dtype",)),
    **sections.DEMONSTRATED,
    "engine": Component(positional=1, provided=("max_tokens", "max_batch_size")),
    "demonstrations_per_step": Int(min=1),
    "max_tokens": Int(min=1),
    "held_out_frac": Float(min=0, lt=1),
    "held_out_every": Int(min=1),
    "tokens_per_batch": Int(min=1),
    "logprob_chunk": Int(min=1),
    "compile": sections.TRAINER["compile"],
    "sharding": sections.TRAINER["sharding"],
    "optimizer": sections.OPTIMIZER,
    "max_grad_norm": Float(gt=0),
    "eval": Section(sections.EVALUATION, default=None),
}


def check(cfg: DictConfig) -> list[str]:
    """What is wrong between settings that are each right alone."""
    problems = sections.demonstrated(cfg) + sections.best_metric(cfg)
    problems += sections.same_tasks(cfg, "eval.dataset")
    problems += sections.at_most(cfg, "max_tokens", "tokens_per_batch")
    problems += sections.at_most(cfg, "rollout.max_turn_tokens", "rollout.max_tokens")
    return problems


class SFTAgentic:
    """Wires the components of a config together and trains."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.world = World.alone()
        self.dtype = settle_dtype(cfg)
        self.stop = StopSignal()
        self.step, self.saved_step, self.save_s = 0, -1, 0.0
        self.pool: WorkerPool | None = None
        self.metrics: MetricsLog | None = None
        self.recorder: Recorder | None = None

    # ---- setup -------------------------------------------------------------------------------

    def setup(self) -> None:
        """Build everything. What is wrong with the config is said before compute is paid for."""
        cfg = self.cfg
        self.stop.install()
        self.world = parallelize.init_world(cfg.device)
        seed_everything(cfg.seed)
        self.source_dir = model_dir(cfg.model_dir)
        dataset = instantiate(cfg.dataset)
        self.eval_dataset = instantiate(cfg.eval.dataset) if cfg.eval else None
        self.output_dir = run_dir.check(cfg.output_dir, resume=cfg.resume, recipe="sft_agentic")
        trained = self._read_demonstrations(dataset.tasks)
        self._build_model()
        if self.eval_dataset is not None:
            self._build_evaluation()
        settings = as_dict(cfg.checkpoints, without=["export"])
        self.checkpoints = checkpoint.Checkpoints(self.output_dir, self.world, **settings)
        self.optimizer = instantiate(cfg.optimizer, self.masters.parameters())
        self.supervised = SupervisedUpdate(
            self.model,
            self.masters,
            self.optimizer,
            trained,
            settings=supervised_settings_from(as_dict(cfg)),
            world=self.world,
        )
        self.say(f"{len(trained)} demonstrations, {len(self.held_out)} of held-out tasks")
        found = checkpoint.last_whole(self.output_dir) if cfg.resume else None
        if found is not None:
            self._load(found)
        elif cfg.resume:
            self.say(f"no whole checkpoint in {self.output_dir}: starting from the beginning")
        run_dir.claim_together(
            self.output_dir,
            self.world,
            resume=cfg.resume,
            recipe="sft_agentic",
            config_yaml=OmegaConf.to_yaml(cfg),
        )
        if self.world.is_main:
            kept = self.step or -1  # at step 0 what was measured before it is repeated
            self.metrics = MetricsLog(
                self.output_dir, resume_step=kept, tensorboard=cfg.tensorboard
            )
            self.recorder = Recorder(self.output_dir / "rollouts.jsonl", resume_step=kept)

    def _read_demonstrations(self, tasks: list[Task]) -> list[Rollout]:
        """Those to train on; ``held_out`` are the others."""
        cfg = self.cfg
        demonstrations = read_demonstrations(
            cfg.demonstrations.path,
            tasks=tasks,
            settings=made_with(as_dict(cfg), model_dir=self.source_dir),
        )
        trained, held_out = split_by_task(
            demonstrations, held_out_frac=cfg.held_out_frac, seed=cfg.seed
        )
        self.held_out = self._fitting(held_out)
        return self._fitting(trained)

    def _fitting(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Demonstrations cut to ``max_tokens``."""
        cut = [cut_to(rollout, self.cfg.max_tokens) for rollout in rollouts]
        kept = [rollout for rollout in cut if rollout is not None]
        if rollouts and not kept:
            raise ValueError(
                f"max_tokens = {self.cfg.max_tokens}: no demonstration's first turn ends before it"
            )
        num_cut = sum(rollout is not old for rollout, old in zip(cut, rollouts, strict=True))
        if num_cut:
            self.say(
                f"max_tokens = {self.cfg.max_tokens}: of {len(cut)} demonstrations {num_cut} are "
                f"longer and were cut, {len(cut) - len(kept)} left out"
            )
        return kept

    def _build_model(self) -> None:
        """The policy, its fp32 master weights, and what is exported and evaluated."""
        cfg = self.cfg
        self.model, self.engine_model = parallelize.build_policy(
            partial(instantiate, cfg.model, self.source_dir),
            self.world,
            dtype=self.dtype,
            compile=cfg.compile,
            sharding=parallelize.Sharding(**as_dict(cfg.sharding)),
        )
        limit = self.model.config.max_positions
        if cfg.max_tokens > limit:
            raise ValueError(f"max_tokens = {cfg.max_tokens}: the model's context is {limit}")
        self.masters = MasterWeights(self.model)
        self.exporter = Exporter(self.engine_model, self.source_dir, what=cfg.checkpoints.export)

    def _build_evaluation(self) -> None:
        """Workers and an engine to play held-out tasks."""
        cfg = self.cfg
        limit = self.model.config.max_positions
        if cfg.rollout.max_tokens > limit:
            raise ValueError(
                f"rollout.max_tokens = {cfg.rollout.max_tokens}: the model's context is {limit}"
            )
        self.pool = worker_pool(
            make_env=as_partial(cfg.env),
            make_renderer=as_partial(cfg.renderer, tokenizer_dir=str(self.source_dir)),
            temperature=cfg.eval.temperature,
            **as_dict(cfg.rollout),
        )
        with self.stop.apart(self.world) as check_stop:
            self.pool.check_prompts(self._specs("prompts", num_trials=1), on_round=check_stop)
        self.engine = instantiate(
            cfg.engine,
            self.engine_model,
            max_tokens=cfg.rollout.max_tokens,
            max_batch_size=cfg.rollout.num_workers,
        )

    def say(self, text: str) -> None:
        """Print a line, on one rank."""
        if self.world.is_main:
            print(text, flush=True)

    # ---- training ----------------------------------------------------------------------------

    def train(self) -> None:
        """Run to ``num_steps``, saving as it goes; Ctrl-C stops cleanly with a checkpoint."""
        cfg = self.cfg
        try:
            self._measure_before()
            self._evaluate_if_due()
            while self.step < cfg.num_steps:
                self._step()
                self.checkpoints.poll()
                if self.step % cfg.save_every == 0 or self.step == cfg.num_steps:
                    self._save()
                self._evaluate_if_due()
            self._save()
        except (StopRequested, FloatingPointError) as stop:
            self._save()  # a step under way was given up before its optimizer step
            self.say(f"stopped after step {self.step}; go on with resume=true")
            if isinstance(stop, FloatingPointError):
                raise

    def _step(self) -> None:
        cfg, start, timer = self.cfg, time.perf_counter(), Timer()
        with timer("update"):
            metrics = self.supervised.step(
                self.step, check_stop=partial(self.stop.check_together, self.world)
            )
        self.step += 1
        if self.step % cfg.held_out_every == 0 or self.step == cfg.num_steps:
            with timer("held_out"):
                metrics |= self._held_out_loss()
        metrics |= {
            **timer.metrics(since=start),
            "perf/trained_tokens_per_s": metrics["pack/trained_tokens"] / timer.seconds["update"],
            "time/save_s": self.save_s,
            "mem/peak_gib": self.world.max([peak_gib(self.world.device)])[0],
        }
        if self.metrics is not None:
            self.metrics.log(self.step, metrics)
        self._say_step(metrics)

    def _held_out_loss(self) -> dict[str, float]:
        """The loss on demonstrations of tasks that are not trained on."""
        if not self.held_out:
            return {}
        return {"loss/held_out": self.supervised.loss_of(self.held_out)}

    def _measure_before(self) -> None:
        """The held-out loss before the first step."""
        if self.step == 0 and (metrics := self._held_out_loss()):
            if self.metrics is not None:
                self.metrics.log(0, metrics)
            self._say_step(metrics)

    def _say_step(self, metrics: dict[str, float]) -> None:
        columns = (
            ("loss", "loss/total", "8.4f"),
            ("held out", "loss/held_out", "8.4f"),
            ("gnorm", "train/grad_norm", "7.3f"),
            ("tok", "pack/trained_tokens", "6.0f"),
            ("s", "time/step_s", "6.1f"),
        )
        parts = [f"step {self.step:>3}/{self.cfg.num_steps}"]
        for label, name, form in columns:
            text = f"{metrics[name]:{form}}" if name in metrics else "-".rjust(int(form[0]))
            parts.append(f"{label} {text}")
        self.say("  ".join(parts))

    def _specs(self, phase: str, *, num_trials: int):
        """Orders for this rank's share of the held-out tasks."""
        assert self.eval_dataset is not None
        tasks = [(task.domain, task.id) for task in self.eval_dataset.tasks]
        specs = trial_specs(tasks, group_size=num_trials, seed=self.cfg.seed, phase=phase)
        return [spec for spec in specs if spec.group % self.world.size == self.world.rank]

    def _evaluate_if_due(self) -> None:
        """Held-out tasks with the official reward."""
        cfg, start = self.cfg, time.perf_counter()
        if self.pool is None:
            return
        due = cfg.eval.before if self.step == 0 else self.step % cfg.eval.every == 0
        done = self.metrics is not None and self.metrics.has(self.step, "eval/")  # before a resume
        if not (due or self.step == cfg.num_steps) or self.world.max([float(done)])[0]:
            return
        self._refresh()
        self.engine.sync(self.step)
        phase = f"eval/{self.step}"
        with self.stop.apart(self.world) as check_stop:
            rollouts = play_rollouts(
                self.pool,
                self.engine,
                self._specs(phase, num_trials=cfg.eval.num_trials),
                temperature=cfg.eval.temperature,
                label=phase,
                show=self.world.is_main,
                check_stop=check_stop,
            )
        rollouts = self.world.gather(rollouts)
        metrics = evaluation_metrics(rollouts, num_trials=cfg.eval.num_trials)
        if self.metrics is not None and self.recorder is not None:
            self.recorder.write(self.step, rollouts)
            seconds = time.perf_counter() - start
            self.metrics.log(self.step, {**metrics, "time/eval_s": seconds})
        self.say(evaluation_line(self.step, cfg.num_steps, metrics))

    # ---- checkpoints -------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Make the whole model equal to the trainer's shards. Collective."""
        if self.engine_model is not self.model:
            parallelize.refresh(self.engine_model, self.model)

    def _save(self) -> None:
        """Write ``step_N`` (collective); nothing is lost if that fails half-way."""
        if self.saved_step == self.step:
            return
        start = time.perf_counter()
        self._refresh()
        state = {"step": self.step, "seed": self.cfg.seed, "num_steps": self.cfg.num_steps}
        self.checkpoints.save(
            self.masters, self.optimizer, None, state, take_model=self.exporter.take
        )
        self.saved_step, self.save_s = self.step, time.perf_counter() - start

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped."""
        state = self.checkpoints.restore(
            path, self.masters, self.optimizer, None, seed=self.cfg.seed
        )
        self.step = self.saved_step = state["step"]
        self.say(f"resuming from {path.name}")
        for change in run_dir.changed_settings(self.output_dir, as_dict(self.cfg)):
            self.say(f"  changed since: {change}")
        if state["num_steps"] != self.cfg.num_steps:  # the learning rate falls over these
            self.say(
                f"  changed since: num_steps was {state['num_steps']}, is {self.cfg.num_steps}"
            )

    def cleanup(self) -> None:
        """Stop the workers and close what is open."""
        if self.pool is not None:
            self.pool.close()
        parallelize.leave_world(self.world)
        if self.metrics is not None and self.recorder is not None:
            self.metrics.close()
            self.recorder.close()


@parse(SCHEMA, check=check)
def recipe_main(cfg: DictConfig) -> None:
    """Train a policy on demonstrations of agentic tasks."""
    recipe = SFTAgentic(cfg)
    with run_dir.disk_errors(cfg.output_dir):
        try:
            with config_errors():
                recipe.setup()
            with (
                config_errors(WorkerRefused, FloatingPointError),
                recipe.checkpoints.finishing(),
            ):
                recipe.train()
        except StopRequested:
            recipe.say("stopped before the first step: there is nothing to save yet")
        finally:
            recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
