"""Tasks and the order in which they are drawn."""

import warnings

import pytest
import torch

from components.data.dataset import AgenticEnvDataset, SeededSampler, task_loader

GENERATED = "generated:7:12"


def dataset(**settings):
    values = {"domain": "mock", "split": "train", "tasks": GENERATED}
    return AgenticEnvDataset(**(values | settings))


def test_splits_do_not_meet():
    train, test = dataset(), dataset(split="test", tasks="official")
    assert len(train) == 12
    assert len(test) == 9
    assert not {t.id for t in train.tasks} & {t.id for t in test.tasks}
    assert {(t.domain, t.split) for t in train.tasks} == {("mock", "train")}
    assert train[3] is train.tasks[3]


def test_retail_has_its_official_splits():
    train = AgenticEnvDataset(domain="retail", split="train")
    test = AgenticEnvDataset(domain="retail", split="test")
    assert (len(train), len(test)) == (74, 40)
    assert not {t.id for t in train.tasks} & {t.id for t in test.tasks}


def test_include_keeps_its_order_and_exclude_leaves_out():
    ids = [task.id for task in dataset().tasks]
    found = dataset(include=[ids[5], ids[2], ids[7]], exclude=[ids[2]])
    assert [task.id for task in found.tasks] == [ids[5], ids[7]]


def test_ids_that_yaml_reads_as_numbers():
    found = AgenticEnvDataset(domain="retail", split="all", include=[3, "5"])
    assert [task.id for task in found.tasks] == ["3", "5"]


@pytest.mark.parametrize("setting", ["include", "exclude"])
def test_an_unknown_id_is_named(setting):
    with pytest.raises(ValueError, match=rf"{setting}: task ids \['no_such_task'\] are not in moc"):
        dataset(**{setting: ["no_such_task"]})


def test_no_task_left_is_an_error():
    ids = [task.id for task in dataset().tasks]
    with pytest.raises(ValueError, match="no task of mock/train is left"):
        dataset(exclude=ids)


def take(sampler, number):
    walk = iter(sampler)
    return [next(walk) for _ in range(number)]


def test_each_epoch_is_a_permutation_of_its_own():
    drawn = take(SeededSampler(10, seed=3), 40)
    epochs = [tuple(drawn[i : i + 10]) for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert take(SeededSampler(10, seed=3), 40) == drawn
    assert take(SeededSampler(10, seed=4), 40) != drawn


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 11, 25])
def test_a_sampler_goes_on_where_it_was(stop):
    drawn = take(SeededSampler(10, seed=3), 40)
    first = SeededSampler(10, seed=3)
    take(first, stop)
    second = SeededSampler(10, seed=99)
    second.load_state_dict(first.state_dict())
    assert take(second, 40 - stop) == drawn[stop:]


@pytest.mark.parametrize("stop", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("tasks_per_step", [2, 5])
def test_a_loader_goes_on_where_it_was(stop, tasks_per_step):
    def steps(loader, number):
        walk = iter(loader)
        return [[task.id for task in next(walk)] for _ in range(number)]

    expected = steps(task_loader(dataset(), tasks_per_step=tasks_per_step, seed=1), 12)
    assert all(len(step) == tasks_per_step for step in expected)
    first = task_loader(dataset(), tasks_per_step=tasks_per_step, seed=1)
    walk = iter(first)
    state = first.state_dict()
    for _ in range(stop):
        next(walk)
        state = first.state_dict()
    second = task_loader(dataset(), tasks_per_step=tasks_per_step, seed=1)
    second.load_state_dict(state)
    assert steps(second, 12 - stop) == expected[stop:]


def test_a_loaders_state_is_json(tmp_path):
    import json

    loader = task_loader(dataset(), tasks_per_step=2, seed=1)
    walk = iter(loader)
    next(walk)
    state = loader.state_dict()
    expected = [task.id for task in next(walk)]
    second = task_loader(dataset(), tasks_per_step=2, seed=1)
    second.load_state_dict(json.loads(json.dumps(state)))
    assert [task.id for task in next(iter(second))] == expected


def test_a_loader_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    next(iter(task_loader(dataset(), tasks_per_step=2, seed=1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_makes_no_noise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(task_loader(dataset(), tasks_per_step=2, seed=1)))


def test_tasks_per_step_is_at_least_one():
    with pytest.raises(ValueError, match="tasks_per_step: 0 is below 1"):
        task_loader(dataset(), tasks_per_step=0, seed=1)
