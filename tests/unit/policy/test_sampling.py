from __future__ import annotations

import math

import pytest
import torch

from components.policy.sampling import sample, truncate, uniforms


def test_oracle_value():
    """logits [2, 0] at temperature 0.5: ln(1 / (1 + e^-4))."""
    tokens, logprobs = sample(torch.tensor([[2.0, 0.0]]), temperatures=[0.5], draws=[0.3])
    assert tokens == [0]
    assert logprobs[0] == pytest.approx(-math.log1p(math.exp(-4.0)), abs=1e-6)


@pytest.mark.parametrize("size", [5, 256, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_drawn_distribution_is_the_reported_one(size, temperature):
    """A grid of draws inverts the cumulative distribution: shares differ by at most a grid step."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(size)
    grid = 20_000
    draws = ((torch.arange(grid, dtype=torch.float64) + 0.5) / grid).tolist()
    tokens, logprobs = [], []
    for start in range(0, grid, 2000):
        chunk = draws[start : start + 2000]
        t, p = sample(
            logits.expand(len(chunk), -1), temperatures=[temperature] * len(chunk), draws=chunk
        )
        tokens += t
        logprobs += p
    expected = torch.softmax(logits.double() / temperature, -1)
    shares = torch.bincount(torch.tensor(tokens), minlength=size).double() / grid
    assert (shares - expected).abs().max() < 1.5 / grid
    assert torch.tensor(logprobs).exp().double().sub(expected[tokens]).abs().max() < 1e-6


def test_uniform_draws_depend_on_the_seed_alone():
    assert uniforms(5, 40)[:7] == uniforms(5, 7)
    assert uniforms(5, 7) != uniforms(6, 7)
    numbers = torch.tensor(uniforms(0, 20_000), dtype=torch.float64)
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=5 / math.sqrt(12 * 20_000))


@pytest.mark.parametrize("size", [3, 256, 300, 512])
@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(size, draw):
    for only in (0, size // 2, size - 1):
        logits = torch.full((1, size), -1e4)
        logits[0, only] = 3.0
        assert sample(logits, temperatures=[1.0], draws=[draw]) == ([only], [0.0])


def test_rows_have_their_own_temperature_and_greedy_reports_temperature_1():
    logits = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    tokens, logprobs = sample(logits, temperatures=[0.0, 2.0], draws=[0.99, 0.99])
    assert tokens == [1, 2]  # the lowest among equals; the top of the distribution
    assert logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[1]))
    assert logprobs[1] == pytest.approx(float((logits[1] / 2).log_softmax(-1)[2]))
    assert all(p <= 0.0 for p in logprobs)


def test_the_whole_distribution_is_sampled():
    """Fault 16: p = .5 .3 .2 is not cut (with top_p .75 the first would have .625 and the third
    none), so the log-probability is that of the trainer's softmax."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, 3)
    tokens, logprobs = sample(logits, temperatures=[1.0] * 3, draws=[0.1, 0.6, 0.9])
    assert tokens == [0, 1, 2]
    assert logprobs == pytest.approx([math.log(0.5), math.log(0.3), math.log(0.2)])
    assert logprobs[0] != pytest.approx(math.log(0.625))


@pytest.mark.parametrize(
    ("top_p", "top_k", "expected"),
    [
        (0.75, None, [0.625, 0.375, 0.0]),  # .5 is too little, .5 + .3 is enough
        (0.49, None, [1.0, 0.0, 0.0]),
        (0.79, None, [0.625, 0.375, 0.0]),
        (0.81, None, [0.5, 0.3, 0.2]),
        (1e-9, None, [1.0, 0.0, 0.0]),  # never nothing
        (1.0, 2, [0.625, 0.375, 0.0]),
        (1.0, 9, [0.5, 0.3, 0.2]),
        (0.6, 2, [1.0, 0.0, 0.0]),  # .625 of what top_k leaves
    ],
)
def test_what_top_p_and_top_k_leave_is_renormalised(top_p, top_k, expected):
    order = [1, 2, 0]  # the probabilities are not sorted by id
    logits = torch.tensor([0.5, 0.3, 0.2]).log()[order][None]
    expected = [expected[i] for i in order]
    draws = [(i + 0.5) / 1000 for i in range(1000)]
    tokens, logprobs = sample(
        logits.expand(1000, 3),
        temperatures=[1.0] * 1000,
        draws=draws,
        top_p=top_p,
        top_k=top_k,
    )
    for token, p in enumerate(expected):
        assert tokens.count(token) == pytest.approx(1000 * p, abs=1)
    for token, logprob in zip(tokens, logprobs, strict=True):
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-6)


def test_top_k_of_equal_tokens_takes_the_lowest_ids_and_temperature_comes_first():
    equal = torch.zeros(1, 300)
    assert truncate(equal, top_p=1.0, top_k=2)[0].isfinite().nonzero().flatten().tolist() == [0, 1]
    # at temperature 2 the probabilities of 0, ln 4 are 1/3 and 2/3, at 1 they are 1/5 and 4/5
    logits = torch.tensor([[0.0, math.log(4.0)]]).expand(2, 2)
    _, [cold, hot] = sample(logits, temperatures=[1.0, 2.0], draws=[0.99] * 2, top_p=0.7)
    assert cold == pytest.approx(0.0)
    assert hot == pytest.approx(math.log(2 / 3))
