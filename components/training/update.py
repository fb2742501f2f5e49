"""Bookkeeping of one update: what its rows add up to, whether it is safe, and what it did."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from components.rl.losses import LossOutput, Mismatch
from components.rl.packing import PackedBatch
from components.training.parallelize import World


class UpdateTotals:
    """Sums over the rows of a step, made into metrics per trained token of all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._num_tokens = 0
        self._worst_gap = 0.0
        self._loss = 0.0

    def add(self, out: LossOutput, *, entropy: Tensor | None, gap: Mismatch) -> None:
        """Count one row.

        Args:
            out: of the loss.
            entropy: [M] of the sampled distributions, or None.
            gap: between trainer and generator.
        """
        self._num_tokens += out.num_tokens
        self._worst_gap = max(self._worst_gap, gap.logprob_diff_max)
        for name, value in (
            ("loss/policy", out.policy_sum),
            ("loss/kl", out.kl_sum),
            ("policy/clip_frac_low", out.num_clipped_low),
            ("policy/clip_frac_high", out.num_clipped_high),
            ("policy/entropy", 0.0 if entropy is None else entropy.sum()),
            ("mismatch/kl", gap.kl_sum),
        ):
            self._sums[name] = self._sums.get(name, 0.0) + float(value)
        self._loss += float(out.loss.detach())

    def metrics(self, world: World) -> dict[str, float]:
        """Means over the trained tokens of all ranks. Collective."""
        loss, num_tokens, *sums = world.sum([self._loss, self._num_tokens, *self._sums.values()])
        means = {name: s / num_tokens for name, s in zip(self._sums, sums, strict=True)}
        worst = world.max([self._worst_gap])[0]
        return {"loss/total": loss, **means, "mismatch/logprob_diff_max": worst}


def check_finite(
    metrics: Mapping[str, float],
    batches: Sequence[PackedBatch],
    *,
    output_dir: Path,
    step: int,
) -> None:
    """Stop before a bad step reaches the weights; keep what led to it.

    Raises:
        FloatingPointError: naming the metrics that are not finite and the file with the batch.
    """
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if not wrong:
        return
    path = output_dir / f"not_finite_step_{step}_rank_{os.environ.get('RANK', '0')}.pt"
    columns = ("tokens", "position", "index", "targets", "advantages", "generator_logprobs")
    torch.save([{name: getattr(b, name).cpu() for name in columns} for b in batches], path)
    raise FloatingPointError(
        f"step {step}: {wrong} not finite. The weights are those of step {step - 1}; the batch is "
        f"in {path}"
    )


def logprob_gain(
    new: Sequence[Tensor],
    old: Sequence[Tensor],
    batches: Sequence[PackedBatch],
    world: World,
) -> dict[str, float]:
    """What a step did to the log-probabilities it was to raise and to lower.

    Args:
        new: [M] after the step, for the first rows.
        old: [M] before it.
        batches: the rows.
        world: this process among its peers.

    Returns:
        ``policy/logprob_gain``: mean change weighted by advantage / mean |advantage|, above 0 when
        the step did its work; ``policy/logprob_gain_positive``: mean change of the tokens with a
        positive advantage.
    """
    gain = weight = raised = num_positive = 0.0
    for after, before, batch in zip(new, old, batches, strict=False):
        change = after - before
        positive = batch.advantages > 0
        gain += float((change * batch.advantages).sum())
        weight += float(batch.advantages.abs().sum())
        raised += float(change[positive].sum())
        num_positive += float(positive.sum())
    gain, weight, raised, num_positive = world.sum([gain, weight, raised, num_positive])
    return {
        "policy/logprob_gain": gain / max(weight, 1e-9),
        "policy/logprob_gain_positive": raised / max(num_positive, 1.0),
    }
