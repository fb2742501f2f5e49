"""How the terms of single tokens become one number: per token, per rollout, or by a constant.

Every way is a weight per token and one denominator for the whole step, so that the sum over rows,
micro-batches and ranks is the same however the rollouts were split. Rollouts of 1 and 3 trained
tokens with terms {4}, {0, 0, 2} give

    token      (4 + 0 + 0 + 2) / 4 = 1.5              long rollouts weigh more
    sequence   (4 / 1 + (0 + 0 + 2) / 3) / 2 = 2.333  each rollout weighs the same
    constant   (4 + 0 + 0 + 2) / (8 * 2) = 0.375      with divisor 8

Sources: token-level, DAPO, https://arxiv.org/abs/2503.14476; mean of each rollout, DeepSeekMath,
https://arxiv.org/abs/2402.03300; a constant, Dr. GRPO, https://arxiv.org/abs/2503.20783.

Suffixes: ``M`` trained tokens of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Over = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """Weights and denominator of a step.

    Raises:
        ValueError: a name that is not known, or a divisor that is missing or not needed.
    """

    over: Over = "token"
    """``token``: the mean over all trained tokens; ``sequence``: the mean over rollouts of the mean
    over their tokens; ``constant``: the sum over tokens / (divisor x number of rollouts)."""
    divisor: float | None = None
    """With ``constant``: tokens that stand for a whole rollout, e.g. the longest it may become."""

    def __post_init__(self) -> None:
        if self.over not in get_args(Over):
            raise ValueError(f"over = {self.over!r}: must be one of {get_args(Over)}")
        if self.over != "constant" and self.divisor is not None:
            raise ValueError(
                f"divisor = {self.divisor}: over = {self.over} has no use for it; must be null"
            )
        if self.over == "constant" and not (
            self.divisor is not None and math.isfinite(self.divisor) and self.divisor > 0
        ):
            raise ValueError(f"divisor = {self.divisor}: over = constant needs a number > 0")

    def token_weights(self, rollout: Tensor) -> Tensor | None:
        """Weight of each token [M], fp32; None where all are 1.

        Args:
            rollout: [M] which rollout each token is of. A rollout lies whole in one row.
        """
        if self.over != "sequence":
            return None
        return 1.0 / rollout_sums(torch.ones_like(rollout, dtype=torch.float32), rollout)

    def denominator(self, *, num_tokens: float, num_rollouts: float) -> float:
        """What the weighted sum of the step is divided by.

        Args:
            num_tokens: tokens in the loss, over all rows and ranks.
            num_rollouts: rollouts with a token in the loss, likewise.
        """
        if self.over == "token":
            return num_tokens
        return num_rollouts * (self.divisor or 1.0)


def rollout_sums(values: Tensor, rollout: Tensor) -> Tensor:
    """For each token the sum over all tokens of its rollout [M].

    Values ``[1, 2, 3]`` of rollouts ``[0, 1, 1]`` give ``[1, 5, 5]``.

    Args:
        values: [M]
        rollout: [M] long, numbers from 0.
    """
    num_rollouts = int(rollout.max()) + 1 if rollout.numel() else 0
    totals = values.new_zeros(num_rollouts).index_add(0, rollout, values)
    return totals[rollout]


def rollout_means(values: Tensor, rollout: Tensor) -> Tensor:
    """For each token the mean over all tokens of its rollout [M]."""
    return rollout_sums(values, rollout) / rollout_sums(torch.ones_like(values), rollout)
