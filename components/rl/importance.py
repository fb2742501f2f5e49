"""Trainer and generator differ: how far, and what is done about it.

Tokens are sampled with other kernels, other precision or older weights than those that are trained.
Two remedies, which may be combined: weights that correct for it, truncated so that their variance
is bounded (truncated importance sampling, Ionides 2008;
https://fengyao.notion.site/off-policy-rl), and a band outside of which a token or a whole rollout
leaves the loss (masked importance sampling; IcePop, https://arxiv.org/abs/2510.18855).

Suffixes: ``M`` trained tokens of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from components.rl.aggregate import rollout_sums

Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """What is done where trainer and generator differ; nothing by default.

    The ratio is trainer / generator probability: of a token, or of a whole rollout, the product
    over its tokens. The trainer's is the one before the first update on the batch.

    Raises:
        ValueError: a setting out of range.
    """

    level: Level = "token"
    """Whose ratio is looked at: each ``token``'s or the whole rollout's (``sequence``)."""
    cap: float | None = None
    """The policy term is weighted by min(ratio, cap); None: it is not weighted."""
    mask_below: float | None = None
    """What has a lower ratio leaves the loss, numerator and denominator; None: no such bound."""
    mask_above: float | None = None
    """What has a higher ratio leaves the loss likewise."""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ValueError(f"level = {self.level!r}: must be one of {get_args(Level)}")
        for name in ("cap", "mask_below", "mask_above"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} = {value}: must be a finite number > 0, or null")
        if (self.mask_below or 0.0) >= 1.0 or (self.mask_above or math.inf) <= 1.0:
            raise ValueError(
                f"mask_below = {self.mask_below}, mask_above = {self.mask_above}: 1 must lie "
                "between them, or tokens on which trainer and generator agree would be masked"
            )

    @property
    def masks(self) -> bool:
        """Whether something may leave the loss."""
        return self.mask_below is not None or self.mask_above is not None

    def weights(self, log_ratios: Tensor) -> Tensor | None:
        """Weights ``min(ratio, cap)`` of the policy term [M]; None without a cap.

        Args:
            log_ratios: [M], see ``log_ratios``.
        """
        if self.cap is None:
            return None
        return torch.exp(log_ratios.clamp(max=math.log(self.cap)))  # exp first would overflow

    def num_capped(self, log_ratios: Tensor) -> int:
        """Tokens whose weight is the cap."""
        return 0 if self.cap is None else int((log_ratios > math.log(self.cap)).sum())

    def keep(self, log_ratios: Tensor) -> Tensor:
        """Which tokens stay in the loss [M], bool."""
        keep = torch.ones_like(log_ratios, dtype=torch.bool)
        if self.mask_below is not None:
            keep &= log_ratios >= math.log(self.mask_below)
        if self.mask_above is not None:
            keep &= log_ratios <= math.log(self.mask_above)
        return keep

    def log_ratios(self, trainer: Tensor, generator: Tensor, rollout: Tensor) -> Tensor:
        """Log of each token's ratio, or of its rollout's, by ``level`` [M], detached.

        Args:
            trainer: [M] log-probabilities of the trainer before the first update.
            generator: [M] as sampled.
            rollout: [M] which rollout each token is of.

        Raises:
            FloatingPointError: a log-probability that is not finite.
        """
        trainer, generator = trainer.detach(), generator.detach()
        _check_finite(trainer, name="trainer_logprobs")
        _check_finite(generator, name="generator_logprobs")
        difference = trainer - generator
        return rollout_sums(difference, rollout) if self.level == "sequence" else difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far the trainer's log-probabilities are from those that the tokens were sampled with."""

    kl_sum: float
    """sum over tokens of the k3 estimate of KL(generator || trainer), nats"""
    logprob_diff_max: float
    """largest absolute difference of one token, nats; 0 without tokens"""
    num_tokens: int

    @property
    def kl(self) -> float:
        """Mean estimate per token; 0 without tokens."""
        return self.kl_sum / self.num_tokens if self.num_tokens else 0.0


def mismatch(trainer_logprobs: Tensor, generator_logprobs: Tensor) -> Mismatch:
    """Compare trainer and generator: they agree to rounding unless something is broken.

    Most real faults (a template that differs, a temperature on one side only, stale weights, a
    wrong position) show here first.

    Args:
        trainer_logprobs: [M]
        generator_logprobs: [M]
    """
    if trainer_logprobs.shape != generator_logprobs.shape:
        raise ValueError(
            f"trainer_logprobs {list(trainer_logprobs.shape)} and generator_logprobs "
            f"{list(generator_logprobs.shape)}: must have the same shape"
        )
    generator, trainer = generator_logprobs.detach().double(), trainer_logprobs.detach().double()
    # The tokens come from the generator: it takes the place of the policy in the estimator.
    difference = trainer - generator
    kl_sum = (torch.expm1(difference) - difference).sum()
    return Mismatch(
        kl_sum=float(kl_sum),
        logprob_diff_max=float(difference.abs().max()) if difference.numel() else 0.0,
        num_tokens=difference.numel(),
    )


def _check_finite(values: Tensor, *, name: str) -> None:
    wrong = ~torch.isfinite(values)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise FloatingPointError(
            f"{name}: {int(wrong.sum())} of {values.numel()} are not finite, "
            f"the first at token {first} ({float(values[first])})"
        )
