"""Metrics of a step's rollouts."""

import dataclasses

import pytest

from components.rollout.stats import rollout_metrics, sampled_tokens, staleness_metrics
from components.rollout.types import Ledger, Rollout, RolloutSpec


def rollout(
    status="completed", reward=1.0, *, group=0, task_id="1", length=10, domain="mock", **stats
):
    ledger = Ledger()
    ledger.append_rendered(range(length), [1] * length)
    breakdown = stats.pop("breakdown", {"official": float(reward == 1.0), "strict": 0.0})
    return Rollout(
        spec=RolloutSpec(
            rollout_id=f"train/1/{group}",
            task_id=task_id,
            domain=domain,
            group=group,
            member=0,
            seed=0,
            env_seed=0,
        ),
        tokens=ledger.freeze(),
        status=status,
        reward=None if status.startswith("error_") else reward,
        reward_breakdown={} if status.startswith("error_") else breakdown,
        stats={
            "turns": 4, "tool_calls": 2, "tool_errors": 0, "parse_errors": 0, "sampled_tokens": 8,
            **stats,
        },
    )  # fmt: skip


ROLLOUTS = [
    rollout(reward=1.0, turns=2, tool_calls=1, sampled_tokens=5, length=10),
    rollout("truncated_tokens", 0.0, turns=6, tool_calls=5, tool_errors=3, length=40),
    rollout("truncated_max_steps", 0.5, turns=8, tool_calls=0, parse_errors=4, length=10),
    rollout("error_user", turns=100, tool_calls=100, tool_errors=100, length=1000),
]


def test_means_are_over_the_valid_rollouts():
    assert rollout_metrics(ROLLOUTS) == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/max": 1.0,
            "reward/official_mean": 1 / 3,
            "reward/strict_mean": 0.0,
            "rollout/error_frac": 0.25,
            "rollout/truncated_frac": 2 / 3,
            "rollout/truncated_tokens_frac": 1 / 3,
            "rollout/turns": 16 / 3,
            "rollout/tool_calls": 2.0,
            "rollout/tokens": 20.0,
            "rollout/sampled_tokens": 7.0,
            "tool/error_frac": 3 / 6,  # of the calls
            "tool/parse_error_frac": 4 / 16,  # of the turns
        }
    )


def test_all_failed_leaves_the_failures_alone():
    assert rollout_metrics([rollout("error_infra"), rollout("error_deadline")]) == {
        "rollout/error_frac": 1.0
    }


def test_a_component_that_some_tasks_lack_counts_as_zero_there():
    found = rollout_metrics(
        [rollout(breakdown={"official": 1.0, "db": 1.0}), rollout(breakdown={"official": 0.0})]
    )
    assert found["reward/db_mean"] == 0.5
    assert found["reward/official_mean"] == 0.5


def test_without_a_call_nothing_is_divided_by_zero():
    found = rollout_metrics([rollout(tool_calls=0, turns=0)])
    assert found["tool/error_frac"] == found["tool/parse_error_frac"] == 0.0


def test_sampled_tokens_are_summed_over_all_failed_ones_too():
    assert sampled_tokens(ROLLOUTS) == 5 + 8 + 8 + 8
    assert sampled_tokens([]) == 0


def test_several_domains_have_a_mean_each():
    rollouts = [
        rollout(reward=1.0),
        rollout(reward=0.5),
        rollout(reward=0.2, domain="retail"),
        rollout("error_user", domain="retail"),
        rollout("error_infra", domain="airline"),
    ]
    found = {k: v for k, v in rollout_metrics(rollouts).items() if k.startswith("reward/mean")}
    assert found == pytest.approx(
        {"reward/mean": 1.7 / 3, "reward/mean_mock": 0.75, "reward/mean_retail": 0.2}
    )


def test_staleness_is_of_sampled_tokens_alone():
    """Two tokens of version 3 and one of version 5, trained by version 5: (2 + 2 + 0) / 3."""
    ledger = Ledger()
    ledger.append_rendered([1, 2], [1, 1])
    ledger.append_sampled([3, 4], [-1.0, -1.0], policy_version=3)
    ledger.append_rendered([5], [2])
    ledger.append_sampled([6], [-1.0], policy_version=5)
    one = dataclasses.replace(rollout(), tokens=ledger.freeze())
    found = staleness_metrics([one, rollout()], version=5)
    assert found == {"rollout/staleness_mean": pytest.approx(4 / 3)}
    assert staleness_metrics([rollout()], version=5) == {}
