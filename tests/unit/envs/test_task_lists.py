"""Named lists of tasks: what is in them is true, and a dataset takes them."""

import json
from pathlib import Path

import pytest

from components.data.dataset import AgenticEnvDataset
from components.envs.base import Message, ToolCall
from components.envs.baselines import AGENTS, baseline, baselines
from components.envs.rewards import gold_actions
from components.envs.task_lists import resolve, task_lists
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, find_task
from tests.parity.tau2_scripts import TextUser

REPLAY = json.loads((Path(__file__).parents[2] / "data/tau2_rewards.json").read_text())


def ids(dataset):
    return [task.id for task in dataset.tasks]


def test_every_list_says_why_and_names_tasks_that_exist():
    assert set(task_lists()) == {
        *("do_nothing", "transfer_at_once", "order_sensitive", "agent_conditional", "wrong_gold"),
    }
    for name, entry in task_lists().items():
        assert entry["why"], name
        assert entry["source"], name
        for domain, found in entry["tasks"].items():
            assert len(set(found)) == len(found)
            assert set(found) <= set(domain_data(domain).tasks), (name, domain)


def test_agent_conditional_tasks_are_those_of_the_tiers():
    file = Path(__file__).parents[2] / "data/retail_scripted_tiers.json"
    tier = json.loads(file.read_text())["C2_agent_conditional"]
    assert task_lists()["agent_conditional"]["tasks"]["retail"] == tier


@pytest.mark.parametrize("domain", ["retail", "airline", "mock"])
def test_do_nothing_is_what_an_independent_replay_found(domain):
    solved = {i for i, entry in REPLAY[domain].items() if entry["do_nothing"] == 1.0}
    assert set(task_lists()["do_nothing"]["tasks"][domain]) == solved


@pytest.mark.parametrize("agent", AGENTS)
def test_lists_of_agents_that_do_not_try_on_mock(agent):
    name = {"do_nothing": "do_nothing", "transfer": "transfer_at_once"}[agent]
    solved = {i for i in domain_data("mock").tasks if baseline("mock", i, agent).value == 1.0}
    assert set(task_lists()[name]["tasks"]["mock"]) == solved


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["retail", "airline", "telecom"])
def test_lists_of_agents_that_do_not_try(domain):
    for agent, name in (("do_nothing", "do_nothing"), ("transfer", "transfer_at_once")):
        of_domain = domain_data(domain).splits["all"]
        solved = {i for i in of_domain if baseline(domain, i, agent).value == 1.0}
        assert set(task_lists()[name]["tasks"].get(domain, ())) == solved, agent


def test_every_tenth_telecom_task_by_transfer():
    """A quick share of the slow test above."""
    listed = set(task_lists()["transfer_at_once"]["tasks"]["telecom"])
    some = domain_data("telecom").splits["all"][::10]
    assert {i for i in some if baseline("telecom", i, "transfer").value == 1.0} == listed & set(
        some
    )


def final_hash(task_id, turn_items):
    """The database after the gold calls, the items of each call ordered by ``turn_items``."""
    env = Tau2Env(domain="retail", user=lambda task: TextUser(2))
    env.reset(options={"task_id": task_id})
    for i, action in enumerate(find_task("retail", task_id).evaluation_criteria.actions):
        arguments = dict(action.arguments)
        for key in ("item_ids", "new_item_ids"):
            if key in arguments:
                arguments[key] = turn_items(arguments[key])
        call = ToolCall(id=f"c{i}", name=action.name, arguments=arguments)
        env.step(Message(role="assistant", tool_calls=(call,)))
    return env.database_hashes()


def test_order_sensitive_tasks_are_those_whose_database_depends_on_the_order():
    listed = set(task_lists()["order_sensitive"]["tasks"]["retail"])
    several = {
        task_id
        for task_id in domain_data("retail").tasks
        for name, arguments in gold_actions("retail", task_id).writes
        if name == "modify_pending_order_items" and len(arguments["item_ids"]) > 1
    }
    sensitive = {
        i for i in several if final_hash(i, list) != final_hash(i, lambda items: items[::-1])
    }
    assert sensitive == listed


def test_gold_that_is_wrong():
    assert gold_actions("retail", "105").writes == ()  # its tool refuses the gold write
    text = find_task("retail", "10").user_scenario.instructions.reason_for_call
    assert "return" in text
    assert "return_delivered_order_items" not in {n for n, _ in gold_actions("retail", "10").writes}


def test_a_dataset_takes_names_of_lists():
    everything = AgenticEnvDataset(domain="retail", split="train")
    lists = ["do_nothing", "order_sensitive", "wrong_gold"]
    found = AgenticEnvDataset(domain="retail", split="train", exclude=lists)
    without = {"10", "25", "50", "57", "105", "20", "21", "37"}  # those of the train split
    assert ids(found) == [i for i in ids(everything) if i not in without]
    more = AgenticEnvDataset(domain="retail", split="train", exclude=["wrong_gold", 3])
    assert set(ids(everything)) - set(ids(more)) == {"3", "10", "105"}
    one = AgenticEnvDataset(domain="retail", split="train", exclude="wrong_gold")
    assert set(ids(everything)) - set(ids(one)) == {"10", "105"}
    hard = AgenticEnvDataset(domain="retail", split="all", include="order_sensitive")
    assert ids(hard) == ["20", "21", "36", "37", "100"]


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ("wrong_glod", r"exclude: task ids \['wrong_glod'\] .* did you mean 'wrong_gold'\?"),
        (["do_nothing", "500"], r"exclude: task ids \['500'\] are not in retail/train"),
        (["order_sensitve"], "retail has the lists do_nothing, transfer_at_once, order_sens"),
    ],
)
def test_an_unknown_list_is_named(exclude, message):
    with pytest.raises(ValueError, match=message):
        AgenticEnvDataset(domain="retail", split="train", exclude=exclude)


def test_a_list_that_the_domain_does_not_have():
    with pytest.raises(
        ValueError, match=r"include: task ids \['order_sensitive'\] are not in mock"
    ):
        AgenticEnvDataset(domain="mock", split="test", include="order_sensitive")
    assert resolve(["a", "a", "b"], setting="x", where="sum/all", ids=["a", "b"]) == ["a", "b"]
    with pytest.raises(ValueError, match="sum has no named lists"):
        resolve("c", setting="x", where="sum/all", ids=["a", "b"])


def test_baselines_are_played_once_and_only_for_the_benchmark():
    found = baselines("mock", "impossible_task_1")
    assert (found["do_nothing"]["official"], found["transfer"]["official"]) == (0.0, 1.0)
    assert baselines("mock", "impossible_task_1") is found
    assert baselines("sum", "2+3") == {}
