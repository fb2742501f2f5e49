"""Dynamic sampling: groups without a signal are played anew with other tasks, up to a limit."""

from __future__ import annotations

import json
from itertools import chain, islice
from types import SimpleNamespace

import pytest
import torch

from components.data.dataset import task_loader
from components.envs.base import Task
from components.rl.groups import trained_items
from components.rollout.specs import group_specs
from components.rollout.types import Ledger, Rollout
from components.training.parallelize import World
from components.training.refill import play_groups

ALONE = World.alone()
GROUP = 2


def rollouts_of(tasks, first_group, rewards, world=ALONE) -> list[Rollout]:
    """Two rollouts of each task of this rank with the rewards that the task's id has."""
    specs = group_specs(
        [(t.domain, t.id) for t in tasks],
        group_size=GROUP,
        seed=0,
        phase="train/1",
        first_group=first_group,
    )
    found = []
    for spec in specs:
        if spec.group % world.size != world.rank:
            continue
        ledger = Ledger()
        ledger.append_rendered([1, 2], [1, 2])
        ledger.append_sampled([3], [-0.5], policy_version=0)
        reward = rewards[int(spec.task_id)][spec.member]
        found.append(Rollout(spec=spec, tokens=ledger.freeze(), status="completed", reward=reward))
    return found


def dataset(num: int = 40):
    tasks = [Task(id=str(i), domain="d", split="train") for i in range(num)]
    data = SimpleNamespace(tasks=tasks)

    class Tasks(torch.utils.data.Dataset):
        def __len__(self):
            return len(data.tasks)

        def __getitem__(self, index):
            return data.tasks[index]

    return Tasks()


def play_all(rewards, *, num_groups, max_refills, order=None):
    """Tasks in the order 0, 1, 2...; what was drawn, the rollouts, the metrics."""
    tasks = iter([Task(id=str(i), domain="d", split="train") for i in range(len(rewards))])
    draws = []

    def draw(num):
        draws.append(num)
        return list(islice(tasks, num))

    found, metrics = play_groups(
        draw,
        lambda chosen, first: rollouts_of(chosen, first, rewards),
        num_groups=num_groups,
        max_refills=max_refills,
        world=ALONE,
    )
    return draws, found, metrics


GOOD, FLAT = (1.0, 0.0), (1.0, 1.0)


def test_nothing_is_drawn_where_all_groups_have_a_signal():
    draws, found, metrics = play_all([GOOD] * 4, num_groups=3, max_refills=5)
    assert draws == [3]
    assert len(found) == 6
    assert metrics == {"group/refilled": 0.0}


def test_as_many_are_drawn_as_are_missing():
    # 3 groups, 2 without a signal; of the 2 in their place 1; of the 1 in its place none
    rewards = [FLAT, GOOD, FLAT, GOOD, FLAT, GOOD, GOOD]
    draws, found, metrics = play_all(rewards, num_groups=3, max_refills=5)
    assert draws == [3, 2, 1]
    assert metrics == {"group/refilled": 3.0}
    assert len(found) == 2 * 6
    items, advantages = trained_items(found, normalize_std=True, eps=0.0)
    assert advantages.kept == [False, True, False, True, False, True]
    assert sorted({i.key.split("/")[3] + ":" + i.key.split("/")[4] for i in items}) == [
        "d:1",
        "d:3",
        "d:5",
    ]


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_up_to_a_limit(limit):
    draws, found, metrics = play_all([FLAT] * 20, num_groups=3, max_refills=limit)
    assert draws == [3] * (1 + limit)
    assert metrics == {"group/refilled": 3.0 * limit}
    assert trained_items(found, normalize_std=True, eps=0.0)[0] == []


def test_groups_with_too_few_valid_rollouts_are_replaced_too():
    draws, _, metrics = play_all([(1.0, None), GOOD], num_groups=1, max_refills=1)
    assert draws == [1, 1]
    assert metrics == {"group/refilled": 1.0}


def test_names_and_seeds_of_all_groups_differ():
    _, found, _ = play_all([FLAT, FLAT, FLAT, FLAT], num_groups=2, max_refills=1)
    specs = [rollout.spec for rollout in found]
    assert [spec.group for spec in specs] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({spec.rollout_id for spec in specs}) == 8
    assert len({spec.seed for spec in specs}) == 8
    assert len({spec.env_seed for spec in specs}) == 4


class Rank(World):
    """A rank that is told what the other one kept."""

    def sum(self, values):
        return [values[0] + OTHERS.pop(0)]


OTHERS: list[float] = []


def test_ranks_draw_the_same_tasks_and_play_their_own():
    """4 groups, groups 0 and 2 here: 1 of 2 kept here, 1 there: 2 are missing; then 1 and 1."""
    OTHERS[:] = [1.0, 2.0]
    world = Rank(rank=0, size=2, device=torch.device("cpu"))
    tasks = [Task(id=str(i), domain="d", split="train") for i in range(9)]
    rewards = [FLAT, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD]
    walk, draws = iter(tasks), []

    def draw(num):
        draws.append(num)
        return list(islice(walk, num))

    found, metrics = play_groups(
        draw,
        lambda chosen, first: rollouts_of(chosen, first, rewards, world),
        num_groups=4,
        max_refills=3,
        world=world,
    )
    assert draws == [4, 2]
    assert {r.spec.group for r in found} == {0, 2, 4}
    assert metrics == {"group/refilled": 2.0}
    assert OTHERS == []


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(stop):
    """Five steps with refills, and the same with the loader's state saved and loaded after some."""
    generator = torch.Generator().manual_seed(0)
    flat = (torch.rand(40, generator=generator) < 0.5).tolist()
    rewards = [FLAT if f else GOOD for f in flat]

    def steps(loader, number):
        walk = chain.from_iterable(loader)
        found = []
        for _ in range(number):
            played, _ = play_groups(
                lambda num: list(islice(walk, num)),
                lambda chosen, first: rollouts_of(chosen, first, rewards),
                num_groups=4,
                max_refills=3,
                world=ALONE,
            )
            found.append([rollout.spec.task_id for rollout in played])
        return found, json.dumps(loader.state_dict())

    straight, _ = steps(task_loader(dataset(), tasks_per_step=1, seed=1), 6)
    assert len({len(step) for step in straight}) > 1  # refills differ from step to step
    before, state = steps(task_loader(dataset(), tasks_per_step=1, seed=1), stop)
    resumed = task_loader(dataset(), tasks_per_step=1, seed=1)
    resumed.load_state_dict(json.loads(state))
    after, _ = steps(resumed, 6 - stop)
    assert before + after == straight
