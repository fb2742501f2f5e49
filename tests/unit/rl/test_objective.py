"""What a row adds to the loss of its step, by hand."""

import math

import pytest
import torch

from components.rl.aggregate import Aggregation
from components.rl.importance import Importance
from components.rl.losses import GRPOLoss
from components.rl.objective import Objective, count, objective_from
from components.rl.packing import pack
from tests.unit.rl.ledgers import item


def batch():
    """Rollout a: two trained tokens, A = 1, sampled with .4, .4; b: one, A = -2, with .5."""
    logs = [math.log(0.4)] * 4
    items = [
        item("a", [1, 2], [3, 4], advantage=1.0, logprobs=logs),
        item("b", [1, 5], [6], advantage=-2.0, logprobs=[math.log(0.5)] * 3),
    ]
    (row,) = pack(items, tokens_per_batch=16)
    assert row.rollout.tolist() == [0, 0, 1]
    return row


def leaf(*probabilities):
    return torch.tensor(probabilities).log().requires_grad_(True)


def objective(**settings):
    return Objective(
        **{
            "loss": GRPOLoss(),
            "aggregation": Aggregation(),
            "importance": Importance(),
            **settings,
        }
    )


BEFORE = torch.tensor([0.4, 0.2, 0.5]).log()
"""The trainer's before the update: ratios to the generator 1, 1/2, 1."""


def test_the_default_is_the_papers_loss():
    logprobs = leaf(0.4, 0.3, 0.55)
    out, num_capped = objective()(logprobs, batch=batch(), before=BEFORE, denominator=3)
    out.loss.backward()
    # ratios 1, 1.5 (clipped to 1.2), 1.1: -(1 + 1.2 - 2 * 1.1) / 3 = 0
    assert out.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, 0.0, 2.2 / 3])
    assert num_capped == 0


def test_the_ratio_may_be_against_the_generator():
    logprobs = leaf(0.4, 0.3, 0.55)
    out, _ = objective(ratio="generator")(logprobs, batch=batch(), before=BEFORE, denominator=3)
    out.loss.backward()
    # ratios 1, .75 (not clipped: A > 0), 1.1
    assert out.loss.item() == pytest.approx(-(1 + 0.75 - 2.2) / 3)
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, -0.75 / 3, 2.2 / 3])


@pytest.mark.parametrize(
    ("level", "weights", "num_capped"), [("token", (1, 0.5, 1), 0), ("sequence", (0.5, 0.5, 1), 0)]
)
def test_importance_weights(level, weights, num_capped):
    logprobs = BEFORE.clone().requires_grad_(True)
    parts = objective(importance=Importance(level=level, cap=2.0))
    out, capped = parts(logprobs, batch=batch(), before=BEFORE, denominator=3)
    out.loss.backward()
    expected = [-weights[0] / 3, -weights[1] / 3, 2 * weights[2] / 3]
    assert logprobs.grad.tolist() == pytest.approx(expected)
    assert capped == num_capped


@pytest.mark.parametrize(
    ("level", "keep"), [("token", [True, False, True]), ("sequence", [False, False, True])]
)
@pytest.mark.parametrize("over", ["token", "sequence"])
def test_what_is_masked_counts_nowhere(level, keep, over):
    """Fault 14: the same as without these tokens in the batch, numerator and denominator."""
    parts = objective(
        importance=Importance(level=level, mask_below=0.6), aggregation=Aggregation(over=over)
    )
    found = parts.keep(BEFORE, batch())
    assert found is not None
    assert found.tolist() == keep
    tokens, rollouts = count(batch(), found)
    assert (tokens, rollouts) == (sum(keep), 1 + keep[0])
    denominator = parts.aggregation.denominator(num_tokens=tokens, num_rollouts=rollouts)
    logprobs = BEFORE.clone().requires_grad_(True)
    out, _ = parts(logprobs, batch=batch(), before=BEFORE, denominator=denominator, keep=found)
    out.loss.backward()
    # every kept rollout has one kept token: over tokens and over rollouts are the same here
    kept = [(-1.0 if i < 2 else 2.0) if k else 0.0 for i, k in enumerate(keep)]
    assert logprobs.grad.tolist() == pytest.approx([g / sum(keep) for g in kept])
    assert out.num_tokens == sum(keep)


def test_nothing_is_masked_without_bounds():
    assert objective().keep(BEFORE, batch()) is None
    assert count(batch(), None) == (3, 2)


def test_truncated_tokens_are_not_in_the_denominator():
    """Fault 14: two rollouts of 4 tokens with loss 1 each, one of them masked: 1.0, not 0.5."""
    items = [
        item("a", [1], [2, 3, 4, 5], advantage=-1.0, logprobs=[-1.0] * 5),
        item("b", [1], [2, 3, 4, 5], advantage=-1.0, logprobs=[-9.0] * 5),
    ]
    (row,) = pack(items, tokens_per_batch=16)
    before = torch.full((8,), -1.0)
    parts = objective(importance=Importance(level="sequence", mask_above=2.0))
    keep = parts.keep(before, row)
    denominator = parts.aggregation.denominator(num_tokens=count(row, keep)[0], num_rollouts=1)
    out, _ = parts(before, batch=row, before=before, denominator=denominator, keep=keep)
    assert out.loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize(("over", "mean"), [("token", 7 / 3), ("sequence", (1.5 + 4) / 2)])
def test_the_entropy_bonus_is_taken_off_the_loss(over, mean):
    entropy = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    results = []
    for bonus in (0.0, 0.1):
        parts = objective(entropy_bonus=bonus, aggregation=Aggregation(over=over))
        denominator = parts.aggregation.denominator(num_tokens=3, num_rollouts=2)
        out, _ = parts(
            leaf(0.4, 0.3, 0.55),
            batch=batch(),
            before=BEFORE,
            denominator=denominator,
            entropy=entropy,
        )
        results.append(out.loss)
    assert (results[0] - results[1]).item() == pytest.approx(0.1 * mean)
    (gradient,) = torch.autograd.grad(results[1], entropy)
    assert float(gradient.sum()) == pytest.approx(-0.1)
    with pytest.raises(ValueError, match=r"entropy_bonus = 0\.1: needs the entropy"):
        objective(entropy_bonus=0.1)(BEFORE, batch=batch(), before=BEFORE, denominator=3)


def test_settings_that_contradict_each_other():
    with pytest.raises(ValueError, match="ratio = 'old': must be one of"):
        objective(ratio="old")
    with pytest.raises(ValueError, match=r"importance\.cap = 2\.0: ratio = generator"):
        objective(ratio="generator", importance=Importance(cap=2.0))


def test_from_a_config():
    loss = GRPOLoss()
    options = {
        "aggregation": {"over": "constant", "divisor": 8.0},
        "importance": {"level": "sequence", "cap": 3.0, "mask_below": None, "mask_above": 4.0},
        "ratio": "proximal",
        "entropy_bonus": 0.5,
        "seed": 1,
    }
    assert objective_from(options, loss=loss) == Objective(
        loss=loss,
        aggregation=Aggregation(over="constant", divisor=8.0),
        importance=Importance(level="sequence", cap=3.0, mask_above=4.0),
        entropy_bonus=0.5,
    )
