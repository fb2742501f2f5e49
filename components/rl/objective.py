"""What is optimised on a batch: a loss, what its ratio is taken against, weights, masks, a bonus.

Suffixes: ``M`` trained tokens of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from components.rl.aggregate import Aggregation
from components.rl.importance import Importance
from components.rl.packing import PackedBatch
from components.rl.totals import LossOutput

Ratio = Literal["proximal", "generator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Turns the log-probabilities of a row into its share of the step's loss.

    Raises:
        ValueError: settings that contradict each other.
    """

    loss: Callable[..., LossOutput]
    """``GRPOLoss``, ``GSPOLoss``, ``CISPOLoss`` or one that is called as they are."""
    aggregation: Aggregation
    importance: Importance
    ratio: Ratio = "proximal"
    """What the loss takes its ratio against: ``proximal``, the trainer's own log-probabilities
    before the first update on the batch (of the weights that sampled it, where those are older), or
    ``generator``, those that the tokens were sampled with."""
    entropy_bonus: float = 0.0
    """The mean entropy of the sampled distributions, times this, is taken off the loss."""

    def __post_init__(self) -> None:
        if self.ratio not in get_args(Ratio):
            raise ValueError(f"ratio = {self.ratio!r}: must be one of {get_args(Ratio)}")
        if self.ratio == "generator" and self.importance.cap is not None:
            raise ValueError(
                f"importance.cap = {self.importance.cap}: ratio = generator holds this weight in "
                "its ratio already, it would count twice; must be null"
            )

    def __call__(
        self,
        logprobs: Tensor,
        *,
        batch: PackedBatch,
        before: Tensor,
        denominator: float,
        entropy: Tensor | None = None,
        reference: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> tuple[LossOutput, int]:
        """The share of one row.

        Args:
            logprobs: [M] of the weights being trained, with gradient.
            batch: the row.
            before: [M] of the trainer before the first update on the batch, or with the older
                weights that sampled it.
            denominator: of the whole step, see ``count``.
            entropy: [M] of the sampled distributions; needed for the bonus, with gradient.
            reference: [M] of the reference policy, or None.
            keep: [M] bool, tokens that stay in the loss, see ``keep``; None: all.

        Returns:
            The loss with sums over the tokens that stay, and how many weights were capped.

        Raises:
            ValueError: a bonus without the entropy.
            FloatingPointError: a log-probability that is not finite.
        """
        old = batch.generator_logprobs if self.ratio == "generator" else before
        importance, ratios = self.importance, None
        if importance.cap is not None:
            ratios = importance.log_ratios(before, batch.generator_logprobs, batch.rollout)
        columns = {
            "logprobs": logprobs,
            "old": old,
            "advantages": batch.advantages,
            "reference": reference,
            "entropy": entropy,
            "ratios": ratios,
            "rollout": batch.rollout,
        }
        if keep is not None:  # what is masked is in no sum, count or mean of the loss
            columns = {name: None if c is None else c[keep] for name, c in columns.items()}
        rollout, ratios = columns["rollout"], columns["ratios"]
        assert rollout is not None
        token_weights = self.aggregation.token_weights(rollout)
        out = self.loss(
            columns["logprobs"],
            old_logprobs=columns["old"],
            advantages=columns["advantages"],
            denominator=denominator,
            ref_logprobs=columns["reference"],
            is_weights=None if ratios is None else importance.weights(ratios),
            token_weights=token_weights,
            rollout=rollout,
        )
        if self.entropy_bonus > 0.0:
            bonus = self._bonus(columns["entropy"], token_weights)
            out = dataclasses.replace(out, loss=out.loss - bonus / denominator)
        return out, 0 if ratios is None else importance.num_capped(ratios)

    def _bonus(self, entropy: Tensor | None, token_weights: Tensor | None) -> Tensor:
        """The weighted sum over tokens that is taken off the loss, not divided."""
        if entropy is None:
            raise ValueError(f"entropy_bonus = {self.entropy_bonus}: needs the entropy")
        weighted = entropy if token_weights is None else entropy * token_weights
        return self.entropy_bonus * weighted.sum()

    def keep(self, before: Tensor, batch: PackedBatch) -> Tensor | None:
        """Which tokens [M] of a row stay in the loss; None: all, whatever they are."""
        if not self.importance.masks:
            return None
        ratios = self.importance.log_ratios(before, batch.generator_logprobs, batch.rollout)
        return self.importance.keep(ratios)


def objective_from(options: Mapping[str, Any], *, loss: Callable[..., LossOutput]) -> Objective:
    """The objective that a config asks for.

    Args:
        options: with the keys ``aggregation`` and ``importance`` (mappings of their settings),
            ``ratio`` and ``entropy_bonus``; others are left alone.
        loss: the loss.

    Raises:
        ValueError: a setting out of range.
    """
    return Objective(
        loss=loss,
        aggregation=Aggregation(**options["aggregation"]),
        importance=Importance(**options["importance"]),
        ratio=options["ratio"],
        entropy_bonus=options["entropy_bonus"],
    )


def count(batch: PackedBatch, keep: Tensor | None) -> tuple[float, float]:
    """Tokens of a row that are in the loss, and rollouts that have one: they add up over rows and
    ranks to what ``Aggregation.denominator`` takes."""
    rollout = batch.rollout if keep is None else batch.rollout[keep]
    return float(rollout.numel()), float(torch.unique(rollout).numel())
