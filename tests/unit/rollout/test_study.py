"""The statistics of a study, by hand."""

import itertools
import random
from statistics import fmean, pstdev

import pytest

from components.rollout.intervals import bootstrap, crossed_bootstrap
from components.rollout.study import paired, pick_warm_start, summary
from components.safety.report import wilson

# ---------------------------------------------------------------- the interval


def test_equal_values_have_no_spread():
    assert crossed_bootstrap([[0.25] * 4] * 3) == (0.25, 0.25)


def test_one_seed_is_the_bootstrap_over_tasks():
    values = [0.0, 0.5, 1.0, 0.25, 0.75]
    assert crossed_bootstrap([values]) == bootstrap(values)


def test_the_interval_covers_what_enumeration_gives():
    """All 27 * 27 resamples of 3 seeds and 3 tasks, each as likely as any other."""
    values = [[0.0, 0.1, 0.9], [0.2, 0.4, 0.6], [0.5, 0.8, 1.0]]
    means = sorted(
        fmean(values[s][t] for s in seeds for t in tasks)
        for seeds in itertools.product(range(3), repeat=3)
        for tasks in itertools.product(range(3), repeat=3)
    )
    number = len(means)
    low, high = crossed_bootstrap(values)
    assert means[int(0.02 * number)] <= low <= means[int(0.03 * number)]
    assert means[int(0.97 * number) - 1] <= high <= means[int(0.98 * number) - 1]


def test_neither_seeds_nor_tasks_count_as_independent():
    """Values a_s + b_t: the variance of the mean is var(a) / S + var(b) / T, to within Monte Carlo.

    As 20 * 30 independent values it would be less than a tenth of that.
    """
    rng = random.Random(5)
    of_seed, of_task = ([rng.gauss(0, 1) for _ in range(n)] for n in (20, 30))
    values = [[a + b for b in of_task] for a in of_seed]
    expected = (pstdev(of_seed) ** 2 / 20 + pstdev(of_task) ** 2 / 30) ** 0.5
    low, high = crossed_bootstrap(values)
    assert (high - low) / (2 * 1.96) == pytest.approx(expected, rel=0.08)


# ---------------------------------------------------------------- paired differences

BEFORE = {0: {"x": 0.0, "y": 0.5}, 1: {"x": 0.25, "y": 0.25}, 2: {"x": 1.0, "y": 1.0}}
AFTER = {1: {"y": 0.75, "x": 0.25}, 0: {"x": 1.0, "y": 0.5}}


def test_differences_are_paired_by_seed_and_task():
    found = paired(BEFORE, AFTER)
    # Seed 2 has no counterpart: before (0 + .5 + .25 + .25) / 4, after (1 + .5 + .25 + .75) / 4.
    assert found["seeds"] == [0, 1]
    assert found["reward_before"] == 0.25
    assert found["reward_after"] == 0.625
    assert found["delta"] == 0.375
    assert found["by_seed"] == {"0": 0.5, "1": 0.25}
    # Rows [1, 0] and [0, .5]: the extremes are one seed twice with one task twice. Two tasks: the
    # lower end is that of difference_interval, 0.375 less sqrt((0.375 - L)^2 + 0.6576^2).
    loss = 1.96**2 / (2 + 1.96**2)
    gain = 0.375 - wilson(0.75, 2)[0]
    assert found["ci_low"] == pytest.approx(0.375 - (gain**2 + loss**2) ** 0.5)
    assert found["ci_high"] == 1.0


def test_arms_that_never_differ_are_not_known_to_be_equal():
    same = {seed: {str(task): 0.5 for task in range(32)} for seed in range(3)}
    found = paired(same, same)
    assert found["delta"] == 0.0
    reach = pytest.approx(1.96**2 / (32 + 1.96**2))  # tasks count, not seeds
    assert (-found["ci_low"], found["ci_high"]) == (reach, reach)


def test_what_cannot_be_paired_is_refused():
    with pytest.raises(ValueError, match=r"no seed in common: \[0, 1, 2\] and \[3\]"):
        paired(BEFORE, {3: {"x": 0.0, "y": 0.0}})
    with pytest.raises(ValueError, match="seed 1: evaluated on other tasks"):
        paired(BEFORE, {0: AFTER[0], 1: {"x": 0.0, "z": 0.0}})


def result(arm, seed, x, y, same="one"):
    return {
        "arm": arm,
        "seed": seed,
        "same": same,
        "evals": {"held_out": {"tasks": {"x": x, "y": y}}},
    }


RESULTS = [
    result("before", 0, [0, 0], [0, 1]),
    result("before", 1, [0, 0], [0, 1]),
    result("grpo", 0, [1, 1], [0, 1]),
    result("sft", 0, [0, 1], [0, 1]),
    result("grpo", 1, [1, 1], [1, 1]),
]


def test_summary_compares_over_common_seeds():
    found = summary(RESULTS, arms=["grpo", "sft", "reinforce"])["held_out"]
    assert found["change"].keys() == {"grpo", "sft"}
    assert found["change"]["grpo"]["seeds"] == [0, 1]
    assert found["change"]["grpo"]["delta"] == pytest.approx(0.875 - 0.25)
    assert found["comparison"].keys() == {"grpo-sft"}
    against = found["comparison"]["grpo-sft"]
    assert against["seeds"] == [0]
    assert (against["reward_before"], against["reward_after"]) == (0.5, 0.75)
    assert against["delta"] == 0.25


def test_results_of_two_studies_are_refused():
    with pytest.raises(ValueError, match="sft_1 has two, before_0 has one: not of one study"):
        summary([*RESULTS, result("sft", 1, [0], [0], same="two")], arms=["grpo", "sft"])


# ---------------------------------------------------------------- the warm start


def test_the_first_checkpoint_in_the_range_is_picked():
    assert pick_warm_start([], low=0.3, high=0.6) is None
    assert pick_warm_start([(2, 0.0), (4, 0.29)], low=0.3, high=0.6) is None
    assert pick_warm_start([(2, 0.0), (4, 0.3)], low=0.3, high=0.6) == 4
    # A later one in the range, or even a fall below it, changes nothing.
    assert pick_warm_start([(2, 0.6), (4, 0.4), (6, 0.2)], low=0.3, high=0.6) == 2


def test_a_leap_over_the_range_is_refused():
    with pytest.raises(ValueError, match=r"step 2: 0\.100, step 4: 0\.610; save them more often"):
        pick_warm_start([(2, 0.1), (4, 0.61)], low=0.3, high=0.6)
