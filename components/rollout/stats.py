"""Metrics of a step's rollouts: means over what they count."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from components.rollout.types import Rollout


def staleness_metrics(rollouts: Sequence[Rollout], *, version: int) -> dict[str, float]:
    """How old the policy was that sampled the tokens of a step.

    Args:
        rollouts: of the step.
        version: of the weights that are trained on them.

    Returns:
        ``rollout/staleness_mean``, steps by which each sampled token's policy_version is behind.
    """
    behind = [
        version - sampled
        for rollout in rollouts
        for sampled, mask in zip(
            rollout.tokens.policy_versions, rollout.tokens.loss_mask, strict=True
        )
        if mask
    ]
    return {"rollout/staleness_mean": fmean(behind)} if behind else {}


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards, lengths, ends and errors of some rollouts.

    Rewards are means over the valid rollouts; a failed one (``error_*``) says nothing about the
    policy and is counted in ``rollout/error_frac`` alone.

    Args:
        rollouts: at least one.

    Returns:
        ``group/name`` to value; see recipes/grpo_agentic.md.
    """
    valid = [r for r in rollouts if r.valid]
    metrics = {"rollout/error_frac": 1.0 - len(valid) / len(rollouts)}
    if not valid:
        return metrics
    names = dict.fromkeys(name for r in valid for name in r.reward_breakdown)
    for name in names:
        metrics[f"reward/{name}_mean"] = fmean(r.reward_breakdown.get(name, 0.0) for r in valid)
    domains = dict.fromkeys(r.spec.domain for r in rollouts)
    for domain in domains if len(domains) > 1 else ():
        own = [r.reward for r in valid if r.spec.domain == domain and r.reward is not None]
        if own:
            metrics[f"reward/mean_{domain}"] = fmean(own)
    rewards = [r.reward for r in valid if r.reward is not None]
    calls = sum(r.stats["tool_calls"] for r in valid)
    turns = sum(r.stats["turns"] for r in valid)
    return {
        "reward/mean": fmean(rewards),
        "reward/max": max(rewards),
        **metrics,
        "rollout/truncated_frac": fmean(r.status.startswith("truncated_") for r in valid),
        "rollout/truncated_tokens_frac": fmean(r.status == "truncated_tokens" for r in valid),
        "rollout/turns": turns / len(valid),
        "rollout/tool_calls": calls / len(valid),
        "rollout/tokens": fmean(len(r.tokens) for r in valid),
        "rollout/sampled_tokens": sampled_tokens(valid) / len(valid),
        "tool/error_frac": sum(r.stats["tool_errors"] for r in valid) / max(calls, 1),
        "tool/parse_error_frac": sum(r.stats["parse_errors"] for r in valid) / max(turns, 1),
    }


def sampled_tokens(rollouts: Sequence[Rollout]) -> float:
    """Tokens that the policy sampled, over all rollouts."""
    return sum(r.stats.get("sampled_tokens", 0) for r in rollouts)
