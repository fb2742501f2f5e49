"""From rollouts to trained items."""

import pytest

from components.rl.groups import by_group, trained_items
from components.rollout.types import Ledger, Rollout, RolloutSpec


def rollout(group, member, reward, status="completed"):
    ledger = Ledger()
    ledger.append_rendered([1, 2], [1, 2])
    ledger.append_sampled([3], [-0.5], policy_version=0)
    spec = RolloutSpec(
        rollout_id=f"{group}/{member}",
        task_id=str(group),
        domain="d",
        group=group,
        member=member,
        seed=0,
        env_seed=0,
    )
    return Rollout(spec=spec, tokens=ledger.freeze(), status=status, reward=reward)


def test_groups_keep_their_order_even_when_rollouts_are_interleaved():
    rollouts = [rollout(1, 0, 0.0), rollout(0, 0, 1.0), rollout(1, 1, 1.0)]
    assert [[r.spec.rollout_id for r in g] for g in by_group(rollouts)] == [["1/0", "1/1"], ["0/0"]]


def test_a_failed_rollout_leaves_its_group_and_the_others_are_trained():
    # rewards [1, 0, failed] -> [+1, -1, -] with std
    rollouts = [rollout(0, 0, 1.0), rollout(0, 1, 0.0), rollout(0, 2, None, "error_infra")]
    items, advantages = trained_items(rollouts, normalize_std=True, eps=0.0)
    assert [(i.key, i.advantage) for i in items] == [("0/0", 1.0), ("0/1", -1.0)]
    assert advantages.kept == [True]


def test_groups_without_variance_are_dropped_and_counted():
    rollouts = [rollout(0, 0, 1.0), rollout(0, 1, 1.0), rollout(1, 0, 0.0), rollout(1, 1, 0.5)]
    items, advantages = trained_items(rollouts, normalize_std=False, eps=0.0)
    assert [(i.key, i.advantage) for i in items] == [("1/0", -0.25), ("1/1", 0.25)]
    assert advantages.num_no_variance == 1


def test_leave_one_out_by_hand():
    # the others' means: .25, .5, .75
    rewards = [1.0, 0.5, 0.0]
    rollouts = [rollout(0, member, reward) for member, reward in enumerate(rewards)]
    items, _ = trained_items(rollouts, normalize_std=False, leave_one_out=True, eps=0.0)
    assert [i.advantage for i in items] == [0.75, 0.0, -0.75]


def test_overlong_rollouts_are_masked_but_stay_in_the_statistics():
    # rewards [1, 0, 0 (cut)]: mean 1/3 with the cut one, 1/2 without
    rollouts = [
        rollout(0, 0, 1.0),
        rollout(0, 1, 0.0),
        rollout(0, 2, 0.0, "truncated_tokens"),
    ]
    for mask, expected in ((False, ["0/0", "0/1", "0/2"]), (True, ["0/0", "0/1"])):
        items, advantages = trained_items(
            rollouts, normalize_std=False, eps=0.0, mask_overlong=mask
        )
        assert [i.key for i in items] == expected
        assert [i.advantage for i in items][:2] == pytest.approx([2 / 3, -1 / 3])
        assert advantages.values[0] == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("status", ["truncated_max_steps", "truncated_errors", "truncated_refused"])
def test_other_ends_are_not_overlong(status):
    rollouts = [rollout(0, 0, 1.0), rollout(0, 1, 0.0, status)]
    items, _ = trained_items(rollouts, normalize_std=False, eps=0.0, mask_overlong=True)
    assert len(items) == 2


def test_a_signal_of_a_cut_rollout_alone_is_a_signal():
    """The group is kept by its rewards; what is trained of it are the others."""
    rollouts = [rollout(0, 0, 1.0), rollout(0, 1, 0.0, "truncated_tokens")]
    items, advantages = trained_items(rollouts, normalize_std=True, eps=0.0, mask_overlong=True)
    assert advantages.kept == [True]
    assert [(i.key, i.advantage) for i in items] == [("0/0", 1.0)]
