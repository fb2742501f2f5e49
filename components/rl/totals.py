"""What the losses share: from the gain of each token to the sums of a micro-batch.

Suffixes: ``M`` trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """[] weighted sum over tokens of the policy term, not divided"""
    kl_sum: Tensor
    """[] weighted sum over tokens of the KL estimates, without beta; 0 without a reference"""
    num_clipped_low: Tensor
    """[] tokens on which the lower clip acts: their gradient is removed (CISPO: bounded)"""
    num_clipped_high: Tensor
    """[] tokens on which the upper clip acts"""
    ratio_sum: Tensor
    """[] sum over tokens of trainer / old probability"""
    num_tokens: int
    """M"""


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """What :func:`total` takes of a clipped ratio, each [M].

    Returns:
        ``gain = min(ratio A, clip(ratio, low, high) A)``, ``ratio``, and where the clip removes the
        gradient: ``clips_low``, ``clips_high``.
    """
    return {
        "gain": torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
        "ratio": ratio,
        "clips_low": (advantages < 0) & (ratio < low),
        "clips_high": (advantages > 0) & (ratio > high),
    }


def total(
    trainer_logprobs: Tensor,
    *,
    gain: Tensor,
    ratio: Tensor,
    clips_low: Tensor,
    clips_high: Tensor,
    beta: float,
    kl_estimator: KLEstimator,
    ref_logprobs: Tensor | None,
    denominator: float,
    is_weights: Tensor | None,
    token_weights: Tensor | None,
) -> LossOutput:
    """Weigh and add up the gains [M] and the KL estimates of the tokens.

    Args:
        trainer_logprobs: [M] with gradient.
        gain: [M] with gradient, what the policy term raises.
        ratio: [M] trainer / old probability.
        clips_low: [M] bool, where the lower clip acts.
        clips_high: [M] bool, where the upper clip acts.
        beta: weight of the KL.
        kl_estimator: how the KL is estimated.
        ref_logprobs: [M] of the reference, or None.
        denominator: of the whole step.
        is_weights: [M] weights of the gains, or None.
        token_weights: [M] weights of gains and KL, or None.

    Raises:
        ValueError: beta > 0 without a reference, denominator not positive, shapes that differ.
    """
    check_denominator(denominator)
    check_constants(trainer_logprobs, {"ref_logprobs": ref_logprobs})
    if is_weights is not None:
        gain = gain * is_weights
    if token_weights is not None:
        gain = gain * token_weights
    policy_sum = -gain.sum()
    loss = policy_sum / denominator
    kl_sum = torch.zeros_like(policy_sum, requires_grad=False)
    if ref_logprobs is not None:
        kl = _kl(trainer_logprobs, ref_logprobs, kl_estimator)
        kl_sum = (kl if token_weights is None else kl * token_weights).sum()
    if beta > 0.0:
        if ref_logprobs is None:
            raise ValueError(f"beta = {beta}: needs ref_logprobs; without a reference set beta=0")
        loss = loss + beta * kl_sum / denominator
    return LossOutput(
        loss=loss,
        policy_sum=policy_sum.detach(),
        kl_sum=kl_sum.detach(),
        num_clipped_low=clips_low.sum(),
        num_clipped_high=clips_high.sum(),
        ratio_sum=ratio.detach().sum(),
        num_tokens=trainer_logprobs.numel(),
    )


def _kl(logprobs: Tensor, other_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate per token of KL(p || other), for tokens drawn from p."""
    difference = logprobs - other_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference


def check_settings(
    eps_low: float,
    eps_high: float,
    beta: float,
    kl_estimator: str,
    *,
    lowest_allowed: bool = False,
) -> None:
    """Raise ValueError for a setting out of range; ``lowest_allowed``: eps_low may be 1."""
    if not (0.0 <= eps_low < 1.0 or (lowest_allowed and eps_low == 1.0)):
        raise ValueError(f"eps_low = {eps_low}: must be in [0, 1{']' if lowest_allowed else ')'}")
    if not (math.isfinite(eps_high) and eps_high >= 0.0):
        raise ValueError(f"eps_high = {eps_high}: must be a finite number >= 0")
    if not (math.isfinite(beta) and beta >= 0.0):
        raise ValueError(f"beta = {beta}: must be a finite number >= 0")
    if kl_estimator not in get_args(KLEstimator):
        raise ValueError(f"kl_estimator = {kl_estimator!r}: must be one of {get_args(KLEstimator)}")


def check_constants(trainer_logprobs: Tensor, constants: Mapping[str, Tensor | None]) -> None:
    """Raise ValueError for one that is not [M] or carries a gradient."""
    for name, value in constants.items():
        if value is None:
            continue
        if value.shape != trainer_logprobs.shape:
            raise ValueError(
                f"{name} {list(value.shape)}: must be [M] = {list(trainer_logprobs.shape)}"
            )
        if value.requires_grad:
            raise ValueError(f"{name} carries a gradient: detach it")


def check_denominator(denominator: float) -> None:
    """Raise ValueError if it cannot be a denominator."""
    if not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator = {denominator}: must be that of the whole step, > 0")
