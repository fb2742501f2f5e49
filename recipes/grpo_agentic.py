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
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from components.attention.plan import MaskPlan
from components.data.dataset import task_loader
from components.envs.base import Task
from components.models.paths import model_dir
from components.models.weights import save_hf
from components.rl.forward import packed_logprobs
from components.rl.groups import trained_items
from components.rl.losses import mismatch, truncated_importance_weights
from components.rl.packing import PackedBatch, PackItem, empty_batch, pack, pack_stats
from components.rollout.evaluation import evaluation_line, evaluation_metrics
from components.rollout.recorder import Recorder
from components.rollout.specs import group_specs
from components.rollout.stats import rollout_metrics, sampled_tokens
from components.rollout.types import Rollout, RolloutSpec
from components.rollout.workers import WorkerPool, WorkerRefused, worker_pool
from components.training import checkpoint, run_dir
from components.training.config import (
    Bool,
    Component,
    Float,
    Int,
    OneOf,
    Section,
    Str,
    as_dict,
    as_partial,
    at_most,
    config_errors,
    instantiate,
    parse,
)
from components.training.metrics import MetricsLog, Timer, console_line, peak_gib
from components.training.model_metrics import model_metrics
from components.training.parallelize import (
    World,
    clip_grad_norm,
    init_world,
    leave_world,
    refresh,
    shard,
)
from components.training.plot import plot_run
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from components.training.run_dir import disk_errors
from components.training.sections import EVALUATION, ROLLOUT, WARM_START
from components.training.stop import StopRequested, StopSignal
from components.training.supervised import SupervisedSettings
from components.training.update import (
    UpdateTotals,
    check_finite,
    group_metrics,
    logprob_gain,
)
from components.training.warm_start import demonstrate_tasks, warm_start

SCHEMA = {
    "output_dir": Str(),
    "resume": Bool(default=False),
    "seed": Int(min=0),
    "device": OneOf("auto", "cpu", "cuda", default="auto"),
    "dtype": OneOf("bf16", "fp32"),
    "num_steps": Int(min=0),
    "save_every": Int(min=1),
    "keep_resume_states": Int(min=0, default=1),
    "tensorboard": Bool(default=False),
    "model_dir": Str(),
    "model": Component(positional=1, provided=("dtype",)),
    "renderer": Component(provided=("tokenizer_dir",)),
    "env": Component(provided=("checker",)),
    "checker": Component(),
    "dataset": Component(),
    "train_on_any_split": Bool(default=False),
    "tasks_per_step": Int(min=1),
    "rollout": {"group_size": Int(min=1), "temperature": Float(gt=0), **ROLLOUT},
    "engine": Component(positional=1, provided=("max_tokens", "max_batch_size")),
    "tokens_per_batch": Int(min=1),
    "logprob_chunk": Int(min=1),
    "advantages": {"normalize_std": Bool(), "eps": Float(min=0, default=1e-6)},
    "loss": Component(),
    "importance_cap": Float(min=1, default=None),
    "optimizer": Component(positional=1),
    "max_grad_norm": Float(gt=0),
    "probe_update": Bool(default=True),
    "warm_start": WARM_START,
    "eval": Section(EVALUATION, default=None),
}

WARM_START_KEYS = (
    *("seed", "dtype", "model_dir", "model", "env", "dataset", "renderer"),
    *("tokens_per_batch", "max_grad_norm", "warm_start"),
)
"""What the result of a warm start depends on: the key of its cache."""


def check(cfg: DictConfig) -> list[str]:
    """What is wrong between settings that are each right alone."""
    problems = at_most(cfg, "rollout.max_tokens", "tokens_per_batch")
    if cfg.dataset.get("split", "train") != "train" and not cfg.train_on_any_split:
        problems.append(
            f"dataset.split = {cfg.dataset.split}: training is on the train split; "
            "train_on_any_split=true allows another"
        )
    for dataset in ("dataset", "eval.dataset"):
        domain = OmegaConf.select(cfg, f"{dataset}.domain")
        if domain is not None and domain != cfg.env.get("domain", domain):
            problems.append(f"{dataset}.domain = {domain}: must be env.domain = {cfg.env.domain}")
    problems += at_most(cfg, "rollout.max_turn_tokens", "rollout.max_tokens")
    if cfg.warm_start.num_steps:
        problems += at_most(cfg, "warm_start.max_tokens", "tokens_per_batch")
    return problems


class GRPOAgentic:
    """Wires the components of a config together and trains."""

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.world = World.alone()
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.dtype]
        self.stop = StopSignal()
        self.step = 0
        self.saved_step = -1
        self.pool: WorkerPool | None = None
        self.metrics: MetricsLog | None = None
        self.recorder: Recorder | None = None

    # ---- setup -------------------------------------------------------------------------------

    def setup(self) -> None:
        """Build everything. What is wrong with the config is said before compute is paid for."""
        cfg = self.cfg
        self.stop.install()
        self.world = init_world(cfg.device)
        torch.manual_seed(cfg.seed)
        self.source_dir = model_dir(cfg.model_dir)
        self.dataset = instantiate(cfg.dataset)
        self.eval_dataset = instantiate(cfg.eval.dataset) if cfg.eval else None
        self.loss = instantiate(cfg.loss)
        self.output_dir = run_dir.check(cfg.output_dir, resume=cfg.resume, recipe="grpo_agentic")
        self.pool = worker_pool(
            make_env=as_partial(cfg.env, checker=instantiate(cfg.checker)),
            make_renderer=as_partial(cfg.renderer, tokenizer_dir=str(self.source_dir)),
            **as_dict(cfg.rollout, without=["group_size"]),
        )
        everything = [*self.dataset.tasks, *(self.eval_dataset.tasks if self.eval_dataset else ())]
        self.pool.check_prompts(self._specs(everything, group_size=1, phase="prompts"))
        self._build_model()
        self.loader = task_loader(self.dataset, tasks_per_step=cfg.tasks_per_step, seed=cfg.seed)
        found = checkpoint.last_whole(self.output_dir) if cfg.resume else None
        if found is None:
            if cfg.resume:
                self._say(f"no whole checkpoint in {self.output_dir}: starting from the beginning")
            self._warm_start()
        self.optimizer = instantiate(cfg.optimizer, self.masters.parameters())
        self.reference = ReferencePolicy(self.model) if self.loss.beta > 0 else None
        if found is not None:
            self._load(found)
        self._sync_engine()
        run_dir.claim_together(
            self.output_dir,
            self.world,
            resume=cfg.resume,
            recipe="grpo_agentic",
            config_yaml=OmegaConf.to_yaml(cfg),
        )
        kept = self.step or -1  # at step 0 the evaluation before it is repeated
        if self.world.is_main:
            self.metrics = MetricsLog(
                self.output_dir, resume_step=kept, tensorboard=cfg.tensorboard
            )
            self.recorder = Recorder(self.output_dir / "rollouts.jsonl", resume_step=kept)

    def _build_model(self) -> None:
        """The policy, its fp32 master weights, and the engine that samples from it.

        Alone, trainer and engine share one module: it computes in ``dtype`` and the optimizer works
        on fp32 copies. With FSDP2 the trainer holds fp32 shards and the engine an unsharded copy
        that is refreshed after each step, so sampling never runs inside sharded forwards.
        """
        cfg, world = self.cfg, self.world
        if world.size == 1:
            self.model = instantiate(cfg.model, self.source_dir, dtype=self.dtype).to(world.device)
            self.engine_model = self.model
        else:
            self.engine_model = instantiate(cfg.model, self.source_dir, dtype=self.dtype)
            self.engine_model.to(world.device).requires_grad_(False)
            self.model = instantiate(cfg.model, self.source_dir, dtype=torch.float32)
            shard(self.model.to(world.device), world, dtype=self.dtype)
        limit = self.model.config.max_positions
        if cfg.rollout.max_tokens > limit:
            raise ValueError(
                f"rollout.max_tokens = {cfg.rollout.max_tokens}: the model's context is {limit}"
            )
        self.masters = MasterWeights(self.model)
        self.engine = instantiate(
            cfg.engine,
            self.engine_model,
            max_tokens=cfg.rollout.max_tokens,
            max_batch_size=cfg.rollout.num_workers,
        )

    def _warm_start(self) -> None:
        """Supervised steps on demonstrations of training tasks, or their cached result."""
        cfg, settings = self.cfg, self.cfg.warm_start
        assert self.pool is not None
        if settings.num_steps == 0:
            return
        depends_on = as_dict(OmegaConf.masked_copy(cfg, [*WARM_START_KEYS]))
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
            ),
            settings=SupervisedSettings(
                num_steps=settings.num_steps,
                demonstrations_per_step=settings.demonstrations_per_step,
                tokens_per_batch=cfg.tokens_per_batch,
                logprob_chunk=cfg.logprob_chunk,
                max_grad_norm=cfg.max_grad_norm,
                seed=cfg.seed,
            ),
            cache_key=depends_on if settings.use_cache else None,
            world=self.world,
            check_stop=self._stop_together,
            say=self._say,
        )

    def _say(self, text: str) -> None:
        if self.world.is_main:
            print(text, flush=True)

    def _sync_engine(self) -> None:
        """Make the engine sample from the trainer's weights, stamped with the step."""
        if self.engine_model is not self.model:
            refresh(self.engine_model, self.model)
        self.engine.sync(self.step)

    # ---- one step ----------------------------------------------------------------------------

    def train(self) -> None:
        """Run to ``num_steps``, saving as it goes; Ctrl-C stops cleanly with a checkpoint."""
        cfg = self.cfg
        tasks = iter(self.loader)
        loader_state = self.loader.state_dict()
        try:
            if self.step == 0 and cfg.eval and cfg.eval.before:
                self._evaluate()
            while self.step < cfg.num_steps:
                self._step(next(tasks))
                loader_state = self.loader.state_dict()
                last = self.step == cfg.num_steps
                if last or self.step % cfg.save_every == 0:
                    self._save(loader_state)
                if cfg.eval and (last or self.step % cfg.eval.every == 0):
                    self._evaluate()
        except StopRequested:
            # A step under way was given up before its optimizer step.
            self._save(loader_state)
            self._say(f"stopped after step {self.step}; go on with resume=true")
        if self.world.is_main:
            plot_run(self.output_dir)

    def _step(self, tasks: Sequence[Task]) -> None:
        cfg, start, timer = self.cfg, time.perf_counter(), Timer()
        with timer("rollout"):
            rollouts = self._play(
                tasks, cfg.rollout.group_size, f"train/{self.step + 1}", cfg.rollout.temperature
            )
        items, advantages = trained_items(
            rollouts, normalize_std=cfg.advantages.normalize_std, eps=cfg.advantages.eps
        )
        with timer("update"):
            update, probe = self._update(items)
        self.step += 1
        if probe is not None and cfg.probe_update:
            with timer("probe"), torch.no_grad():
                batch, plan, old = probe
                update |= logprob_gain(self._logprobs(batch, plan)[0], old, batch, self.world)
        with timer("sync"):
            self._sync_engine()
        everyone = self.world.gather(rollouts)
        metrics = {
            **rollout_metrics(everyone),
            **group_metrics(advantages, self.world),
            **update,
            **timer.metrics(since=start),
            "perf/sampled_tokens_per_s": sampled_tokens(everyone) / timer.seconds["rollout"],
            "perf/trained_tokens_per_s": update["pack/trained_tokens"] / timer.seconds["update"],
            "mem/peak_gib": self.world.max([peak_gib(self.world.device)])[0],
        }
        if self.metrics is not None and self.recorder is not None:
            self.recorder.write(self.step, everyone)
            self.metrics.log(self.step, metrics)
        self._say(console_line(self.step, cfg.num_steps, metrics))
        if update["pack/trained_tokens"] == 0:
            self._say(
                "          no group had rollouts with different rewards, so there was nothing to "
                "learn from in this step and the weights did not change"
            )

    def _specs(self, tasks: Sequence[Task], *, group_size: int, phase: str) -> list[RolloutSpec]:
        """Orders for this rank's share of the tasks."""
        named = [(task.domain, task.id) for task in tasks]
        specs = group_specs(named, group_size=group_size, seed=self.cfg.seed, phase=phase)
        return [spec for spec in specs if spec.group % self.world.size == self.world.rank]

    def _play(
        self, tasks: Sequence[Task], group_size: int, phase: str, temperature: float
    ) -> list[Rollout]:
        """Rollouts of this rank's share of the tasks."""
        assert self.pool is not None
        world = self.world
        specs = self._specs(tasks, group_size=group_size, phase=phase)
        with tqdm(
            total=len(specs),
            desc=phase,
            unit="rollout",
            leave=False,
            disable=None if world.is_main else True,  # None: shown on a terminal only
        ) as bar:
            return self.pool.run(
                specs,
                self.engine,
                temperature=temperature,
                on_done=lambda _: bar.update(),
                on_round=self.stop.check if world.size == 1 else None,
            )

    def _update(self, items: Sequence[PackItem]) -> tuple[dict[str, float], tuple | None]:
        """One optimizer step over all ranks' rollouts.

        Returns:
            Metrics; the first row, its mask plan and its log-probabilities before the step, or
            None when there was nothing to train.
        """
        cfg, world = self.cfg, self.world
        batches = pack(items, tokens_per_batch=cfg.tokens_per_batch)
        num_batches = int(world.max([len(batches)])[0])
        batches += [empty_batch()] * (num_batches - len(batches))
        stats = pack_stats(items, batches)
        computed, tokens, trained = world.sum(
            [stats.computed_tokens, stats.rollout_tokens, stats.trained_tokens]
        )
        metrics = {
            "pack/saving": computed / tokens if tokens else 1.0,
            "pack/trained_tokens": trained,
            "pack/num_batches": float(num_batches),
            "train/lr": self.optimizer.param_groups[0]["lr"],
        }
        if trained == 0:
            return metrics, None
        batches = [batch.to(world.device) for batch in batches]
        plans = [MaskPlan.from_tree(batch.tree) for batch in batches]
        totals = UpdateTotals()
        first = None
        for batch, plan in zip(batches, plans, strict=True):
            self._stop_together()
            reference = self._reference_logprobs(batch, plan)
            logprobs, entropy = self._logprobs(batch, plan)
            old = logprobs.detach()
            first = first or (batch, plan, old)
            weights = None
            if cfg.importance_cap is not None:
                weights = truncated_importance_weights(
                    old, batch.generator_logprobs, cap=cfg.importance_cap
                )
            out = self.loss(
                logprobs,
                old_logprobs=old,
                advantages=batch.advantages,
                denominator=trained,
                ref_logprobs=reference,
                is_weights=weights,
            )
            # FSDP2 averages gradients over ranks; the denominator already counts all ranks.
            (out.loss * world.size).backward()
            totals.add(out, entropy=entropy, gap=mismatch(old, batch.generator_logprobs))
        metrics |= totals.metrics(world)
        metrics |= model_metrics(self.model, self.engine_model, items, world)
        metrics["train/grad_norm"] = clip_grad_norm(self.masters.parameters(), cfg.max_grad_norm)
        check_finite(metrics, batches, output_dir=self.output_dir, step=self.step + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.publish()
        return metrics, first

    def _logprobs(self, batch: PackedBatch, plan: MaskPlan):
        return packed_logprobs(
            self.model,
            batch,
            plan=plan,
            temperature=self.cfg.rollout.temperature,
            chunk_size=self.cfg.logprob_chunk,
            compute_entropy=True,
        )

    def _reference_logprobs(self, batch: PackedBatch, plan: MaskPlan) -> torch.Tensor | None:
        if self.reference is None:
            return None
        with self.reference.swapped_in():
            return self._logprobs(batch, plan)[0]

    def _stop_together(self) -> None:
        """Give up what is under way if any rank was asked to stop: all of them leave, or none."""
        if self.world.max([float(self.stop.requested)])[0]:
            raise StopRequested

    def _evaluate(self) -> None:
        """Held-out tasks with the official reward; recorded beside the training rollouts."""
        cfg = self.cfg
        assert self.eval_dataset is not None
        phase = f"eval/{self.step}"
        rollouts = self.world.gather(
            self._play(self.eval_dataset.tasks, cfg.eval.num_trials, phase, cfg.eval.temperature)
        )
        metrics = evaluation_metrics(rollouts, num_trials=cfg.eval.num_trials)
        if self.metrics is not None and self.recorder is not None:
            self.recorder.write(self.step, rollouts)
            self.metrics.log(self.step, metrics)
        self._say(evaluation_line(self.step, cfg.num_steps, metrics))

    # ---- checkpoints -------------------------------------------------------------------------

    def _save(self, loader_state: dict) -> None:
        """Write ``step_N`` (collective); nothing is lost if that fails half-way."""
        if self.saved_step == self.step:
            return
        state = {"step": self.step, "loader": loader_state, "seed": self.cfg.seed}
        checkpoint.save(
            self.output_dir,
            self.step,
            checkpoint.gather(self.masters, self.optimizer, self.reference, state),
            save_model=lambda path: save_hf(self.engine_model, path, self.source_dir),
            world=self.world,
            keep_resume_states=self.cfg.keep_resume_states,
        )
        self.saved_step = self.step

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint as if the run had never stopped."""
        state = checkpoint.restore(
            path, self.masters, self.optimizer, self.reference, seed=self.cfg.seed
        )
        self.loader.load_state_dict(state["loader"])
        self.step = self.saved_step = state["step"]
        self._say(f"resuming from {path.name}")

    def cleanup(self) -> None:
        """Stop the workers and close what is open."""
        if self.pool is not None:
            self.pool.close()
        if self.metrics is not None and self.recorder is not None:
            self.metrics.close()
            self.recorder.close()
        leave_world(self.world)


@parse(SCHEMA, check=check)
def recipe_main(cfg: DictConfig) -> None:
    """Train a policy with GRPO on an agentic environment."""
    recipe = GRPOAgentic(cfg)
    try:
        with config_errors():
            recipe.setup()
        with config_errors(WorkerRefused), disk_errors(recipe.output_dir):
            recipe.train()
    except StopRequested:
        print("stopped before the first step: there is nothing to save yet")
    finally:
        recipe.cleanup()


if __name__ == "__main__":
    sys.exit(recipe_main())
