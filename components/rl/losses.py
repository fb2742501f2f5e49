"""Losses as plain functions of log-probabilities.

The denominator is always given: by default the number of trained tokens of the whole step, over all
rollouts, micro-batches and ranks. The sum over micro-batches and ranks of what is returned here is
then the loss of the step, however it was split; a mean of means would not be. ``aggregate.py`` has
other denominators and the weights of tokens that belong to them.

Suffixes: ``M`` trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.rl.aggregate import rollout_means
from components.rl.totals import (
    KLEstimator,
    LossOutput,
    check_constants,
    check_denominator,
    check_settings,
    clipped,
    total,
)


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
        check_settings(eps_low, eps_high, beta, kl_estimator)
        self.low, self.high = 1.0 - eps_low, 1.0 + eps_high
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
        token_weights: Tensor | None = None,
        rollout: Tensor | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch.

        Args:
            trainer_logprobs: [M] of the weights being trained, with gradient; M may be 0.
            old_logprobs: [M] what the ratio is taken against: the trainer's own before the first
                update on this batch (``trainer_logprobs.detach()`` if there is only one update and
                nothing is stale), or the generator's.
            advantages: [M] each token has its rollout's.
            denominator: of the whole step: its trained tokens, or see ``Aggregation``.
            ref_logprobs: [M] of the reference; needed if beta > 0. With beta = 0 the KL is only
                reported.
            is_weights: [M] weights of the policy term, see ``Importance``.
            token_weights: [M] weights of policy and KL term, see ``Aggregation``; None: all 1.
            rollout: [M] which rollout each token is of; not needed here.

        Raises:
            ValueError: beta > 0 without a reference, denominator not positive, shapes that differ.
        """
        weights = {"is_weights": is_weights, "token_weights": token_weights}
        constants = {"old_logprobs": old_logprobs, "advantages": advantages, **weights}
        check_constants(trainer_logprobs, constants)
        ratio = torch.exp(trainer_logprobs - old_logprobs)
        return total(
            trainer_logprobs,
            **clipped(ratio, advantages, self.low, self.high),
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            ref_logprobs=ref_logprobs,
            denominator=denominator,
            is_weights=is_weights,
            token_weights=token_weights,
        )


class GSPOLoss:
    """Like ``GRPOLoss``, but ratio and clip are those of whole rollouts (GSPO).

    ``s_i = exp(mean_t(trainer_logprob - old_logprob))`` over the trained tokens of rollout i takes
    the place of each token's ratio. https://arxiv.org/abs/2507.18071; with the
    aggregation ``sequence`` the sum is the paper's ``mean_i min(s_i A_i, clip(s_i) A_i)``. The clip
    is much narrower than that of tokens, whose ratios it averages: the defaults are the paper's.

    Args and Raises: see ``GRPOLoss``.
    """

    def __init__(
        self,
        *,
        eps_low: float = 3e-4,
        eps_high: float = 4e-4,
        beta: float = 0.0,
        kl_estimator: KLEstimator = "k3",
    ) -> None:
        check_settings(eps_low, eps_high, beta, kl_estimator)
        self.low, self.high = 1.0 - eps_low, 1.0 + eps_high
        self.beta = beta
        self.kl_estimator: KLEstimator = kl_estimator

    def __call__(
        self,
        trainer_logprobs: Tensor,
        *,
        old_logprobs: Tensor,
        advantages: Tensor,
        denominator: float,
        rollout: Tensor,
        ref_logprobs: Tensor | None = None,
        is_weights: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch, which holds each of its rollouts whole.

        Args and Raises: see ``GRPOLoss``; ``rollout`` [M] is needed.
        """
        weights = {"is_weights": is_weights, "token_weights": token_weights}
        constants = {"old_logprobs": old_logprobs, "advantages": advantages, **weights}
        check_constants(trainer_logprobs, {**constants, "rollout": rollout})
        ratio = torch.exp(rollout_means(trainer_logprobs - old_logprobs, rollout))
        return total(
            trainer_logprobs,
            **clipped(ratio, advantages, self.low, self.high),
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            ref_logprobs=ref_logprobs,
            denominator=denominator,
            is_weights=is_weights,
            token_weights=token_weights,
        )


class CISPOLoss:
    """Policy gradient whose importance weight is clipped, so that no token loses its gradient.

    ``-sum_t sg(clip(rho_t, 1 - eps_low, 1 + eps_high)) A_t trainer_logprob_t / denominator`` where
    sg stops the gradient. MiniMax-M1, https://arxiv.org/abs/2506.13585; as there
    the lower bound is off by default (eps_low = 1).

    Args and Raises: see ``GRPOLoss``; eps_low may be 1.
    """

    def __init__(
        self,
        *,
        eps_low: float = 1.0,
        eps_high: float = 4.0,
        beta: float = 0.0,
        kl_estimator: KLEstimator = "k3",
    ) -> None:
        check_settings(eps_low, eps_high, beta, kl_estimator, lowest_allowed=True)
        self.low, self.high = 1.0 - eps_low, 1.0 + eps_high
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
        token_weights: Tensor | None = None,
        rollout: Tensor | None = None,
    ) -> LossOutput:
        """The loss of one micro-batch.

        Args and Raises: see ``GRPOLoss``.
        """
        weights = {"is_weights": is_weights, "token_weights": token_weights}
        constants = {"old_logprobs": old_logprobs, "advantages": advantages, **weights}
        check_constants(trainer_logprobs, constants)
        ratio = torch.exp(trainer_logprobs.detach() - old_logprobs)
        return total(
            trainer_logprobs,
            gain=ratio.clamp(self.low, self.high) * advantages * trainer_logprobs,
            ratio=ratio,
            clips_low=ratio < self.low,
            clips_high=ratio > self.high,
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            ref_logprobs=ref_logprobs,
            denominator=denominator,
            **weights,
        )


def sft_loss(logprobs: Tensor, *, denominator: float) -> Tensor:
    """Cross entropy ``-sum(logprobs) / denominator``.

    Args:
        logprobs: [M] of the trained tokens; M may be 0.
        denominator: trained tokens of the whole step.
    """
    check_denominator(denominator)
    return -logprobs.sum() / denominator
