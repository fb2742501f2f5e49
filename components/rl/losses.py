"""Losses as plain functions of log-probabilities.

The denominator is always given: the number of trained tokens of the whole step, over all rollouts,
micro-batches and ranks. The sum over micro-batches and ranks of what is returned here is then the
loss of the step, however it was split; a mean of means would not be.

Suffixes: ``M`` trained tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss of one micro-batch, and sums that add up over micro-batches and ranks."""

    loss: Tensor
    """[] with gradient: this micro-batch's share of the loss of the step"""
    policy_sum: Tensor
    """[] sum over tokens of the policy term, not divided"""
    kl_sum: Tensor
    """[] sum over tokens of the KL estimates, without beta; 0 without a reference"""
    num_clipped_low: Tensor
    """[] tokens whose gradient the lower clip removed (A < 0, ratio < 1 - eps_low)"""
    num_clipped_high: Tensor
    """[] tokens whose gradient the upper clip removed (A > 0, ratio > 1 + eps_high)"""
    ratio_sum: Tensor
    """[] sum over tokens of trainer / old probability"""
    num_tokens: int
    """M"""


class GRPOLoss:
    """Clipped policy-gradient loss with a KL penalty towards a reference (GRPO).

    ``-sum_t w_t min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t) / denominator
    + beta * sum_t KL_t / denominator`` with ``rho_t = exp(trainer_logprob - old_logprob)``.
    DeepSeekMath, https://arxiv.org/abs/2402.03300; token-level denominator and asymmetric clip from
    DAPO, https://arxiv.org/abs/2503.14476; KL estimators from http://joschu.net/blog/kl-approx.html.

    Args:
        eps_low: the ratio is clipped below at 1 - eps_low.
        eps_high: the ratio is clipped above at 1 + eps_high ("clip-higher" if above eps_low).
        beta: weight of the KL penalty; with 0 no reference is needed.
        kl_estimator: with d = trainer_logprob - ref_logprob, k1 is d, k2 is d^2 / 2 and k3 is
            exp(-d) - 1 + d: unbiased like k1, and never negative.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        *,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        beta: float = 0.0,
        kl_estimator: KLEstimator = "k3",
    ) -> None:
        if not 0.0 <= eps_low < 1.0:
            raise ValueError(f"eps_low = {eps_low}: must be in [0, 1)")
        if not (math.isfinite(eps_high) and eps_high >= 0.0):
            raise ValueError(f"eps_high = {eps_high}: must be a finite number >= 0")
        if not (math.isfinite(beta) and beta >= 0.0):
            raise ValueError(f"beta = {beta}: must be a finite number >= 0")
        if kl_estimator not in get_args(KLEstimator):
            raise ValueError(
                f"kl_estimator = {kl_estimator!r}: must be one of {get_args(KLEstimator)}"
            )
        self.eps_low = eps_low
        self.eps_high = eps_high
        self.beta = beta
        self.kl_estimator: KLEstimator = kl_estimator

    def __call__(
        self,
        trainer_logprobs: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        denominator: float,
        ref_logprobs: Tensor | None = None,
        is_weights: Tensor | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            trainer_logprobs: [M] of the weights being trained, with gradient; M may be 0.
            old_logprobs: [M] what the ratio is taken against: the trainer's own before the first
                update on this batch (``trainer_logprobs.detach()`` if there is only one update and
                nothing is stale), or the generator's.
            advantages: [M] each token has its rollout's.
            denominator: trained tokens of the whole step.
            ref_logprobs: [M] of the reference; needed if beta > 0. With beta = 0 the KL is only
                reported.
            is_weights: [M] weights of the policy term, see ``truncated_importance_weights``.

        Raises:
            ValueError: beta > 0 without a reference, denominator not positive, shapes that differ.
        """
        _check_denominator(denominator)
        if self.beta > 0.0 and ref_logprobs is None:
            raise ValueError(
                f"beta = {self.beta}: needs ref_logprobs; without a reference set beta=0"
            )
        constants = {
            "old_logprobs": old_logprobs,
            "advantages": advantages,
            "ref_logprobs": ref_logprobs,
            "is_weights": is_weights,
        }
        for name, value in constants.items():
            if value is not None and value.shape != trainer_logprobs.shape:
                raise ValueError(
                    f"{name} {list(value.shape)}: must be [M] = {list(trainer_logprobs.shape)}"
                )
            if value is not None and value.requires_grad:
                raise ValueError(f"{name} carries a gradient: detach it")

        ratio = torch.exp(trainer_logprobs - old_logprobs)
        low, high = 1.0 - self.eps_low, 1.0 + self.eps_high
        gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        if is_weights is not None:
            gain = gain * is_weights
        policy_sum = -gain.sum()
        loss = policy_sum / denominator
        kl_sum = torch.zeros_like(policy_sum, requires_grad=False)
        if ref_logprobs is not None:
            kl_sum = _kl(trainer_logprobs, ref_logprobs, self.kl_estimator).sum()
            if self.beta > 0.0:
                loss = loss + self.beta * kl_sum / denominator
        return LossOutput(
            loss=loss,
            policy_sum=policy_sum.detach(),
            kl_sum=kl_sum.detach(),
            num_clipped_low=((advantages < 0) & (ratio < low)).sum(),
            num_clipped_high=((advantages > 0) & (ratio > high)).sum(),
            ratio_sum=ratio.detach().sum(),
            num_tokens=trainer_logprobs.numel(),
        )


def sft_loss(logprobs: Tensor, *, denominator: float) -> Tensor:
    """Cross entropy ``-sum(logprobs) / denominator``.

    Args:
        logprobs: [M] of the trained tokens; M may be 0.
        denominator: trained tokens of the whole step.
    """
    _check_denominator(denominator)
    return -logprobs.sum() / denominator


def truncated_importance_weights(
    trainer_logprobs: Tensor, generator_logprobs: Tensor, *, cap: float
) -> Tensor:
    """Weights ``min(trainer / generator probability, cap)`` [M], detached.

    They correct for tokens that were drawn from a distribution other than the trainer's (other
    kernels, other precision, older weights); the cap bounds their variance (truncated importance
    sampling, Ionides 2008).

    Args:
        trainer_logprobs: [M] of the trainer before the update, the ratio's ``old_logprobs``.
        generator_logprobs: [M] as sampled.
        cap: the largest weight.

    Raises:
        ValueError: cap not positive.
        FloatingPointError: a log-probability that is not finite.
    """
    if not (math.isfinite(cap) and cap > 0.0):
        raise ValueError(f"cap = {cap}: must be a finite number > 0")
    trainer, generator = trainer_logprobs.detach(), generator_logprobs.detach()
    _check_finite(trainer, name="trainer_logprobs")
    _check_finite(generator, name="generator_logprobs")
    return torch.exp((trainer - generator).clamp(max=math.log(cap)))


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
    kl_sum = _kl(generator, trainer, "k3").sum()
    difference = (trainer - generator).abs()
    return Mismatch(
        kl_sum=float(kl_sum),
        logprob_diff_max=float(difference.max()) if difference.numel() else 0.0,
        num_tokens=difference.numel(),
    )


def _kl(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate per token of KL(p || other), for tokens drawn from p."""
    difference = logprobs - other_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference


def _check_denominator(denominator: float) -> None:
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(
            f"denominator = {denominator}: must be the number of trained tokens of the step, > 0"
        )


def _check_finite(values: Tensor, *, name: str) -> None:
    wrong = ~torch.isfinite(values)
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise FloatingPointError(
            f"{name}: {int(wrong.sum())} of {values.numel()} are not finite, "
            f"the first at token {first} ({float(values[first])})"
        )
