"""Supervised fine-tuning on demonstration rollouts: a run of its own, or the start of GRPO's.

The same ledger, packing and head as GRPO; only the loss differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
    """Optimizer steps; the learning rate falls linearly to a tenth at the last."""
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
    """Those of a config, or of its section ``warm_start`` where it has one."""
    of_stage = options.get("warm_start", options)
    return SupervisedSettings(
        num_steps=of_stage["num_steps"],
        demonstrations_per_step=of_stage["demonstrations_per_step"],
        tokens_per_batch=options["tokens_per_batch"],
        logprob_chunk=options["logprob_chunk"],
        max_grad_norm=options["max_grad_norm"],
        seed=options["seed"],
    )


class SupervisedUpdate:
    """Cross entropy on demonstrations, one optimizer step at a time.

    Which demonstrations a step draws and its learning rate are functions of its number, so a
    resumed run goes on as if it had never stopped.

    Args:
        model: the policy; changed in place.
        masters: its fp32 weights, which ``optimizer`` updates.
        optimizer: e.g. AdamW over ``masters.parameters()``, as it was made: its learning rates now
            are those of the first step.
        demonstrations: the same list on every rank.
        settings: steps, sizes, clipping, seed.
        world: this process among its peers.

    Raises:
        ValueError: without demonstrations.
    """

    def __init__(
        self,
        model: PolicyModel,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        demonstrations: Sequence[Rollout],
        *,
        settings: SupervisedSettings,
        world: World,
    ) -> None:
        if not demonstrations:
            raise ValueError("no demonstration succeeded: there is nothing to learn")
        self._model, self._masters, self._optimizer = model, masters, optimizer
        self._demonstrations, self._settings, self._world = demonstrations, settings, world
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def step(self, number: int, *, check_stop: Callable[[], None]) -> dict[str, float]:
        """Take step ``number`` (from 0). Collective.

        Args:
            number: of the step; what it draws and its learning rate follow from it.
            check_stop: called on every rank before each row and once more before the optimizer
                steps, so that a step of a single row can be given up, too; what it raises leaves
                weights and optimizer as they were.

        Returns:
            ``loss/total`` (mean over the trained tokens of all ranks), ``train/grad_norm`` (before
            clipping), ``train/lr`` and ``pack/*``.

        Raises:
            FloatingPointError: if the loss or the gradient is not finite; the weights are those
                before.
        """
        settings = self._settings
        self._optimizer.zero_grad(set_to_none=True)  # what a step that was given up left behind
        chosen = drawn(
            len(self._demonstrations),
            seed=settings.seed,
            first=number * settings.demonstrations_per_step,
            count=settings.demonstrations_per_step,
        )
        demonstrations = [self._demonstrations[i] for i in chosen]
        loss, packed = self._pass(demonstrations, train=True, check_stop=check_stop)
        norm = clip_grad_norm(self._masters.parameters(), settings.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"supervised step {number + 1}: loss {loss}, gradient norm {norm}: not finite; the "
                "weights are those before this step"
            )
        check_stop()
        # Not before: a checkpoint of the step that was given up would have the rate of the next.
        decay = 1.0 - 0.9 * number / max(1, settings.num_steps - 1)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            set_learning_rate(group, rate * decay)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.publish()
        rates = {"train/grad_norm": norm, "train/lr": self._rates[0] * decay}
        return {"loss/total": loss, **rates, **packed}

    @torch.no_grad()
    def loss_of(self, rollouts: Sequence[Rollout]) -> float:
        """Mean cross entropy over the trained tokens of some rollouts, in nats. Collective."""
        return self._pass(rollouts, train=False, check_stop=lambda: None)[0]

    def _pass(
        self, rollouts: Sequence[Rollout], *, train: bool, check_stop: Callable[[], None]
    ) -> tuple[float, dict[str, float]]:
        """The loss of all ranks, its gradient added up if ``train``, and ``pack/*``."""
        settings, world = self._settings, self._world
        items = [
            PackItem(tokens=rollout.tokens, advantage=1.0, key=f"{n:04d}")
            for n, rollout in enumerate(rollouts)
            if n % world.size == world.rank
        ]
        rows, packed = packed_rows(items, tokens_per_batch=settings.tokens_per_batch, world=world)
        total = 0.0
        for batch, plan in rows:
            check_stop()
            logprobs, _ = packed_logprobs(
                self._model,
                batch,
                plan=plan,
                temperature=1.0,
                chunk_size=settings.logprob_chunk,
            )
            loss = sft_loss(logprobs, denominator=packed["pack/trained_tokens"])
            total += float(loss.detach())
            if train:
                # FSDP2 averages over ranks; the denominator is already the one of all ranks.
                (loss * world.size).backward()
        return world.sum([total])[0], packed


def supervised_steps(
    model: PolicyModel,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    demonstrations: Sequence[Rollout],
    *,
    settings: SupervisedSettings,
    world: World,
    check_stop: Callable[[], None],
    on_step: Callable[[int, float, float], None],
) -> None:
    """Take all steps of ``settings``; arguments and errors as in :class:`SupervisedUpdate`.

    Args:
        check_stop: as in :meth:`SupervisedUpdate.step`.
        on_step: called with (finished steps, loss, gradient norm).
    """
    update = SupervisedUpdate(
        model, masters, optimizer, demonstrations, settings=settings, world=world
    )
    for number in range(settings.num_steps):
        metrics = update.step(number, check_stop=check_stop)
        on_step(number + 1, metrics["loss/total"], metrics["train/grad_norm"])


def drawn(num_items: int, *, seed: int, first: int, count: int) -> list[int]:
    """Indices of the draws ``first`` to ``first + count - 1`` of endless shuffled passes."""
    return list(islice(_draws(num_items, seed=seed), first, first + count))


def _draws(num_items: int, *, seed: int) -> Iterator[int]:
    """Endless shuffled passes over the items."""
    generator = random.Random(f"{seed}/warm_start")
    while True:
        order = list(range(num_items))
        generator.shuffle(order)
        yield from order
