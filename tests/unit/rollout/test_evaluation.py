"""What an evaluation reports."""

import dataclasses
import itertools
import random
from math import hypot

import pytest

from components.envs.baselines import baseline
from components.rollout.eval_table import print_evaluation, task_rows
from components.rollout.evaluation import (
    by_task,
    evaluation_line,
    evaluation_metrics,
    evaluation_summary,
    official_reward,
    pass_at_k,
    pass_hat_k,
)
from components.rollout.intervals import bootstrap, difference_interval, interval, sign_flip_test
from components.safety.report import wilson
from tests.unit.rollout.test_stats import rollout


@pytest.mark.parametrize("num_trials", [1, 2, 4, 5])
def test_pass_hat_k_is_the_share_of_subsets_that_all_succeed(num_trials):
    for correct in range(num_trials + 1):
        outcomes = [True] * correct + [False] * (num_trials - correct)
        for k in range(1, num_trials + 1):
            subsets = list(itertools.combinations(outcomes, k))
            expected = sum(map(all, subsets)) / len(subsets)
            assert pass_hat_k(num_trials, correct, k) == pytest.approx(expected)
    assert pass_hat_k(4, 3, 2) == 0.5  # the paper's estimator, by hand


@pytest.mark.parametrize("num_trials", [1, 2, 4, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(num_trials):
    for correct in range(num_trials + 1):
        outcomes = [True] * correct + [False] * (num_trials - correct)
        for k in range(1, num_trials + 1):
            subsets = list(itertools.combinations(outcomes, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(num_trials, correct, k) == pytest.approx(expected)
    assert pass_at_k(4, 1, 2) == 0.5


def test_every_k_is_there_and_the_two_kinds_are_apart():
    rollouts = [*task("create_task_1", 1.0, 0.0, 0.0), *task("update_task_1", 1.0, 1.0, 0.5)]
    found = evaluation_metrics(rollouts, num_trials=3)
    for k in (1, 2, 3):  # 1 and 2 successes of 3
        assert found[f"eval/pass^{k}"] == pytest.approx(
            (pass_hat_k(3, 1, k) + pass_hat_k(3, 2, k)) / 2
        )
    assert found["eval/pass@2"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["eval/pass@3"] == 1.0
    assert found["eval/pass^3"] == 0.0
    assert found["eval/mean@3"] == found["eval/official_mean"] == pytest.approx(3.5 / 6)
    assert "eval/pass@1" not in found  # it is pass^1


def test_intervals_of_a_summary():
    wins = [*task("create_task_1", 1.0), *task("update_task_1", 0.0), *task("a", 0.0)]
    found = evaluation_summary(wins, num_trials=1, of_seeds={"7": wins})
    assert found["intervals"]["eval/pass^1"] == list(wilson(1, 3))
    assert found["seeds"] == {"7": {"official_mean": pytest.approx(1 / 3), "strict_mean": 0.5}}
    assert found["seed_std"] is None
    other = [*task("create_task_1", 1.0), *task("update_task_1", 1.0), *task("a", None)]
    both = [*wins, *other]
    found = evaluation_summary(both, num_trials=2, of_seeds={"7": wins, "8": other})
    assert found["seed_std"] == pytest.approx((1 / 3) / 2**0.5)  # of 1/3 and 2/3, by hand
    boot, score = bootstrap([1.0, 0.5, 0.0]), wilson(1.5, 3)
    assert found["intervals"]["eval/pass^1"] == [min(boot[0], score[0]), max(boot[1], score[1])]
    assert found["intervals"]["eval/pass^2"] == list(wilson(1, 3))


def test_an_interval_has_width_where_everything_failed():
    assert interval([0.0] * 20) == wilson(0, 20)
    assert interval([0.0] * 20)[1] == pytest.approx(0.161, abs=1e-3)  # z^2 / (n + z^2)
    assert interval([0.5]) == (0.0, 1.0)
    low, high = interval([i / 200 for i in range(201)])  # the normal approximation is close
    error = (sum((i / 200 - 0.5) ** 2 for i in range(201)) / 201 / 201) ** 0.5
    assert (low, high) == pytest.approx((0.5 - 1.96 * error, 0.5 + 1.96 * error), abs=0.005)


@pytest.mark.parametrize("number", [8, 32, 115])
def test_an_interval_does_not_shrink_because_a_task_was_half_solved(number):
    """From no success to one task at a quarter: the bootstrap alone gives [0, 0.023] of 32."""
    nothing = interval([0.0] * number)
    for solved in range(1, 5):
        low, high = interval([0.25] * solved + [0.0] * (number - solved))
        assert high >= nothing[1] - 1e-12
        assert low <= 0.25 * solved / number <= high
        # and of failures among successes, the same from the other side
        mirrored = interval([0.75] * solved + [1.0] * (number - solved))
        assert mirrored == pytest.approx((1 - high, 1 - low), abs=0.01)
    several = [0.25] * 5 + [0.0] * (number - 5)
    assert number < 10 or interval(several) == bootstrap(several)


def test_an_interval_with_one_task_off_by_hand():
    """Wilson's of 0.25 in 32: centre (p + 1.9208 / 32) / 1.12005, margin as he has it."""
    centre = (0.25 / 32 + 1.9208 / 32) / (1 + 3.8416 / 32)
    margin = 1.96 * (0.25 / 32 * (1 - 0.25 / 32) / 32 + 3.8416 / (4 * 32**2)) ** 0.5 / 1.12005
    low, high = interval([0.25] + [0.0] * 31)
    assert low == 0.0  # the bootstrap's
    assert high == pytest.approx(centre + margin, abs=1e-6)


def test_intervals_cover_where_few_tasks_are_ever_solved():
    """Tasks at 0.25 with probability 0.08, else 0: the mean is 0.02, in 95 % of the intervals."""
    draws, covered, alone = random.Random(3), 0, 0
    for _ in range(100):
        values = [0.25 * (draws.random() < 0.08) for _ in range(24)]
        low, high = interval(values)
        covered += low <= 0.02 <= high
        low, high = bootstrap(values)
        alone += low <= 0.02 <= high
    assert covered >= 95
    assert alone <= 90  # 0.92^24 = 13.5 % have no success at all, and no width


def test_no_task_that_differs_is_not_certainty():
    """z^2 / (n + z^2) on either side; a task that differs by 1 is within it, then 5 stand alone."""
    for number in (8, 32):
        reach = 3.8416 / (number + 3.8416)
        assert difference_interval([[0.0] * number]) == pytest.approx((-reach, reach))
        low, high = difference_interval([[1.0] + [0.0] * (number - 1)] * 3)
        assert low < 0 < 1 / number < reach < high
        assert difference_interval([[-1.0] + [0.0] * (number - 1)]) == pytest.approx((-high, -low))
    several = [[1.0] * 3 + [-1.0] * 2 + [0.0] * 27]
    assert difference_interval(several) == bootstrap(several[0])
    low, high = difference_interval([[1.0] * 20])  # every task from 0 to 1
    assert (low, high) == (pytest.approx(1 - hypot(1 - wilson(20, 20)[0], wilson(0, 20)[1])), 1.0)


def test_the_sign_flip_test_by_hand():
    assert sign_flip_test([1.0] * 5) == 2 / 32
    assert sign_flip_test([1.0] * 5 + [0.0] * 30) == 2 / 32  # ties say nothing
    assert sign_flip_test([0.5, -0.5]) == 1.0
    assert sign_flip_test([]) == sign_flip_test([0.0]) == 1.0
    # Of 2^3 sums of +-1 +-2 +-4 those with |sum| >= 5: +-(1 + 4 + 2), +-(4 + 2 - 1).
    assert sign_flip_test([-1.0, 2.0, 4.0]) == 4 / 8


def test_the_sign_flip_test_of_many_tasks_is_near_the_normal_one():
    from math import erfc

    differences = [1.0] * 30 + [-1.0] * 15
    z = (15 - 1) / 45**0.5  # continuity: sums go in steps of 2
    found = sign_flip_test(differences)
    assert found == pytest.approx(erfc(z / 2**0.5), abs=0.01)
    assert sign_flip_test(differences) == found  # seeded
    assert 0 < sign_flip_test([1.0] * 60) < 1e-4


@pytest.mark.parametrize("k", [0, -1, 5])
def test_pass_hat_k_needs_enough_trials(k):
    with pytest.raises(ValueError, match=f"k = {k}: must be in 1 to num_trials = 4"):
        pass_hat_k(4, 2, k)


@pytest.mark.parametrize("correct", [-1, 8])
def test_more_successes_than_trials_are_refused(correct):
    message = f"num_correct = {correct}: must be in 0 to num_trials = 4"
    with pytest.raises(ValueError, match=message):
        pass_hat_k(4, correct, 2)


def task(task_id, *rewards, domain="mock"):
    found = [
        rollout("error_infra", task_id=task_id)
        if reward is None
        else rollout(reward=reward, task_id=task_id, breakdown={"official": reward, "strict": 0.5})
        for reward in rewards
    ]
    return [
        dataclasses.replace(one, spec=dataclasses.replace(one.spec, domain=domain)) for one in found
    ]


def test_tasks_of_two_domains_with_one_id_are_two_tasks(capsys):
    """Retail and airline both have a "0". Pooled, 4 + 4 solved trials would be 8 of 4."""
    solved = [*task("0", 1, 1, 1, 1, domain="retail"), *task("0", 1, 1, 1, 1, domain="airline")]
    found = evaluation_metrics(solved, num_trials=4)
    assert {k: v for k, v in found.items() if "pass" in k} == {
        **{f"eval/pass^{k}": 1.0 for k in (1, 2, 3, 4)},
        **{f"eval/pass@{k}": 1.0 for k in (2, 3, 4)},
    }
    mixed = [*task("0", 1, 1, domain="retail"), *task("0", 0, 1, domain="airline")]
    found = evaluation_metrics(mixed, num_trials=2)
    assert (found["eval/pass^2"], found["eval/pass@2"]) == (0.5, 1.0)
    of_both = [baseline(domain, "0", "transfer").breakdown for domain in ("retail", "airline")]
    assert found["eval/transfer_mean"] == sum(parts["official"] for parts in of_both) / 2
    rows = task_rows(mixed)
    assert [(row["domain"], row["task_id"], row["official"]) for row in rows] == [
        ("retail", "0", [1.0, 1.0]),
        ("airline", "0", [0.0, 1.0]),
    ]
    print_evaluation(rows, {})
    out = capsys.readouterr().out
    assert "retail/0" in out
    assert "airline/0" in out


def test_failures_stay_in_the_denominator():
    rollouts = [
        *task("create_task_1", 1.0, 1.0),
        *task("create_task_1_nl_eval", 1.0, 0.0),
        *task("impossible_task_1", None, 1.0),
    ]
    assert evaluation_metrics(rollouts, num_trials=2) == pytest.approx(
        {
            "eval/official_mean": 4 / 6,
            "eval/strict_mean": 5 * 0.5 / 6,
            "eval/pass^1": (1 + 0.5 + 0.5) / 3,
            "eval/pass^2": 1 / 3,
            "eval/mean@2": 4 / 6,
            "eval/pass@2": 1.0,
            "eval/error_frac": 1 / 6,
            "eval/turns": 4.0,
            "eval/tool_calls": 2.0,
            # the benchmark gives an agent that does nothing the second task
            "eval/do_nothing_mean": 1 / 3,
            "eval/do_nothing_strict_mean": 1 / 3,
            # and one that transfers at once the impossible one too
            "eval/transfer_mean": 2 / 3,
            "eval/transfer_strict_mean": 2 / 3,
        }
    )


def test_agents_that_do_not_try_are_of_the_benchmark():
    other = dataclasses.replace(rollout().spec, domain="sum")
    found = evaluation_metrics([dataclasses.replace(rollout(), spec=other)], num_trials=1)
    assert not [name for name in found if "do_nothing" in name or "transfer" in name]
    (row,) = task_rows([dataclasses.replace(rollout(), spec=other)])
    assert row["do_nothing"] is row["transfer_strict"] is None


def test_a_table_has_a_line_per_task(capsys):
    rows = task_rows([*task("create_task_1", 1.0, 0.0), *task("impossible_task_1", None, 0.0)])
    assert [row["transfer"] for row in rows] == [0.0, 1.0]
    assert rows[1]["status"] == ["error_infra", "completed"]
    print_evaluation([*rows, {**rows[0], "task_id": "[a]b|c[PERSONA:Hard]"}], {"eval/turns": 4.0})
    out = capsys.readouterr().out
    assert "[a]b|c[PERSONA:Hard]" in out  # brackets are no markup
    (line,) = (line for line in out.splitlines() if line.startswith("impossible_task_1"))
    assert line.replace("│", " ").split()[1:5] == ["0.00", "0.25", "0.00", "1.00"]
    assert line.rstrip().endswith("error_infra 1, completed 1")
    assert "eval/turns                   4.000" in out


def test_one_trial_has_pass_1_alone():
    rollouts = [*task("create_task_1", 1.0), *task("update_task_1", 0.0)]
    found = evaluation_metrics(rollouts, num_trials=1)
    assert [name for name in found if "pass" in name] == ["eval/pass^1"]
    assert found["eval/pass^1"] == found["eval/official_mean"] == 0.5


def test_part_of_a_reward_is_no_pass():
    found = evaluation_metrics(task("create_task_1", 0.9), num_trials=1)
    assert found["eval/official_mean"] == 0.9
    assert found["eval/pass^1"] == 0.0


def test_tasks_keep_their_order_and_their_trials():
    rollouts = [*task("b", 1.0), *task("a", 0.0), *task("b", 0.5)]
    found = by_task(rollouts)
    assert list(found) == [("mock", "b"), ("mock", "a")]
    assert [official_reward(r) for r in found["mock", "b"]] == [1.0, 0.5]
    assert official_reward(rollout("error_deadline")) == 0.0


def test_the_console_line():
    metrics = {"eval/official_mean": 0.25, "eval/pass^1": 0.5}
    assert evaluation_line(4, 10, metrics) == "eval   4/10  official_mean 0.250  pass^1 0.500"
