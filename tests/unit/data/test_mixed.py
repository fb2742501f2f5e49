"""Datasets that are mixed by weight: shares, orders, and states that other ranks go on from."""

import json
import random
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.dataset import AgenticEnvDataset, task_loader
from components.data.mixed import MixedDataset
from components.envs.base import Task
from recipes.grpo_agentic import GRPOAgentic


def tasks(domain, number):
    found = [Task(id=str(index), domain=domain, split="train") for index in range(number)]
    return SimpleNamespace(tasks=found)


def mix(**weights):
    sizes = {name: 3 + 2 * place for place, name in enumerate(weights)}
    return MixedDataset(datasets={n: tasks(n, sizes[n]) for n in weights}, weights=weights)


def real():
    """mock in two stages, and retail."""
    mock = AgenticEnvDataset(
        domain="mock",
        split="train",
        tasks="generated:7:12",
        curriculum=[{"include": ["generated-7-0", "generated-7-1"], "draws": 5}, {}],
    )
    retail = AgenticEnvDataset(domain="retail", split="train", include=[0, 2, 3, 4, 8])
    return MixedDataset(datasets={"a": mock, "b": retail}, weights={"a": 0.4, "b": 0.6})


def sources(dataset, number, *, seed=1):
    return [dataset.source(draw, seed=seed) for draw in range(number)]


# ---- shares

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 50), st.floats(0.01, 20).map(lambda x: round(x, 3))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 1000))
def test_every_first_draws_follow_the_weights(weights, seed):
    named = {f"d{index}": weight for index, weight in enumerate(weights)}
    drawn = sources(mix(**named), 120, seed=seed)
    total = sum(Fraction(str(weight)) for weight in weights)
    for name, weight in named.items():
        share, count = Fraction(str(weight)) / total, 0
        for number, (source, own) in enumerate(drawn, start=1):
            if source == name:
                assert own == count  # a dataset's draws are counted without a gap
                count += 1
            assert abs(count - number * share) <= 1 + share * (len(weights) - 2), (name, number)


@pytest.mark.parametrize(
    ("weights", "block", "expected"),
    [
        ({"a": 3, "b": 1}, 4, {"a": 3, "b": 1}),
        ({"a": 0.5, "b": 0.5}, 2, {"a": 1, "b": 1}),
        ({"a": 0.7, "b": 0.2, "c": 0.1}, 10, {"a": 7, "b": 2, "c": 1}),
        ({"a": 2, "b": 2, "c": 2}, 6, {"a": 2, "b": 2, "c": 2}),
    ],
)
def test_a_step_that_can_hold_the_shares_exactly_does(weights, block, expected):
    names = [name for name, _ in sources(mix(**weights), 60 * block)]
    orders = set()
    for start in range(0, len(names), block):
        step = names[start : start + block]
        assert {name: step.count(name) for name in expected} == expected
        orders.add(tuple(step))
    assert len(orders) > 1  # else a rank would play the same domain for ever


def test_the_order_is_that_of_all_moments_sorted():
    """Random access against the definition: every moment of every dataset, in order of time."""
    weights = {"x": 1.5, "y": 0.3, "z": 4}
    moments = []
    for name, weight in weights.items():
        for own in range(300):
            within = random.Random(f"5/{name}/{own}").random()
            moments.append(((own + Fraction(within)) / Fraction(str(weight)), name, own))
    expected = [(name, own) for _, name, own in sorted(moments)][:300]
    dataset = mix(**weights)
    found = {}
    for number in random.Random(0).sample(range(300), 300):
        found[number] = dataset.source(number, seed=5)
    assert [found[number] for number in range(300)] == expected


def test_each_dataset_walks_its_own_order():
    dataset = real()
    drawn = [dataset[dataset.draw(number, seed=3)] for number in range(200)]
    own = {"mock": dataset._datasets["a"], "retail": dataset._datasets["b"]}
    for (domain, alone), name in zip(own.items(), "ab", strict=True):
        found = [task for task in drawn if task.domain == domain]
        expected = [alone[alone.draw(k, seed=f"3/{name}")] for k in range(len(found))]
        assert found == expected
    mock = [task.id for task in drawn if task.domain == "mock"]
    assert set(mock[:5]) == {"generated-7-0", "generated-7-1"}  # its stage counts its own draws
    assert sorted(mock[5:17]) == sorted(f"generated-7-{index}" for index in range(12))
    retail = [task.id for task in drawn if task.domain == "retail"]
    assert sorted(retail[:5]) == sorted(retail[5:10]) == ["0", "2", "3", "4", "8"]
    assert [dataset.draw(n, seed=3) for n in range(99)] != [
        dataset.draw(n, seed=4) for n in range(99)
    ]


def test_a_task_of_two_datasets_is_listed_once_and_drawn_for_both():
    hard = SimpleNamespace(tasks=tasks("d", 6).tasks[4:])
    dataset = MixedDataset(
        datasets={"all": tasks("d", 6), "hard": hard}, weights={"all": 1, "hard": 1}
    )
    assert [task.id for task in dataset.tasks] == list("012345")
    drawn = [dataset[dataset.draw(number, seed=0)].id for number in range(24)]
    assert {task_id: drawn.count(task_id) for task_id in "045"} == {"0": 2, "4": 8, "5": 8}


def test_a_mix_of_mixes():
    inner = mix(x=1, y=1)
    dataset = MixedDataset(datasets={"in": inner, "z": tasks("z", 4)}, weights={"in": 1, "z": 1})
    drawn = [dataset[dataset.draw(number, seed=0)].domain for number in range(40)]
    assert [drawn.count(domain) for domain in "xyz"] == [10, 10, 20]


@pytest.mark.parametrize(
    ("datasets", "weights", "message"),
    [
        ({}, {}, "datasets: a mix needs at least one"),
        ({"a": 1}, {"b": 1}, r"weights: names \['b'\] must be those of datasets, \['a'\]"),
        ({"a": 1}, {"a": 0}, "weights.a: 0 must be a number above 0"),
        ({"a": 1}, {"a": float("inf")}, "weights.a: inf must be"),
        ({"a": 1}, {"a": float("nan")}, "weights.a: nan must be"),
        ({"a": 1}, {"a": True}, "weights.a: True must be"),
        ({"a": 0}, {"a": 1}, "datasets.a: .* has no tasks"),
    ],
)
def test_what_is_no_mix(datasets, weights, message):
    with pytest.raises(ValueError, match=message):
        MixedDataset(datasets={n: tasks(n, size) for n, size in datasets.items()}, weights=weights)


# ---- states


def played(drawn, *, rank, size, step):
    """What a rank of the recipe plays of a step's tasks: (group, domain, task id)."""
    recipe = SimpleNamespace(
        cfg=SimpleNamespace(seed=3), world=SimpleNamespace(rank=rank, size=size)
    )
    specs = GRPOAgentic._specs(recipe, drawn, group_size=1, phase=f"train/{step}")
    return [(spec.group, spec.domain, spec.task_id, spec.seed) for spec in specs]


def walk(loader, steps, *, first, ranks):
    """The steps as ``ranks`` processes play them together, each with a loader of its own."""
    walks = [iter(loader()) for _ in range(ranks)]
    found = []
    for step in range(first, first + steps):
        shares = [
            played(next(tasks), rank=rank, size=ranks, step=step)
            for rank, tasks in enumerate(walks)
        ]
        assert all(shares)
        found.append(sorted(spec for share in shares for spec in share))
        assert len(set(found[-1])) == sum(map(len, shares))  # nothing is played twice
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stop", [1, 3, 8])
@pytest.mark.parametrize("tasks_per_step", [4, 7])
def test_a_state_of_one_rank_goes_on_with_others(ranks, stop, tasks_per_step):
    """Mid-epoch (12 + 5 tasks): together the ranks play what the uninterrupted run plays."""

    def loader():
        return task_loader(real(), tasks_per_step=tasks_per_step, seed=3)

    expected = walk(loader, 20, first=0, ranks=1)
    first = loader()
    tasks = iter(first)
    for _ in range(stop):
        next(tasks)
    state = json.loads(json.dumps(first.state_dict()))

    def resumed():
        second = loader()
        second.load_state_dict(state)
        return second

    assert walk(resumed, 20 - stop, first=stop, ranks=ranks) == expected[stop:]


def test_the_state_is_seed_epoch_and_index():
    loader = task_loader(real(), tasks_per_step=4, seed=3)
    tasks = iter(loader)
    for _ in range(6):
        next(tasks)
    text = json.dumps(loader.state_dict())
    assert '{"seed": 3, "epoch": 1, "index": 7}' in text  # 24 draws of 17 tasks
