"""The warm start: supervised steps on an oracle's demonstrations, made once and cached.

An untrained small model never emits a tool call, so every rollout of a group fails alike and GRPO
has nothing to learn from. A few supervised steps on training tasks give it a start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from components.data.demonstrations import Demonstrations, collect
from components.data.oracles import play
from components.envs.base import Task
from components.models.decoder import PolicyModel
from components.rollout.episode import failed_rollout
from components.rollout.specs import group_specs
from components.rollout.types import RolloutSpec
from components.rollout.workers import Failure, WorkerPool
from components.training.parallelize import World, full_tensor
from components.training.precision import MasterWeights
from components.training.resume_state import load_weights
from components.training.stop import StopSignal
from components.training.supervised import SupervisedSettings, supervised_steps
from components.training.warm_cache import cache_file, read_cache, write_cache


def demonstrate_tasks(
    pool: WorkerPool,
    tasks: Sequence[Task],
    *,
    make_oracle: Callable[..., Any],
    num_demonstrations: int,
    max_tokens: int,
    seed: int,
    world: World,
    stop: StopSignal,
    per_task: int = 1,
) -> Demonstrations:
    """Play demonstrations in the workers of all ranks.

    Args:
        pool: this rank's workers.
        tasks: training tasks; the first ``num_demonstrations`` of a seeded order are demonstrated.
        make_oracle: ``make_oracle(spec)`` gives the demonstrator of one episode; picklable.
        num_demonstrations: how many tasks; demonstrations below the full official reward, or with a
            violation of S1 to S4 or S7, are dropped and counted.
        max_tokens: longer demonstrations are cut after the last whole turn that fits.
        seed: of the order and of the episodes.
        world: this process among its peers.
        stop: ends it early.
        per_task: demonstrations of each task, which differ in what user and oracle say.

    Returns:
        The same demonstrations in the same order on every rank.

    Raises:
        ValueError: if not one of them could be played: an oracle of another domain, say.
        StopRequested: on all ranks, if one was asked to stop.
    """
    chosen = list(tasks)
    random.Random(f"{seed}/demonstrations").shuffle(chosen)
    specs = _orders(chosen[:num_demonstrations], per_task=per_task, seed=seed)
    mine = specs[world.rank :: world.size]
    results: list[Any] = []
    with stop.apart(world) as check:
        orders = [(spec, make_oracle) for spec in mine]
        results = pool.run_local(play, orders, on_round=check)
    rollouts = [
        failed_rollout(spec, result.status, result.error) if isinstance(result, Failure) else result
        for spec, result in zip(mine, results, strict=True)
    ]
    played = {rollout.spec.rollout_id: rollout for rollout in world.gather(rollouts)}
    errors = [rollout.error for rollout in played.values() if not rollout.valid]
    if len(errors) == len(played):
        last_line = errors[0].strip().splitlines()[-1]
        raise ValueError(
            f"oracle: none of {len(played)} demonstrations could be played: {last_line}"
        )
    return collect(
        specs, play=lambda spec: played[spec.rollout_id], max_tokens=max_tokens, cut=True
    )


def _orders(tasks: Sequence[Task], *, per_task: int, seed: int) -> list[RolloutSpec]:
    """One demonstration of each task, then the second of each..."""
    return [
        spec
        for number in range(per_task)
        for spec in group_specs(
            [(task.domain, task.id) for task in tasks],
            group_size=1,
            seed=seed,
            phase=f"demonstration/{number}" if number else "demonstration",
        )
    ]


def warm_start(
    model: PolicyModel,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    *,
    demonstrate: Callable[[], Demonstrations],
    settings: SupervisedSettings,
    key: Mapping[str, Any] | None,
    world: World,
    stop: StopSignal,
    say: Callable[[str], None],
) -> None:
    """Teach the model the format and the protocol, or load what an equal warm start left.

    Args:
        model: changed in place.
        masters: its fp32 weights.
        optimizer: of ``masters``; used for these steps only.
        demonstrate: makes the demonstrations; not called when the cache has the result.
        settings: of the supervised steps.
        key: everything that the result depends on (``warm_cache.cache_key``); None turns the cache
            off.
        world: this process among its peers.
        stop: gives up the step under way, and with it the warm start: nothing of it is kept. Once
            the last step is taken the result is cached first.
        say: prints a line.

    Raises:
        ValueError: if no demonstration succeeded.
        StopRequested: on all ranks, if one was asked to stop.
    """
    if key is not None and _load_cached(masters, key, world=world, say=say):
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

    supervised_steps(
        model,
        masters,
        optimizer,
        made.rollouts,
        settings=settings,
        world=world,
        check_stop=partial(stop.check_together, world),
        on_step=on_step,
    )
    if key is not None:
        _write_cached(masters, key, world=world, say=say)


def _write_cached(
    masters: MasterWeights,
    key: Mapping[str, Any],
    *,
    world: World,
    say: Callable[[str], None],
) -> None:
    """Keep the result for equal warm starts, or say why not. Collective."""
    path = cache_file(key, num_ranks=world.size)
    weights = {n: full_tensor(p.detach()) for n, p in masters.named_parameters()}
    problem = write_cache(path, weights, key) if world.is_main else ""
    if problem:
        say(f"warm start: not kept for other runs, {path} cannot be written: {problem}")
    world.barrier()


def _load_cached(
    masters: MasterWeights,
    key: Mapping[str, Any],
    *,
    world: World,
    say: Callable[[str], None],
) -> bool:
    """Load the result of an equal warm start on all ranks, or on none. Collective."""
    path = cache_file(key, num_ranks=world.size)
    found = read_cache(path)
    if isinstance(found, str):
        say(f"warm start: {path} is damaged and will be made anew: {found}")
    if world.max([float(not isinstance(found, dict))])[0]:
        return False
    assert isinstance(found, dict)
    load_weights(masters.named_parameters(), found)
    masters.publish()
    say(f"warm start: loaded {path}")
    return True
