"""Weights and denominators, by hand."""

import pytest
import torch

from components.rl.aggregate import Aggregation, rollout_means, rollout_sums

# Two rollouts: one token with the term 4, three with 0, 0, 2; they are interleaved.
TERMS = torch.tensor([0.0, 4.0, 0.0, 2.0])
ROLLOUT = torch.tensor([1, 0, 1, 1])


def value(aggregation, terms, rollout, *, num_tokens, num_rollouts):
    weights = aggregation.token_weights(rollout)
    weighted = terms if weights is None else terms * weights
    denominator = aggregation.denominator(num_tokens=num_tokens, num_rollouts=num_rollouts)
    return float(weighted.sum()) / denominator


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation(), 6 / 4),
        (Aggregation(over="token"), 6 / 4),
        (Aggregation(over="sequence"), (4 / 1 + 2 / 3) / 2),
        (Aggregation(over="constant", divisor=8), 6 / (8 * 2)),
    ],
)
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[1], [0, 2, 3]]])
def test_by_hand_and_for_every_split_into_rows(aggregation, expected, parts):
    found = sum(
        value(
            aggregation,
            TERMS[part],
            # numbers count from 0 in each row
            ROLLOUT[part] if len(parts) == 1 else torch.zeros(len(part), dtype=torch.long),
            num_tokens=4,
            num_rollouts=2,
        )
        for part in parts
    )
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", [Aggregation(), Aggregation(over="sequence")])
def test_one_value_everywhere_is_that_value(aggregation):
    assert value(
        aggregation, torch.full((4,), 3.0), ROLLOUT, num_tokens=4, num_rollouts=2
    ) == pytest.approx(3.0)


def test_sums_and_means_of_each_tokens_rollout():
    values = torch.tensor([1.0, 2.0, 3.0, 5.0], requires_grad=True)
    assert rollout_sums(values, ROLLOUT).tolist() == [9, 2, 9, 9]
    means = rollout_means(values, ROLLOUT)
    assert means.tolist() == [3, 2, 3, 3]
    (gradient,) = torch.autograd.grad(means[0], values)
    assert gradient.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])


def test_no_tokens():
    none = torch.zeros(0, dtype=torch.long)
    assert rollout_sums(torch.zeros(0), none).shape == (0,)
    weights = Aggregation(over="sequence").token_weights(none)
    assert weights is not None
    assert weights.shape == (0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"over": "tokens"}, "over = 'tokens': must be one of"),
        ({"over": "constant"}, "divisor = None: over = constant needs a number > 0"),
        ({"over": "constant", "divisor": 0.0}, r"divisor = 0\.0"),
        ({"divisor": 8.0}, r"divisor = 8\.0: over = token has no use for it"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Aggregation(**settings)
