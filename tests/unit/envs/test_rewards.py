import dataclasses
import pickle

import pytest

from components.envs.base import Message, ToolCall
from components.envs.baselines import baseline
from components.envs.rewards import (
    OfficialReward,
    PartialCredit,
    StrictReward,
    _num_matched,
    gold_actions,
    score,
)
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import find_task
from tests.parity.tau2_scripts import TextUser


def play(domain, task_id, calls, text="Done.", max_steps=100):
    """The trajectory of an agent that makes some calls and says one thing."""
    env = Tau2Env(domain=domain, user=lambda task: TextUser(2), max_steps=max_steps)
    env.reset(options={"task_id": task_id})
    for i, (name, arguments) in enumerate(calls):
        call = ToolCall(id=f"c{i}", name=name, arguments=arguments)
        info = env.step(Message(role="assistant", tool_calls=(call,)))[4]
    info = info if calls and "trajectory" in info else env.step(text)[4]
    return info["trajectory"]


def gold_calls(domain, task_id):
    actions = find_task(domain, task_id).evaluation_criteria.actions
    return [(action.name, dict(action.arguments)) for action in actions]


@pytest.mark.parametrize("task_id", ["10", "12", "25", "50", "65", "105"])
def test_strict_is_zero_where_doing_nothing_is_officially_right(task_id):
    reward = baseline("retail", task_id)
    assert reward.value == reward.breakdown["official"] == 1.0
    assert reward.breakdown["strict"] == 0.0


def test_strict_equals_official_where_there_is_nothing_to_do():
    assert not gold_actions("retail", "57").has_actions
    assert baseline("retail", "57").breakdown["strict"] == 1.0


def test_transfer_is_a_required_action():
    assert gold_actions("mock", "impossible_task_1").transfers
    assert baseline("mock", "impossible_task_1").value == 0.0
    reward = baseline("mock", "impossible_task_1", agent="transfer")
    assert reward.breakdown["strict"] == reward.value == 1.0
    with pytest.raises(ValueError, match="neither 'do_nothing' nor 'transfer'"):
        baseline("mock", "impossible_task_1", agent="sleep")


def test_gold_writes_that_the_tool_refuses_are_not_required():
    names = [name for name, _ in gold_calls("retail", "105")]
    assert any(name.startswith(("modify", "return", "exchange", "cancel")) for name in names)
    assert gold_actions("retail", "105").writes == ()


def test_partial_credit_on_two_writes():
    task_id = next(f"generated-0-{i}" for i in range(50) if _plain_two_writes(f"generated-0-{i}"))
    calls = gold_calls("mock", task_id)
    full = play("mock", task_id, calls)
    assert PartialCredit()(full).value == 1.0
    half = PartialCredit()(play("mock", task_id, calls[:1]))
    assert half.breakdown["official"] == 0.0
    assert half.breakdown["writes"] == 0.5
    assert half.value == pytest.approx(0.3 * 0.5)
    wrong = [calls[0], (calls[1][0], {**calls[1][1], "title": "Another"})]
    halves = PartialCredit(official=0.5, writes=0.5, reads=0.0, read_success=0.0)
    part = halves(play("mock", task_id, wrong))
    assert part.value == pytest.approx(0.25)
    # A write too many costs as much as one too few.
    more = PartialCredit()(play("mock", task_id, [*calls, wrong[1]])).breakdown
    assert more["writes"] == pytest.approx(2 / 3)
    assert PartialCredit()(play("mock", task_id, [])).value == 0.0


def _plain_two_writes(task_id):
    gold = gold_actions("mock", task_id)
    names = [name for name, _ in gold.writes]
    return names == ["create_task", "create_task"] and not gold.reads and not gold.transfers


def test_reads_count_where_they_succeed():
    task_id = next(
        f"generated-0-{i}" for i in range(50) if gold_actions("mock", f"generated-0-{i}").reads
    )
    seen = PartialCredit()(play("mock", task_id, [("get_users", {})]))
    assert seen.breakdown["reads"] == seen.breakdown["read_success"] == 1.0
    assert seen.value == pytest.approx(0.05 + 0.05)


def test_read_success_is_the_share_of_reads_without_an_error():
    calls = [
        ("get_order_details", {"order_id": "#W0000000"}),
        ("find_user_id_by_name_zip", {"first_name": "Yusuf", "last_name": "Rossi", "zip": "19122"}),
    ]
    assert score(play("retail", "0", calls))["read_success"] == 0.5
    assert score(play("retail", "0", []))["read_success"] == 0.0


def test_early_end_scores_zero_with_components():
    calls = gold_calls("mock", "create_task_1")
    reward = OfficialReward()(play("mock", "create_task_1", calls, max_steps=3))
    assert reward.value == reward.breakdown["official"] == reward.breakdown["strict"] == 0.0
    assert reward.breakdown["db"] == 1.0
    assert reward.breakdown["writes"] == 1.0


def test_assertion_that_raises_scores_zero_and_is_recorded():
    reward = OfficialReward()(play("mock", "create_task_1_with_env_assertions", []))
    assert reward.value == 0.0
    assert reward.breakdown["evaluation_error"] == 1.0


def test_other_errors_of_the_evaluator_are_not_swallowed():
    trajectory = play("mock", "create_task_1", gold_calls("mock", "create_task_1"))
    tool = next(m for m in trajectory.official.messages if m.role == "tool")
    tool.content = "{}"  # not what the tool answers when the call is executed again
    replayed = dataclasses.replace(trajectory, outcome=None)
    with pytest.raises(ValueError, match="Expected"):
        OfficialReward()(replayed)


def test_communicate_is_a_component():
    task = find_task("retail", "2")
    calls = gold_calls("retail", "2")
    silent = OfficialReward()(play("retail", "2", calls))
    assert (silent.value, silent.breakdown["db"], silent.breakdown["communicate"]) == (0, 1, 0)
    told = " ".join(task.evaluation_criteria.communicate_info)
    assert OfficialReward()(play("retail", "2", calls, text=told)).value == 1.0


def test_matching_ignores_the_order_of_items_but_not_their_pairs():
    gold = [("exchange", {"item_ids": ["a", "b"], "new_item_ids": ["x", "y"], "note": None})]
    assert _num_matched(gold, [("exchange", {"item_ids": ["b", "a"], "new_item_ids": ["y", "x"]})])
    assert not _num_matched(
        gold, [("exchange", {"item_ids": ["b", "a"], "new_item_ids": ["x", "y"]})]
    )
    assert _num_matched(gold * 2, gold) == 1  # one made call counts once


@pytest.mark.parametrize("weights", [{"official": 0.9}, {"official": 1.3, "writes": -0.4}])
def test_weights_are_checked(weights):
    with pytest.raises(ValueError, match="weights must be"):
        PartialCredit(**weights)
    with pytest.raises(ValueError, match="above 0"):
        PartialCredit(official=0.0, writes=0.9)


def test_checkers_can_be_sent_to_workers():
    for checker in (
        OfficialReward(),
        StrictReward(),
        PartialCredit(official=0.5, writes=0.4),
    ):
        assert pickle.loads(pickle.dumps(checker)) == checker
