"""Trainer against generator: weights, masks, and how far they are apart, by hand."""

import math

import pytest
import torch

from components.rl.importance import Importance, mismatch

F64 = torch.float64


def _leaf(values):
    return torch.tensor(values, dtype=F64, requires_grad=True)


def _const(values):
    return torch.tensor(values, dtype=F64)


def log(*values):
    return [math.log(value) for value in values]


# Ratios 3, 1/2 of the first rollout (product 1.5), 1 and 1/4 of the second (product .25).
TRAINER, GENERATOR = log(0.9, 0.2, 0.4, 0.1), log(0.3, 0.4, 0.4, 0.4)
ROLLOUT = torch.tensor([0, 0, 1, 1])


def ratios(importance):
    return importance.log_ratios(_leaf(TRAINER), _const(GENERATOR), ROLLOUT)


def test_nothing_is_done_by_default():
    importance = Importance()
    assert importance.weights(ratios(importance)) is None
    assert not importance.masks
    assert importance.num_capped(ratios(importance)) == 0


@pytest.mark.parametrize(
    ("level", "cap", "expected", "num_capped"),
    [
        ("token", 2.0, [2.0, 0.5, 1.0, 0.25], 1),
        ("token", 4.0, [3.0, 0.5, 1.0, 0.25], 0),
        ("sequence", 2.0, [1.5, 1.5, 0.25, 0.25], 0),
        ("sequence", 1.2, [1.2, 1.2, 0.25, 0.25], 2),
    ],
)
def test_truncated_weights(level, cap, expected, num_capped):
    importance = Importance(level=level, cap=cap)
    weights = importance.weights(ratios(importance))
    assert weights is not None
    assert weights.tolist() == pytest.approx(expected)
    assert not weights.requires_grad
    assert importance.num_capped(ratios(importance)) == num_capped


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mask_below": 0.4, "mask_above": 2.5}, [False, True, True, False]),
        ({"mask_above": 2.5}, [False, True, True, True]),
        ({"mask_below": 0.4}, [True, True, True, False]),
        ({"mask_below": 0.2, "mask_above": 4.0}, [True] * 4),
        ({"level": "sequence", "mask_above": 1.4}, [False, False, True, True]),
        ({"level": "sequence", "mask_below": 0.4, "mask_above": 1.6}, [True, True, False, False]),
    ],
)
def test_masks(settings, expected):
    importance = Importance(**settings)
    assert importance.masks
    assert importance.keep(ratios(importance)).tolist() == expected


def test_weight_of_an_impossible_token_is_the_cap():
    # exp(800) overflows if the cap comes after it
    importance = Importance(cap=2.0)
    log_ratios = importance.log_ratios(_const([-1.0]), _const([-801.0]), torch.tensor([0]))
    weights = importance.weights(log_ratios)
    assert weights is not None
    assert weights.tolist() == pytest.approx([2.0])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logprobs_must_be_finite(bad):
    good, rollout = _const([-1.0, -1.0]), torch.tensor([0, 0])
    with pytest.raises(FloatingPointError, match=r"generator_logprobs: 1 of 2 .* at token 1"):
        Importance().log_ratios(good, _const([-1.0, bad]), rollout)
    with pytest.raises(FloatingPointError, match="trainer_logprobs"):
        Importance().log_ratios(_const([bad, -1.0]), good, rollout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cap": 0.0}, "cap"),
        ({"cap": math.inf}, "cap"),
        ({"level": "rollout"}, "level = 'rollout': must be one of"),
        ({"mask_below": 1.5}, "1 must lie between them"),
        ({"mask_above": 0.5}, "1 must lie between them"),
        ({"mask_below": -0.5}, "mask_below"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Importance(**settings)


def test_mismatch():
    # generator .5, trainer .25: r = trainer / generator = .5, k3 = r - 1 - ln r
    result = mismatch(_leaf([math.log(0.25), -1.0]), _const([math.log(0.5), -1.0]))
    assert result.kl == pytest.approx((0.5 - 1 + math.log(2)) / 2)
    assert result.logprob_diff_max == pytest.approx(math.log(2))
    assert result.num_tokens == 2
    empty = mismatch(torch.empty(0), torch.empty(0))
    assert (empty.kl, empty.logprob_diff_max, empty.num_tokens) == (0.0, 0.0, 0)


def test_mismatch_estimates_kl_from_generator_to_trainer():
    generator, trainer = _const([0.5, 0.3, 0.2]), _const([0.2, 0.2, 0.6])
    estimate = sum(
        float(generator[i]) * mismatch(trainer[i : i + 1].log(), generator[i : i + 1].log()).kl
        for i in range(3)
    )
    assert estimate == pytest.approx(float((generator * (generator / trainer).log()).sum()))


def test_mismatch_wants_one_shape():
    with pytest.raises(ValueError, match="same shape"):
        mismatch(_const([-1.0]), _const([-1.0, -2.0]))
