"""Curricula: which tasks are drawn when."""

import random

import pytest

from components.data.curriculum import shuffled_draw
from components.data.dataset import AgenticEnvDataset
from components.envs.task_lists import task_lists


def retail(curriculum, **settings):
    return AgenticEnvDataset(domain="retail", split="train", curriculum=curriculum, **settings)


def drawn(dataset, number, *, seed=1):
    return [dataset[dataset.draw(index, seed=seed)].id for index in range(number)]


def test_an_endless_shuffle_is_the_shuffle_of_each_epoch():
    expected = []
    for epoch in range(4):
        order = list(range(9))
        random.Random(f"5/{epoch}").shuffle(order)
        expected += order
    assert [shuffled_draw(9, number, seed=5) for number in range(36)] == expected


def test_stages_by_names_of_lists_and_by_ids():
    order_sensitive = ["20", "21", "37"]  # of the train split: 36 and 100 are held out
    dataset = retail(
        [
            {"include": "do_nothing", "draws": 8},
            {"include": ["order_sensitive", 0], "draws": 6},
            {"exclude": ["do_nothing", "order_sensitive"]},
        ]
    )
    found = drawn(dataset, 200)
    easy = [i for i in task_lists()["do_nothing"]["tasks"]["retail"] if i in found]
    assert len(easy) == 5
    assert sorted(found[:5]) == sorted(easy)  # one epoch of it, and three more
    assert set(found[5:8]) < set(easy)
    assert sorted(found[8:12]) == sorted([*order_sensitive, "0"])
    assert set(found[12:14]) < {*order_sensitive, "0"}
    rest = found[14:]
    assert not set(rest) & {*easy, *order_sensitive}
    assert len(set(rest[:66])) == 66 == 74 - 5 - 3
    assert sorted(rest[:66]) == sorted(rest[66:132])
    assert rest[:66] != rest[66:132]


def test_tasks_of_no_stage_are_left_out():
    dataset = retail([{"include": [3, 8], "draws": 1}, {"include": [0, 3]}])
    assert [task.id for task in dataset.tasks] == ["0", "3", "8"]
    assert set(drawn(dataset, 40)) <= {"0", "3", "8"}


def test_one_stage_is_the_dataset_without_a_curriculum():
    assert drawn(retail([{}]), 100) == drawn(retail(None), 100)


def test_stages_are_among_the_tasks_of_the_dataset():
    dataset = retail([{"include": "do_nothing", "draws": 4}, {}], exclude=[10, 25])
    assert not {"10", "25"} & {task.id for task in dataset.tasks}
    assert set(drawn(dataset, 4)) <= {"50", "57", "105"}


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ([], "curriculum: it has no stages"),
        (["do_nothing"], r"curriculum\[0\]: 'do_nothing' must be a mapping with include"),
        ([{"incl": [3]}], r"curriculum\[0\].incl: a stage has .*; did you mean 'include'\?"),
        ([{"draws": 3}], r"curriculum\[0\].draws: 3: the last stage goes on for ever"),
        ([{}, {}], r"curriculum\[0\].draws: None must be an integer of at least 1"),
        ([{"draws": 0}, {}], r"curriculum\[0\].draws: 0 must be"),
        ([{"draws": True}, {}], r"curriculum\[0\].draws: True must be"),
        ([{"draws": 1.5}, {}], r"curriculum\[0\].draws: 1.5 must be"),
        ([{"include": ["do_nothin"]}], r"curriculum\[0\].include: .*did you mean 'do_nothing'"),
        ([{"include": ["36"]}], r"curriculum\[0\].include: task ids \['36'\] are not in retail/tr"),
        ([{"include": [3], "exclude": [3]}], r"curriculum\[0\]: none of the dataset's tasks"),
        ([{"include": []}], r"curriculum\[0\]: none of the dataset's tasks of retail/train"),
    ],
)
def test_what_is_no_curriculum(curriculum, message):
    with pytest.raises(ValueError, match=message):
        retail(curriculum)
