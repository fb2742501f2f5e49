import math
from itertools import combinations
from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.rl.advantages import group_advantages


def _rounded(values):
    return [[None if v is None else round(v, 5) for v in group] for group in values]


def test_failed_rollout_takes_no_part():
    # mean .5 and std .5 of the two valid ones; with the failure as a 0 it would be 1.41 and -0.71
    result = group_advantages([[1, 0, None]])
    assert _rounded(result.values) == [[1.0, -1.0, None]]
    assert result.kept == [True]


def test_without_std():
    result = group_advantages([[1, 0, None]], normalize_std=False)
    assert result.values == [[0.5, -0.5, None]]


def test_none_between_rewards_keeps_its_place():
    # Fault 11: the None is excluded, the others are +-.
    result = group_advantages([[1.0, None, 0.0]])
    assert _rounded(result.values) == [[1.0, None, -1.0]]


def test_population_std():
    # mean .5, population variance (.25 * 4) / 4; the sample std would give .866
    result = group_advantages([[1, 1, 0, 0]], eps=0.0)
    assert result.values == [[1.0, 1.0, -1.0, -1.0]]


def test_eps_is_added_to_the_std():
    result = group_advantages([[1, 0]], eps=0.5)
    assert result.values == [[0.5, -0.5]]


def test_leave_one_out():
    # of 1 against the mean of [0, 0.5] = .25, of 0 against .75, of .5 against .5
    result = group_advantages([[1, 0, 0.5]], leave_one_out=True, normalize_std=False)
    assert result.values == [[0.75, -0.75, 0.0]]


def test_without_a_baseline_the_advantage_is_the_reward():
    # REINFORCE: all alike is a signal unless all is 0, and so is a group of one.
    rewards = [[1, 0, None], [1, 1], [0, 0], [0.5], [None]]
    result = group_advantages(rewards, baseline="none", normalize_std=False)
    assert result.values == [[1.0, 0.0, None], [1.0, 1.0], [0.0, 0.0], [0.5], [None]]
    assert result.kept == [True, True, False, True, False]
    assert (result.num_no_variance, result.num_too_small) == (1, 1)


@pytest.mark.parametrize("options", [{}, {"normalize_std": False, "leave_one_out": True}])
def test_options_of_the_baseline_need_it(options):
    with pytest.raises(ValueError, match=r"baseline 'none'.*both must be False"):
        group_advantages([[1, 0]], baseline="none", **options)
    with pytest.raises(ValueError, match="'mean' is neither 'group' nor 'none'"):
        group_advantages([[1, 0]], baseline="mean")


def test_the_rollouts_whose_rewards_differ_most_are_trained():
    # Two of each: the first two of the five failures. The mean is theirs, not 3 / 8.
    rewards = [[0, 1, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1], [1, None, 0]]
    result = group_advantages(rewards, num_trained=4, eps=0.0)
    assert _rounded(result.values) == [
        [-1.0, None, -1.0, None, 1.0, 1.0, None, None],
        [-0.57735, -0.57735, -0.57735, 1.73205],
        [0.0] * 4,
        [1.0, None, -1.0],
    ]
    assert result.kept == [True, True, False, True]
    # A signal that all have is none, however few of them are looked at.
    assert result.num_no_variance == 1


def test_of_graded_rewards_too():
    # 0 and 1 with .1, or with .8? The variance is larger with .1.
    result = group_advantages([[0.5, 1.0, 0.1, 0.8, 0.0]], num_trained=3, normalize_std=False)
    [row] = result.values
    assert [value is None for value in row] == [True, False, False, True, False]
    assert sum(value for value in row if value is not None) == pytest.approx(0.0)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.3, 1.0, None]), max_size=9), st.integers(2, 5))
def test_no_other_choice_has_more_variance(group, num_trained):
    result = group_advantages([group], num_trained=num_trained, normalize_std=False)
    present = [reward for reward in group if reward is not None]
    chosen = [r for r, v in zip(group, result.values[0], strict=True) if v is not None]
    assert result.kept == group_advantages([group]).kept
    if result.kept == [True]:
        best = max(map(pvariance, combinations(present, min(num_trained, len(present)))))
        assert pvariance(chosen) == pytest.approx(best)
    else:
        assert chosen == present


def test_fewer_than_two_are_refused():
    with pytest.raises(ValueError, match="num_trained = 1: must be at least 2"):
        group_advantages([[1, 0]], num_trained=1)


def test_leave_one_out_leaves_failures_out():
    result = group_advantages([[1, None, 0]], leave_one_out=True, normalize_std=False)
    assert result.values == [[1.0, None, -1.0]]


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_group_without_variance_is_dropped(reward, group):
    # Faults 11 and 18: a group of one has advantage 0, not its raw reward and not NaN.
    result = group_advantages([[reward] * group])
    assert result.values == [[0.0] * group]
    assert result.kept == [False]
    assert (result.num_too_small, result.num_no_variance) == ((1, 0) if group == 1 else (0, 1))


def test_rounding_is_no_variance():
    result = group_advantages([[0.1 + 0.2, 0.3]], eps=0.0)
    assert result.kept == [False]
    assert result.values == [[0.0, 0.0]]


def test_one_valid_rollout_among_failures():
    result = group_advantages([[None, 1.0, None], [None, None], []])
    assert result.values == [[None, 0.0, None], [None, None], []]
    assert result.kept == [False, False, False]
    assert (result.num_too_small, result.num_no_variance) == (3, 0)


def test_shaping_makes_no_signal_in_a_failed_group():
    # Fault 12: all failed, but rollouts differ in length.
    result = group_advantages([[0, 0, 0]], shaping=[[-0.01, -0.02, -0.03]])
    assert result.values == [[0.0, 0.0, 0.0]]
    assert result.kept == [False]
    assert result.num_no_variance == 1


def test_shaping_counts_in_a_kept_group():
    result = group_advantages([[1, 0, None]], shaping=[[-0.5, 0, -9]], normalize_std=False)
    assert result.values == [[0.25, -0.25, None]]


def test_shaping_that_cancels_the_rewards():
    result = group_advantages([[1, 0]], shaping=[[0, 1]], eps=0.0)
    assert result.values == [[0.0, 0.0]]
    assert result.kept == [True]


def test_partial_credit_is_a_signal():
    # Fault 12: the official reward is 0 for all three.
    result = group_advantages([[0.2, 0.5, 0.0]])
    assert result.kept == [True]
    std = math.sqrt(((0.2 - 0.7 / 3) ** 2 + (0.5 - 0.7 / 3) ** 2 + (0.7 / 3) ** 2) / 3)
    expected = [(r - 0.7 / 3) / (std + 1e-6) for r in (0.2, 0.5, 0.0)]
    assert result.values[0] == pytest.approx(expected, abs=1e-12)


def test_baseline_is_over_rollouts_not_turns():
    # Fault 13: A has three turns and reward 1, B one turn and reward 0. Baseline .5, not .75.
    result = group_advantages([[1, 0]], normalize_std=False)
    assert result.values == [[0.5, -0.5]]


def test_groups_do_not_mix():
    both = group_advantages([[1, 0], [0.2, 0.5, None, 0.0]])
    assert both.values[0] == group_advantages([[1, 0]]).values[0]
    assert both.values[1] == group_advantages([[0.2, 0.5, None, 0.0]]).values[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_reward_must_be_finite(bad):
    with pytest.raises(ValueError, match=r"rewards\[1\]\[0\]"):
        group_advantages([[1, 0], [bad, 0]])


def test_settings_are_checked():
    with pytest.raises(ValueError, match="eps"):
        group_advantages([[1, 0]], eps=-1.0)
    with pytest.raises(ValueError, match="shaping"):
        group_advantages([[1, 0]], shaping=[[0.0]])
