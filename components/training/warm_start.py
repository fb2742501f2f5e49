"""The warm start: supervised steps on an oracle's demonstrations, made once and cached.

An untrained small model never emits a tool call, so every rollout of a group fails alike and GRPO
has nothing to learn from. A few supervised steps on training tasks give it a start.
"""

from __future__ import annotations

import hashlib
import json
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
from components.training.supervised import supervised_steps

FORMAT = 1
"""Raise it when a change here or in the demonstrations makes cached warm starts stale."""


def warm_start(
    model: PolicyModel,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    *,
    pool: WorkerPool,
    make_oracle: Callable[..., Any],
    tasks: Sequence[Task],
    num_steps: int,
    num_demonstrations: int,
    demonstrations_per_step: int,
    max_tokens: int,
    tokens_per_batch: int,
    chunk_size: int,
    max_grad_norm: float,
    seed: int,
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
        pool: plays the demonstrations in its workers.
        make_oracle: ``make_oracle(spec)`` gives the demonstrator of one episode; picklable.
        tasks: training tasks; the first ``num_demonstrations`` of a seeded order are demonstrated.
        num_steps: optimizer steps.
        num_demonstrations: demonstrations to make; those that earn less than the full official
            reward are dropped and counted.
        demonstrations_per_step: see ``supervised_steps``.
        max_tokens: longer demonstrations are cut after the last whole turn that fits.
        tokens_per_batch: longest packed row.
        chunk_size: trained tokens whose logits exist at a time.
        max_grad_norm: of the clipping.
        seed: of tasks and order.
        cache_key: JSON-able, everything that the result depends on beside the arguments; None
            turns the cache off.
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
        say(f"warm start: loaded from {cached}")
        return
    made = _demonstrate(pool, make_oracle, tasks, num_demonstrations, max_tokens, seed, world)
    say(
        f"warm start: {len(made.rollouts)} demonstrations of training tasks"
        + "".join(f", {len(ids)} dropped ({why})" for why, ids in made.dropped.items() if ids)
        + (f", {made.num_cut} cut to {max_tokens} tokens" if made.num_cut else "")
    )

    def on_step(step: int, loss: float, norm: float) -> None:
        check_stop()
        say(f"warm start {step:>3}/{num_steps}  loss {loss:8.4f}  gnorm {norm:7.3f}")

    supervised_steps(
        model,
        masters,
        optimizer,
        made.rollouts,
        num_steps=num_steps,
        demonstrations_per_step=demonstrations_per_step,
        tokens_per_batch=tokens_per_batch,
        chunk_size=chunk_size,
        max_grad_norm=max_grad_norm,
        seed=seed,
        world=world,
        on_step=on_step,
    )
    if cached is not None:
        weights = {n: full_tensor(p.detach()) for n, p in masters.named_parameters()}
        if world.is_main:
            _write_cache(cached, weights, cache_key)
        world.barrier()


def _demonstrate(
    pool: WorkerPool,
    make_oracle: Callable[..., Any],
    tasks: Sequence[Task],
    num_demonstrations: int,
    max_tokens: int,
    seed: int,
    world: World,
) -> Demonstrations:
    """This rank's share of the demonstrations, gathered from all ranks in one order."""
    import random

    chosen = list(tasks)
    random.Random(f"{seed}/demonstrations").shuffle(chosen)
    chosen = chosen[:num_demonstrations]
    specs = group_specs(
        [(t.domain, t.id) for t in chosen], group_size=1, seed=seed, phase="demonstration"
    )
    mine = specs[world.rank :: world.size]
    results = pool.run_local(play, [(spec, make_oracle) for spec in mine])
    for spec, result in zip(mine, results, strict=True):
        if isinstance(result, Failure):
            raise RuntimeError(f"demonstration {spec.rollout_id}: {result.error}")
    gathered = {r.spec.rollout_id: r for r in world.gather(results)}
    return collect(
        specs, play=lambda spec: gathered[spec.rollout_id], max_tokens=max_tokens, cut=True
    )


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
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    write_text(path.with_suffix(".json"), json.dumps(cache_key, indent=2, default=str) + "\n")
