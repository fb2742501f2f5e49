"""From rollouts to trained items."""

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
