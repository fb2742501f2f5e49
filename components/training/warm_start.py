"""The warm start: supervised steps on an oracle's demonstrations, made once and cached.

An untrained small model never emits a tool call, so every rollout of a group fails alike and GRPO
has nothing to learn from. A few supervised steps on training tasks give it a start.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from components.data.demonstrations import Demonstrations, collect
from components.data.oracles import play
from components.envs.base import Task
from components.models.decoder import PolicyModel
from components.models.paths import sinkflex_home
from components.rollout.specs import group_specs
from components.rollout.workers import Failure, WorkerPool
from components.training.checkpoint import load_weights
from components.training.parallelize import World, full_tensor
from components.training.precision import MasterWeights
from components.training.run_dir import write_text
from components.training.supervised import SupervisedSettings, supervised_steps

FORMAT = 1
"""Raise it when a change here or in the demonstrations makes cached warm starts stale."""


def demonstrate_tasks(
    pool: WorkerPool,
    tasks: Sequence[Task],
    *,
    make_oracle: Callable[..., Any],
    num_demonstrations: int,
    max_tokens: int,
    seed: int,
    world: World,
) -> Demonstrations:
    """Play demonstrations in the workers of all ranks.

    Args:
        pool: this rank's workers.
        tasks: training tasks; the first ``num_demonstrations`` of a seeded order are demonstrated.
        make_oracle: ``make_oracle(spec)`` gives the demonstrator of one episode; picklable.
        num_demonstrations: how many; those below the full official reward are dropped and counted.
        max_tokens: longer demonstrations are cut after the last whole turn that fits.
        seed: of the order and of the episodes.
        world: this process among its peers.

    Returns:
        The same demonstrations in the same order on every rank.

    Raises:
        RuntimeError: if a worker failed.
    """
    chosen = list(tasks)
    random.Random(f"{seed}/demonstrations").shuffle(chosen)
    specs = group_specs(
        [(task.domain, task.id) for task in chosen[:num_demonstrations]],
        group_size=1,
        seed=seed,
        phase="demonstration",
    )
    mine = specs[world.rank :: world.size]
    results = pool.run_local(play, [(spec, make_oracle) for spec in mine])
    for spec, result in zip(mine, results, strict=True):
        if isinstance(result, Failure):
            raise RuntimeError(f"demonstration {spec.rollout_id}: {result.error}")
    played = {rollout.spec.rollout_id: rollout for rollout in world.gather(results)}
    return collect(
        specs, play=lambda spec: played[spec.rollout_id], max_tokens=max_tokens, cut=True
    )


def warm_start(
    model: PolicyModel,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    *,
    demonstrate: Callable[[], Demonstrations],
    settings: SupervisedSettings,
    cache_key: Any | None,
    world: World,
    check_stop: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Teach the model the format and the protocol, or load what an equal warm start left.

    Args:
        model: changed in place.
        masters: its fp32 weights.
        optimizer: of ``masters``; used for these steps only.
        demonstrate: makes the demonstrations; not called when the cache has the result.
        settings: of the supervised steps.
        cache_key: JSON-able, everything that the result depends on; None turns the cache off.
        world: this process among its peers.
        check_stop: raises when the run was asked to stop.
        say: prints a line.

    Raises:
        ValueError: if no demonstration succeeded.
    """
    cached = None if cache_key is None else _cache_path(cache_key, num_ranks=world.size)
    if cached is not None and cached.exists():
        from safetensors.torch import load_file

        load_weights(masters.named_parameters(), load_file(cached))
        masters.publish()
        say(f"warm start: loaded {cached}")
        return
    made = demonstrate()
    lengths = sorted(len(rollout.tokens) for rollout in made.rollouts)
    say(
        f"warm start: {len(lengths)} demonstrations of training tasks"
        + (f", {lengths[0]} to {lengths[-1]} tokens" if lengths else "")
        + "".join(f", {len(ids)} dropped ({why})" for why, ids in made.dropped.items() if ids)
        + (f", {made.num_cut} of them cut" if made.num_cut else "")
    )

    def on_step(step: int, loss: float, norm: float) -> None:
        say(f"warm start {step:>3}/{settings.num_steps}  loss {loss:7.4f}  gnorm {norm:7.3f}")
        check_stop()

    supervised_steps(
        model,
        masters,
        optimizer,
        made.rollouts,
        settings=settings,
        world=world,
        on_step=on_step,
    )
    if cached is not None:
        weights = {n: full_tensor(p.detach()) for n, p in masters.named_parameters()}
        if world.is_main:
            _write_cache(cached, weights, cache_key)
        world.barrier()


def _cache_path(cache_key: Any, *, num_ranks: int) -> Path:
    text = json.dumps([FORMAT, num_ranks, cache_key], sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return sinkflex_home() / "warm_starts" / f"{name}.safetensors"


def _write_cache(path: Path, weights: dict[str, torch.Tensor], cache_key: Any) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        save_file({n: w.cpu().contiguous() for n, w in weights.items()}, temporary)
        temporary.replace(path)
    except BaseException:  # safetensors has an error of its own for a full disk
        temporary.unlink(missing_ok=True)
        raise
    write_text(path.with_suffix(".json"), json.dumps(cache_key, indent=2, default=str) + "\n")
