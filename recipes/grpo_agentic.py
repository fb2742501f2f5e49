"""GRPO on agentic environments: one device, or many with FSDP2, in one file.

    tune run recipes/grpo_agentic.py --config configs/retail.yaml
    tune run --nproc_per_node 2 recipes/grpo_agentic.py --config configs/retail.yaml

One step: draw tasks, play a group of rollouts per task with the current policy, score each with
the benchmark's own checker, turn rewards into group-normalised advantages, pack the rollouts into
prefix trees, and take one clipped policy-gradient step. There is no value model: the other rollouts
of the same task are the baseline (DeepSeekMath, https://arxiv.org/abs/2402.03300).

recipes/grpo_agentic.md explains every setting and every metric. Copy this file to change the
algorithm (``tune cp grpo_agentic my_recipe.py``): it only wires components together.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from components.data.dataset import task_loader
from components.envs.base import Task
from components.models.export import Exporter
from components.models.paths import model_dir
from components.rl.groups import trained_items
from components.rl.objective import objective_from
from components.rl.packing import PackItem
from components.rollout.evaluation import evaluation_line, evaluation_metrics
from components.rollout.progress import play_rollouts
from components.rollout.recorder import Recorder
from components.rollout.specs import group_specs, trial_specs
from components.rollout.stats import rollout_metrics, sampled_tokens, staleness_metrics
from components.rollout.types import Rollout, RolloutSpec
from components.rollout.workers import WorkerPool, WorkerRefused, worker_pool
from components.training import checkpoint, parallelize, run_dir, sections, update, update_checks
from components.training.ahead import Apart, Batches, batch_settings_from
from components.training.config import as_dict, as_partial, config_errors, instantiate, parse
from components.training.guards import GuardStop, guards_from
from components.training.metrics import MetricsLog, Timer, console_line, peak_gib
from components.training.model_metrics import model_metrics
from components.training.parallelize import World
from components.training.plot import plot_run
from components.training.policy_update import PolicyUpdate
from components.training.precision import MasterWeights, settle_dtype
from components.training.reference import reference_policy
from components.training.rng import seed_everything
from components.training.schema import Bool, Component, Float, Int, OneOf, Section, Str
from components.training.stop import StopRequested, StopSignal
from components.training.supervised import supervised_settings_from
from components.training.warm_cache import cache_key
from components.training.warm_start import demonstrate_tasks, warm_start

SCHEMA = {
    "output_dir": Str(),
    "resume": Bool(default=False),
    "seed": Int(min=0),
    "device": OneOf("auto", "cpu", "cuda", default="auto"),
    "dtype": OneOf("auto", "bf16", "fp32"),
    "num_steps": Int(min=0),
    "save_every": Int(min=1),
    "checkpoints": sections.CHECKPOINTS,
    "tensorboard": Bool(default=False),
    "model_dir": Str(),
    "model": Component(positional=1, provided=("dtype",)),
    "renderer": Component(provided=("tokenizer_dir",)),
    "env": Component(provided=("checker",)),
    "checker": Component(),
    "dataset": Component(),
    "train_on_any_split": Bool(default=False),
    "tasks_per_step": Int(min=1),
    "rollout": sections.TRAINED_ROLLOUT,
    "engine": Component(positional=1, provided=("max_tokens", "max_batch_size")),
    "tokens_per_batch": Int(min=1),
    "logprob_chunk": Int(min=1),
    **sections.UPDATE,
    **sections.TRAINER,
    "optimizer": sections.OPTIMIZER,
    "max_grad_norm": Float(gt=0),
    "probe_update": Bool(default=True),
    "warm_start": sections.WARM_START,
    "eval": Section(sections.EVALUATION, default=None),
}


def check(cfg: DictConfig) -> list[str]:
    """What is wrong between settings that are each right alone."""
    problems = sections.train_split(cfg) + sections.best_metric(cfg)
    problems += sections.whole_distribution(cfg)
    problems += sections.same_tasks(cfg, "dataset") + sections.same_tasks(cfg, "eval.dataset")
    problems += update_checks.update_options(cfg)
    problems += sections.at_most(cfg, "rollout.max_tokens", "tokens_per_batch")
    problems += sections.at_most(cfg, "rollout.max_turn_tokens", "rollout.max_tokens")
    if cfg.warm_start.num_steps:
        problems += sections.at_most(cfg, "warm_start.max_tokens", "tokens_per_batch")
    return problems


class GRPOAgentic:
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
        self.dataset = instantiate(cfg.dataset)
        self.eval_dataset = instantiate(cfg.eval.dataset) if cfg.eval else None
        self.objective = objective_from(as_dict(cfg), loss=instantiate(cfg.loss))
        self.output_dir = run_dir.check(cfg.output_dir, resume=cfg.resume, recipe="grpo_agentic")
        self.pool = worker_pool(
            make_env=as_partial(cfg.env, checker=instantiate(cfg.checker)),
            make_renderer=as_partial(cfg.renderer, tokenizer_dir=str(self.source_dir)),
            **as_dict(cfg.rollout, without=["group_size", "max_staleness"]),
        )
        everything = [*self.dataset.tasks, *(self.eval_dataset.tasks if self.eval_dataset else ())]
        with self.stop.apart(self.world) as check_stop:
            specs = self._specs(everything, group_size=1, phase="prompts")
            self.pool.check_prompts(specs, on_round=check_stop)
        self._build_model()
        # One by one: with dynamic sampling a step draws as many as it needs.
        self.loader = task_loader(self.dataset, tasks_per_step=1, seed=cfg.seed)
        settings = as_dict(cfg.checkpoints, without=["export"])
        self.checkpoints = checkpoint.Checkpoints(self.output_dir, self.world, **settings)
        found = checkpoint.last_whole(self.output_dir) if cfg.resume else None
        if found is None:
            if cfg.resume:
                self.say(f"no whole checkpoint in {self.output_dir}: starting from the beginning")
            self._warm_start()
        self.optimizer = instantiate(cfg.optimizer, self.masters.parameters())
        beta = self.objective.loss.beta
        self.reference = reference_policy(self.model, beta=beta, **as_dict(cfg.reference))
        self.guards = guards_from(as_dict(cfg.guards), say=self.say)
        self.update_policy = PolicyUpdate(
            self.model,
            self.masters,
            self.optimizer,
            objective=self.objective,
            reference=self.reference,
            settings=update.update_settings_from(as_dict(cfg)),
            world=self.world,
            guards=self.guards,
        )
        if found is not None:
            self._load(found)
        self._sync_engine()
        self.batches = Batches(
            self.loader,
            play=self._play,
            sync=self._sync_engine,
            settings=batch_settings_from(as_dict(cfg)),
            step=self.step,
            stop=self.stop,
            world=self.world,
        )
        run_dir.claim_together(
            self.output_dir,
            self.world,
            resume=cfg.resume,
            recipe="grpo_agentic",
            config_yaml=OmegaConf.to_yaml(cfg),
        )
        if self.world.is_main:
            kept = self.step or -1  # at step 0 the evaluation before it is repeated
            self.metrics = MetricsLog(
                self.output_dir, resume_step=kept, tensorboard=cfg.tensorboard
            )
            self.recorder = Recorder(self.output_dir / "rollouts.jsonl", resume_step=kept)

    def _build_model(self) -> None:
        """The policy, its fp32 master weights, and the engine that samples from it."""
        cfg = self.cfg
        make_model = partial(instantiate, cfg.model, self.source_dir)
        self.model, self.engine_model = parallelize.build_policy(
            make_model,
            self.world,
            dtype=self.dtype,
            compile=cfg.compile,
            sharding=parallelize.Sharding(**as_dict(cfg.sharding)),
            engine_apart=update_checks.engine_apart(cfg),
        )
        sections.check_context(cfg, self.model.config.max_positions)
        self.masters = MasterWeights(self.model)
        self.whole_model = self.model if self.world.size == 1 else self.engine_model
        self.exporter = Exporter(self.whole_model, self.source_dir, what=cfg.checkpoints.export)
        self.engine = instantiate(
            cfg.engine,
            self.engine_model,
            max_tokens=cfg.rollout.max_tokens,
            max_batch_size=cfg.rollout.num_workers,
        )

    def _warm_start(self) -> None:
        """Supervised steps on demonstrations of training tasks, or their cached result."""
        cfg, settings = self.cfg, self.cfg.warm_start
        if settings.num_steps == 0:
            return
        assert self.pool is not None
        device = self.world.device.type
        key = cache_key(as_dict(cfg), model_dir=self.source_dir, device=device)
        warm_start(
            self.model,
            self.masters,
            instantiate(settings.optimizer, self.masters.parameters()),
            demonstrate=partial(
                demonstrate_tasks,
                self.pool,
                self.dataset.tasks,
                make_oracle=as_partial(settings.oracle),
                num_demonstrations=settings.num_demonstrations,
                max_tokens=settings.max_tokens,
                seed=cfg.seed,
                world=self.world,
                stop=self.stop,
            ),
            settings=supervised_settings_from(as_dict(cfg)),
            key=key if settings.use_cache else None,
            world=self.world,
            stop=self.stop,
            say=self.say,
        )

    def say(self, text: str) -> None:
        """Print a line, on one rank."""
        if self.world.is_main:
            print(text, flush=True)

    def _sync_engine(self) -> Mapping[str, float]:
        """Make the engine sample from the trainer's weights, stamped with the step."""
        if self.engine_model is not self.model:
            parallelize.refresh(self.engine_model, self.model)
        self.update_policy.remember(self.step)
        return self.engine.sync(self.step)

    # ---- one step ----------------------------------------------------------------------------

    def train(self) -> None:
        """Run to ``num_steps``, saving as it goes; Ctrl-C stops cleanly with a checkpoint."""
        cfg = self.cfg
        try:
            self._evaluate_if_due()
            while self.step < cfg.num_steps:
                metrics = self._step()
                self.checkpoints.poll()
                self.guards.after_step(metrics)
                if self.step % cfg.save_every == 0 or self.step == cfg.num_steps:
                    self._save()
                self._evaluate_if_due()
            self._save()
        except (StopRequested, GuardStop) as stop:
            self.batches.close()
            self._save()  # a step under way was given up before its optimizer step
            self.checkpoints.wait()
            self.say(f"stopped after step {self.step}; go on with resume=true")
            if isinstance(stop, GuardStop):
                raise
        finally:
            self.batches.close()
        if self.world.is_main:
            plot_run(self.output_dir)

    def _step(self) -> dict[str, float]:
        cfg, start, timer = self.cfg, time.perf_counter(), Timer()
        played = self.batches.take(timer)
        items, advantages = trained_items(
            played.rollouts, mask_overlong=cfg.mask_overlong, **as_dict(cfg.advantages)
        )
        with timer("update"):
            metrics, probe = self._update(items)
        self.step += 1
        if self.reference is not None:
            self.reference.reset_if_due(self.step)
        if probe is not None and cfg.probe_update:
            with timer("probe"), torch.no_grad():
                batch, plan, old = probe
                new = self.update_policy.logprobs(batch, plan)[0]
                metrics |= update.logprob_gain(new, old, batch, self.world)
        metrics |= self.batches.finish(self.step, timer)
        everyone = self.world.gather(played.rollouts)
        metrics = {
            **rollout_metrics(everyone),
            **staleness_metrics(everyone, version=self.step - 1),
            **update.group_metrics(advantages, self.world),
            **played.metrics,
            **metrics,
            **timer.metrics(since=start),
            "perf/rollout_s": played.seconds,
            "perf/sampled_tokens_per_s": sampled_tokens(everyone) / played.seconds,
            "perf/trained_tokens_per_s": metrics["pack/trained_tokens"] / timer.seconds["update"],
            "time/save_s": self.save_s,
            "mem/peak_gib": self.world.max([peak_gib(self.world.device)])[0],
        }
        if self.metrics is not None and self.recorder is not None:
            self.recorder.write(self.step, everyone)
            self.metrics.log(self.step, metrics)
        self.say(console_line(self.step, cfg.num_steps, metrics))
        if probe is None:
            self.say(f"{'':10}{update.why_nothing_changed(metrics)}")
        return metrics

    def _specs(
        self, tasks: Sequence[Task], first_group: int = 0, *, group_size: int, phase: str
    ) -> list[RolloutSpec]:
        """Orders for this rank's share of the tasks."""
        make = trial_specs if phase.startswith("eval/") else group_specs
        specs = make(
            [(task.domain, task.id) for task in tasks],
            group_size=group_size,
            seed=self.cfg.seed,
            phase=phase,
            first_group=first_group,
        )
        return [spec for spec in specs if spec.group % self.world.size == self.world.rank]

    def _play(
        self,
        tasks: Sequence[Task],
        first_group: int,
        group_size: int,
        phase: str,
        temperature: float,
        apart: Apart | None = None,
    ) -> list[Rollout]:
        """Rollouts of this rank's share of the tasks; with ``apart``, in another thread."""
        assert self.pool is not None
        with (apart or partial(self.stop.apart, self.world))() as check_stop:
            return play_rollouts(
                self.pool,
                self.engine,
                self._specs(tasks, first_group, group_size=group_size, phase=phase),
                temperature=temperature,
                label=phase,
                show=self.world.is_main and apart is None,
                check_stop=check_stop,
            )

    def _update(self, items: Sequence[PackItem]) -> tuple[dict[str, float], tuple | None]:
        """The optimizer steps on all ranks' rollouts.

        Returns:
            Metrics; the first row, its mask plan and its log-probabilities before the steps, or
            None when there was nothing to train.
        """
        rows, metrics = update.packed_rows(
            items, tokens_per_batch=self.cfg.tokens_per_batch, world=self.world
        )
        metrics["train/lr"] = self.optimizer.param_groups[0]["lr"]
        if metrics["pack/trained_tokens"] == 0:
            return metrics, None
        dump = self.output_dir / f"not_finite_step_{self.step + 1}_rank_{self.world.rank}.pt"
        found, first = self.update_policy(
            rows,
            check_stop=lambda: self.stop.check_together(self.world),
            model_metrics=lambda: model_metrics(self.model, self.whole_model, items, self.world),
            dump=dump,
            versions=self.batches.versions,
        )
        return metrics | found, first

    def _evaluate_if_due(self) -> None:
        """Held-out tasks with the official reward; recorded beside the training rollouts."""
        cfg, start = self.cfg, time.perf_counter()
        if self.eval_dataset is None:
            return
        due = cfg.eval.before if self.step == 0 else self.step % cfg.eval.every == 0
        done = self.metrics is not None and self.metrics.has(self.step, "eval/")  # before a resume
        if not (due or self.step == cfg.num_steps) or self.world.max([float(done)])[0]:
            return
        self.batches.settle()
        num_trials, tasks = cfg.eval.num_trials, self.eval_dataset.tasks
        rollouts = self._play(tasks, 0, num_trials, f"eval/{self.step}", cfg.eval.temperature)
        rollouts = self.world.gather(rollouts)
        metrics = evaluation_metrics(rollouts, num_trials=num_trials)
        if self.metrics is not None and self.recorder is not None:
            self.recorder.write(self.step, rollouts)
            self.metrics.log(self.step, {**metrics, "time/eval_s": time.perf_counter() - start})
        self.say(evaluation_line(self.step, cfg.num_steps, metrics))

    # ---- checkpoints -------------------------------------------------------------------------

    def _save(self) -> None:
        """Write ``step_N`` (collective); nothing is lost if that fails half-way."""
        if self.saved_step == self.step:
            return
        if self.world.size > 1:
            self.batches.settle()  # the model is written from the engine's copy
        start = time.perf_counter()
        state = {"step": self.step, "loader": self.batches.loader_state, "seed": self.cfg.seed}
        state["guards"] = self.guards.state_dict()
        trained = (self.masters, self.optimizer, self.reference)
        self.checkpoints.save(*trained, state, take_model=self.exporter.take)
        self.saved_step, self.save_s = self.step, time.perf_counter() - start

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped."""
        trained = (self.masters, self.optimizer, self.reference)
        state = self.checkpoints.restore(path, *trained, seed=self.cfg.seed)
        self.loader.load_state_dict(state["loader"])
        self.guards.load_state_dict(state["guards"])
        self.step = self.saved_step = state["step"]
        self.say(f"resuming from {path.name}")
        for change in run_dir.changed_settings(self.output_dir, as_dict(self.cfg)):
            self.say(f"  changed since: {change}")

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
    """Train a policy with GRPO on an agentic environment."""
    recipe = GRPOAgentic(cfg)
    with run_dir.disk_errors(cfg.output_dir):
        try:
            with config_errors():
                recipe.setup()
            with config_errors(WorkerRefused, GuardStop), recipe.checkpoints.finishing():
                recipe.train()
        except StopRequested:
            recipe.say("stopped before the first step: there is nothing to save yet")
        finally:
            recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
