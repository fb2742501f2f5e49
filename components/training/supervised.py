"""Supervised fine-tuning on demonstration rollouts: the warm start before GRPO.

The same ledger, packing and head as GRPO; only the loss differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from components.models.decoder import PolicyModel
from components.rl.forward import packed_logprobs
from components.rl.losses import sft_loss
from components.rl.packing import PackItem
from components.rollout.types import Rollout
from components.training.optimizers import set_learning_rate
from components.training.parallelize import World, clip_grad_norm
from components.training.precision import MasterWeights
from components.training.update import packed_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSettings:
    """What supervised steps are made of."""

    num_steps: int
    """Optimizer steps."""
    demonstrations_per_step: int
    """Over all ranks; drawn without replacement until all were seen."""
    tokens_per_batch: int
    """Longest packed row."""
    logprob_chunk: int
    """Trained tokens whose logits exist at a time."""
    max_grad_norm: float
    """Gradients are clipped to this global norm."""
    seed: int
    """Of the order of the demonstrations."""


def supervised_settings_from(options: Mapping[str, Any]) -> SupervisedSettings:
    """Those of a config with a section ``warm_start``."""
    of_stage, of_run = options["warm_start"], options
    return SupervisedSettings(
        num_steps=of_stage["num_steps"],
        demonstrations_per_step=of_stage["demonstrations_per_step"],
        tokens_per_batch=of_run["tokens_per_batch"],
        logprob_chunk=of_run["logprob_chunk"],
        max_grad_norm=of_run["max_grad_norm"],
        seed=of_run["seed"],
    )


def supervised_steps(
    model: PolicyModel,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    demonstrations: Sequence[Rollout],
    *,
    settings: SupervisedSettings,
    world: World,
    on_step: Callable[[int, float, float], None],
) -> None:
    """Train on demonstrations with cross entropy, learning rate falling linearly to a tenth.

    Args:
        model: the policy; changed in place.
        masters: its fp32 weights, which ``optimizer`` updates.
        optimizer: e.g. AdamW over ``masters.parameters()``.
        demonstrations: the same list on every rank.
        settings: steps, sizes, clipping, seed.
        world: this process among its peers.
        on_step: called with (finished steps, loss, gradient norm).

    Raises:
        FloatingPointError: if a loss or gradient is not finite; the weights are those before.
        ValueError: without demonstrations.
    """
    if not demonstrations:
        raise ValueError("warm_start: no demonstration succeeded: there is nothing to learn")
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    draws = _draws(len(demonstrations), seed=settings.seed)
    for step in range(settings.num_steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            decay = 1.0 - 0.9 * step / max(1, settings.num_steps - 1)
            set_learning_rate(group, rate * decay)
        chosen = [next(draws) for _ in range(settings.demonstrations_per_step)]
        items = [
            PackItem(tokens=demonstrations[i].tokens, advantage=1.0, key=f"{n:04d}")
            for n, i in enumerate(chosen)
            if n % world.size == world.rank
        ]
        loss, norm = _step(model, masters, optimizer, items, settings=settings, world=world)
        on_step(step + 1, loss, norm)


def _draws(num_items: int, *, seed: int) -> Iterator[int]:
    """Endless shuffled passes over the items."""
    generator = random.Random(f"{seed}/warm_start")
    while True:
        order = list(range(num_items))
        generator.shuffle(order)
        yield from order


def _step(
    model: PolicyModel,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    items: Sequence[PackItem],
    *,
    settings: SupervisedSettings,
    world: World,
) -> tuple[float, float]:
    rows, packed = packed_rows(items, tokens_per_batch=settings.tokens_per_batch, world=world)
    total = 0.0
    for batch, plan in rows:
        logprobs, _ = packed_logprobs(
            model,
            batch,
            plan=plan,
            temperature=1.0,
            chunk_size=settings.logprob_chunk,
        )
        loss = sft_loss(logprobs, denominator=packed["pack/trained_tokens"])
        total += float(loss.detach())
        # FSDP2 averages over ranks; the denominator is already the one of all ranks.
        (loss * world.size).backward()
    total = world.sum([total])[0]
    norm = clip_grad_norm(masters.parameters(), settings.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise FloatingPointError(f"warm start: loss {total}, gradient norm {norm}: not finite")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    masters.publish()
    return total, norm
