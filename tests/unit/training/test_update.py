"""What the rows of an update add up to."""

import math

import pytest
import torch

from components.attention.plan import MaskPlan
from components.rl.advantages import group_advantages
from components.rl.importance import mismatch
from components.rl.losses import GRPOLoss
from components.rl.packing import empty_batch, pack
from components.training.parallelize import World
from components.training.update import UpdateTotals, dump_rows, group_metrics, logprob_gain
from tests.unit.rl.ledgers import item

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def rows(seed=0):
    """Log-probabilities of 7 trained tokens: policy, old, reference, generator, advantages."""
    generator = torch.Generator().manual_seed(seed)
    columns = [-torch.rand(7, generator=generator) * 3 for _ in range(4)]
    return *columns, torch.randn(7, generator=generator)


def totals_of(parts, *, denominator=7.0):
    new, old, reference, sampled, advantages = rows()
    entropy = torch.arange(7.0)
    totals = UpdateTotals(denominator=denominator)
    for part in parts:
        out = GRPOLoss(beta=0.1)(
            new[part],
            old_logprobs=old[part],
            advantages=advantages[part],
            denominator=denominator,
            ref_logprobs=reference[part],
            is_weights=None,
        )
        totals.add(out, entropy=entropy[part], gap=mismatch(old[part], sampled[part]))
    return totals


@pytest.mark.parametrize(
    "parts",
    [[slice(0, 7)], [slice(0, 1), slice(1, 7)], [slice(0, 3), slice(3, 3), slice(3, 7)]],
)
def test_means_are_over_tokens_however_they_are_split(parts):
    new, old, reference, sampled, advantages = (c.double() for c in rows())
    ratio = (new - old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (reference - new).exp() - 1 - (reference - new)
    gap = (old - sampled).abs()
    found = totals_of(parts).metrics(ALONE)
    expected = {
        "loss/total": (policy.mean() + 0.1 * kl.mean()).item(),
        "loss/policy": policy.mean().item(),
        "loss/kl": kl.mean().item(),
        "policy/clip_frac_low": ((advantages < 0) & (ratio < 0.8)).double().mean().item(),
        "policy/clip_frac_high": ((advantages > 0) & (ratio > 1.2)).double().mean().item(),
        "policy/entropy": 3.0,
        "importance/capped_frac": 0.0,
        "importance/masked_frac": 0.0,
        "mismatch/kl": ((old - sampled).exp() - 1 - (old - sampled)).mean().item(),
        "mismatch/logprob_diff_max": gap.max().item(),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert found["policy/clip_frac_low"] + found["policy/clip_frac_high"] > 0


class TwoRanks(World):
    """Sums and maxima with a second rank whose values are given."""

    def sum(self, values):
        assert len(values) == len(OTHER)
        return [a + b for a, b in zip(values, OTHER, strict=True)]

    def max(self, values):
        return [max(values[0], 9.0)]


# loss, tokens in the loss, tokens with the masked ones, policy, kl, low, high, entropy, capped, gap
OTHER = [0.5, 1.0, 3.0, 14.0, 0.0, 0.0, 0.0, 8.0, 1.0, 0.0]


def test_ranks_are_weighed_by_their_tokens():
    alone = totals_of([slice(0, 7)]).metrics(ALONE)
    both = totals_of([slice(0, 7)], denominator=8.0).metrics(
        TwoRanks(rank=0, size=2, device=torch.device("cpu"))
    )
    assert both["loss/total"] == pytest.approx(7 / 8 * alone["loss/total"] + 0.5)
    assert both["loss/policy"] == pytest.approx((7 * alone["loss/policy"] + 14) / 8)
    assert both["policy/entropy"] == pytest.approx((21 + 8) / 8)
    assert both["importance/capped_frac"] == pytest.approx(1 / 8)
    assert both["importance/masked_frac"] == pytest.approx(2 / 10)
    assert both["mismatch/kl"] == pytest.approx(alone["mismatch/kl"] * 7 / 10)
    assert both["mismatch/logprob_diff_max"] == 9.0


def batch():
    items = [
        item("a", [1, 2, 3], [4, 5], advantage=2.0),
        item("b", [1, 2, 6], [7], advantage=-1.0),
    ]
    (found,) = pack(items, tokens_per_batch=32)
    return found


def row():
    return batch(), MaskPlan.from_tree(batch().tree)


def test_a_gap_that_is_not_a_number_is_not_lost():
    policy, old, _, generator, advantages = rows()
    totals = UpdateTotals(denominator=7.0)
    for number in (0.0, math.nan, 0.0):
        shifted = generator.clone()
        shifted[3] += number
        out = GRPOLoss(eps_low=0.2, eps_high=0.2)(
            policy, old_logprobs=old, advantages=advantages, denominator=7
        )
        totals.add(out, entropy=None, gap=mismatch(old, shifted))
    assert math.isnan(totals.metrics(ALONE)["mismatch/logprob_diff_max"])


def test_rows_are_kept_for_whoever_looks_for_the_fault(tmp_path):
    path = tmp_path / "dump.pt"
    dump_rows([row()], path)
    (kept,) = torch.load(path, weights_only=True)
    assert torch.equal(kept["tokens"], batch().tokens)
    assert torch.equal(kept["targets"], batch().targets)
    assert torch.equal(kept["advantages"], batch().advantages)


def test_gain_is_weighed_by_advantage():
    row = batch()
    assert row.advantages.tolist() in ([2, 2, -1], [-1, 2, 2])
    old = torch.full((3,), -1.0)
    change = torch.where(row.advantages > 0, 0.1, -0.4)
    found = logprob_gain(old + change, old, row, ALONE)
    assert found["policy/logprob_gain"] == pytest.approx((2 * 0.1 + 2 * 0.1 + 0.4) / 5)
    assert found["policy/logprob_gain_positive"] == pytest.approx(0.1)
    worse = logprob_gain(old - change, old, row, ALONE)
    assert worse["policy/logprob_gain"] == pytest.approx(-0.16)


def test_gain_of_nothing_is_zero():
    found = logprob_gain(torch.zeros(0), torch.zeros(0), empty_batch(), ALONE)
    assert found == {"policy/logprob_gain": 0.0, "policy/logprob_gain_positive": 0.0}


def test_groups_without_a_signal_are_counted_by_reason():
    advantages = group_advantages(
        [[1.0, 0.0], [1.0, 1.0], [0.5, None], [0.0, 0.0, 0.0]], normalize_std=True, eps=1e-6
    )
    assert group_metrics(advantages, ALONE) == {
        "group/zero_std_frac": 0.5,
        "group/too_small_frac": 0.25,
    }
