"""What surrounds an update: settings, rows, what they add up to, and what the step did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.attention.plan import MaskPlan
from components.rl.advantages import GroupAdvantages
from components.rl.importance import Mismatch
from components.rl.packing import PackedBatch, PackItem, empty_batch, pack, pack_stats
from components.rl.totals import LossOutput
from components.training.parallelize import World


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """Of ``PolicyUpdate``."""

    temperature: float
    """Of the sampling."""
    logprob_chunk: int
    """Trained tokens whose logits exist at a time."""
    max_grad_norm: float
    """Gradients are clipped to this global norm."""
    updates_per_batch: int = 1
    """Optimizer steps on the same rollouts. The ratio stays against the log-probabilities from
    before the first, so from the second on the clip acts."""
    max_staleness: int = 0
    """Rows may come from weights that are so many steps older than those that train on them."""
    offload: bool = False
    """Keep the older weights in the host's memory."""
    probe_noise: bool = False
    """Measure how much of the first gradient is signal; see ``GradientNoise``."""


def update_settings_from(options: Mapping[str, Any]) -> UpdateSettings:
    """Those of a config with ``rollout``, ``logprob_chunk``, ``max_grad_norm``,
    ``updates_per_batch``, ``probe_noise`` and ``reference``."""
    own = ("logprob_chunk", "max_grad_norm", "updates_per_batch", "probe_noise")
    return UpdateSettings(
        temperature=options["rollout"]["temperature"],
        max_staleness=options["rollout"]["max_staleness"],
        offload=options["reference"]["offload"],
        **{name: options[name] for name in own},
    )


def packed_rows(
    items: Sequence[PackItem], *, tokens_per_batch: int, world: World
) -> tuple[list[tuple[PackedBatch, MaskPlan]], dict[str, float]]:
    """Pack this rank's rollouts; every rank gets the same number of rows, some of them empty.

    A rank with fewer rows would leave the others waiting in the collectives of FSDP2. Collective.

    Args:
        items: of this rank.
        tokens_per_batch: longest row.
        world: this process among its peers.

    Returns:
        Rows on this rank's device with their mask plans; ``pack/*`` metrics of all ranks.
    """
    batches = pack(items, tokens_per_batch=tokens_per_batch)
    num_batches = int(world.max([len(batches)])[0])
    batches += [empty_batch()] * (num_batches - len(batches))
    stats = pack_stats(items, batches)
    computed, tokens, trained = world.sum(
        [stats.computed_tokens, stats.rollout_tokens, stats.trained_tokens]
    )
    metrics = {
        "pack/saving": computed / tokens if tokens else 1.0,
        "pack/trained_tokens": trained,
        "pack/num_batches": float(num_batches),
    }
    batches = [batch.to(world.device) for batch in batches]
    return [(batch, MaskPlan.from_tree(batch.tree)) for batch in batches], metrics


_SUMS = (
    "loss/total",
    "num_tokens",
    "num_with_masked",
    "loss/policy",
    "loss/kl",
    "policy/clip_frac_low",
    "policy/clip_frac_high",
    "policy/entropy",
    "importance/capped_frac",
    "mismatch/kl",
)


class UpdateTotals:
    """Sums over the rows of an update, made into metrics of all ranks.

    Args:
        denominator: of the loss, over all rows and ranks.
    """

    def __init__(self, *, denominator: float) -> None:
        self._denominator = denominator
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._worst_gap = 0.0

    def add(
        self, out: LossOutput, *, entropy: Tensor | None, gap: Mismatch, num_capped: int = 0
    ) -> None:
        """Count one row.

        Args:
            out: of the loss, over the tokens that are in it.
            entropy: [M] of the sampled distributions of those tokens, or None.
            gap: between trainer and generator, over all trained tokens.
            num_capped: tokens whose importance weight is the cap.
        """
        # max() would lose a NaN: every comparison with one is false.
        if not gap.logprob_diff_max <= self._worst_gap and not math.isnan(self._worst_gap):
            self._worst_gap = gap.logprob_diff_max
        values = {
            "loss/total": out.loss.detach(),
            "num_tokens": out.num_tokens,
            "num_with_masked": gap.num_tokens,
            "loss/policy": out.policy_sum,
            "loss/kl": out.kl_sum,
            "policy/clip_frac_low": out.num_clipped_low,
            "policy/clip_frac_high": out.num_clipped_high,
            "policy/entropy": 0.0 if entropy is None else entropy.detach().sum(),
            "importance/capped_frac": num_capped,
            "mismatch/kl": gap.kl_sum,
        }
        for name in self._sums:
            self._sums[name] += float(values[name])

    def add_not_finite(self, *, num_tokens: int) -> None:
        """Count a row whose log-probabilities are not finite: nor is anything made of them."""
        self._worst_gap = math.nan
        for name in self._sums:
            self._sums[name] += num_tokens if name.startswith("num_") else math.nan

    def metrics(self, world: World) -> dict[str, float]:
        """The loss and its parts, and means over the tokens of all ranks. Collective."""
        sums = dict(zip(self._sums, world.sum(list(self._sums.values())), strict=True))
        loss, tokens = sums.pop("loss/total"), sums.pop("num_tokens")
        all_tokens = sums.pop("num_with_masked")
        divisors = {
            "loss/policy": self._denominator,
            "loss/kl": self._denominator,
            "mismatch/kl": all_tokens,
        }
        return {
            "loss/total": loss,
            **{name: value / divisors.get(name, tokens) for name, value in sums.items()},
            "importance/masked_frac": 1.0 - tokens / all_tokens,
            "mismatch/logprob_diff_max": world.max([self._worst_gap])[0],
        }


def group_metrics(advantages: GroupAdvantages, world: World) -> dict[str, float]:
    """Shares of the groups of all ranks that carried no signal, and why. Collective."""
    counts = [len(advantages.kept), advantages.num_no_variance, advantages.num_too_small]
    groups, no_variance, too_small = world.sum(counts)
    return {
        "group/zero_std_frac": no_variance / groups,
        "group/too_small_frac": too_small / groups,
    }


def why_nothing_changed(metrics: Mapping[str, float]) -> str:
    """A sentence for a step without an optimizer step."""
    reason = "no group had rollouts with different rewards"
    if metrics["pack/trained_tokens"] > 0:
        reason = "importance.mask_below and importance.mask_above left no token in the loss"
    return (
        f"{reason}, so there was nothing to learn from in this step and the weights did not change"
    )


def dump_rows(rows: Sequence[tuple[PackedBatch, MaskPlan]], path: Path) -> None:
    """Keep the rows that led to numbers that are not finite, for ``torch.load``."""
    columns = ("tokens", "position", "index", "targets", "advantages", "generator_logprobs")
    torch.save([{name: getattr(b, name).cpu() for name in columns} for b, _ in rows], path)


def logprob_gain(new: Tensor, old: Tensor, batch: PackedBatch, world: World) -> dict[str, float]:
    """What a step did to the log-probabilities it was to raise and to lower. Collective.

    Args:
        new: [M] of a row after the step.
        old: [M] before it.
        batch: the row.
        world: this process among its peers.

    Returns:
        ``policy/logprob_gain``: mean change weighted by advantage / mean |advantage|, above 0 when
        the step did its work; ``policy/logprob_gain_positive``: mean change of the tokens with a
        positive advantage.
    """
    change, positive = new - old, batch.advantages > 0
    gain, weight, raised, num_positive = world.sum(
        [
            float((change * batch.advantages).sum()),
            float(batch.advantages.abs().sum()),
            float(change[positive].sum()),
            float(positive.sum()),
        ]
    )
    return {
        "policy/logprob_gain": gain / max(weight, 1e-9),
        "policy/logprob_gain_positive": raised / max(num_positive, 1.0),
    }
