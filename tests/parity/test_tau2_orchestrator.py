"""Our environment against the official ``Orchestrator.run()`` and evaluator of tau2-bench.

The reference runs in tests/parity/tau2_scripts.py use tau2's classes alone: its environment built
from its files, its Orchestrator, its evaluator under the official domain name.
"""

from __future__ import annotations

import pytest

from components.envs.tau2_data import domain_data, find_task, task_ids
from tests.parity.tau2_scripts import gold_script, official_run, our_run, random_script

MOCK = (
    "create_task_1",
    "create_task_1_with_env_assertions",
    "create_task_1_nl_eval",
    "update_task_1",
    "update_task_with_message_history",
    "update_task_with_initialization_data",
    "update_task_with_initialization_actions",
    "update_task_with_history_and_env_assertions",
    "impossible_task_1",
)
# Exchanges, several writes, required information, a transfer, a failing gold write, tool errors.
RETAIL = (
    ("0", "random-0", 30),
    ("4", "gold", 30),
    ("10", "gold", 7),
    ("33", "gold", 30),
    ("59", "random-1", 7),
    ("105", "gold", 30),
)
AGENTS = ("gold", "nothing", "random-0", "random-1")


def _script(domain: str, task_id: str, agent: str):
    task = find_task(domain, task_id)
    if agent == "gold":
        return gold_script(task), 2
    if agent == "nothing":
        return ["I am sorry, I cannot help."], 2
    names = list(domain_data(domain).tool_types)
    return random_script(task, names, int(agent.split("-")[1])), 4


def _official_reward(domain: str, task, simulation):
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    try:
        return evaluate_simulation(
            simulation=simulation,
            task=task,
            evaluation_type=EvaluationType.ALL,
            solo_mode=False,
            domain=domain,
        ).reward
    except ValueError as error:
        if "not found" not in str(error):
            raise
        return 0.0  # an assertion about a task that was never created


def _compare(domain: str, task_id: str, agent: str, max_steps: int) -> str:
    """Run both, compare everything; returns the termination reason."""
    script, num_replies = _script(domain, task_id, agent)
    task = find_task(domain, task_id)
    orchestrator, simulation = official_run(
        domain=domain, task=task, script=script, num_replies=num_replies, max_steps=max_steps
    )
    env, (_, reward, terminated, truncated, info) = our_run(
        domain=domain, task_id=task_id, script=script, num_replies=num_replies, max_steps=max_steps
    )
    trajectory = info["trajectory"]
    ours = trajectory.official.messages
    assert ours == simulation.messages  # tau2's equality: role, content, calls, ids, errors
    assert [m.turn_idx for m in ours] == [m.turn_idx for m in simulation.messages]
    assert [m.timestamp for m in ours] == sorted({m.timestamp for m in ours})
    assert trajectory.termination_reason == simulation.termination_reason.value
    assert trajectory.official.termination_reason == simulation.termination_reason
    assert trajectory.num_steps == orchestrator.step_count
    assert trajectory.num_tool_errors == orchestrator.num_errors
    assert env.database_hashes() == (
        orchestrator.environment.get_db_hash(),
        orchestrator.environment.get_user_db_hash(),
    )
    assert reward == _official_reward(domain, task, simulation)
    assert truncated == (trajectory.termination_reason in ("max_steps", "too_many_errors"))
    assert terminated != truncated
    return trajectory.termination_reason


@pytest.mark.parametrize("task_id", MOCK)
def test_mock_equals_official(task_id):
    assert set(MOCK) <= set(task_ids("mock", "test"))
    reasons = {_compare("mock", task_id, agent, steps) for agent in AGENTS for steps in (30, 7)}
    assert "user_stop" in reasons
    assert "max_steps" in reasons


@pytest.mark.parametrize(("task_id", "agent", "max_steps"), RETAIL)
def test_retail_equals_official(task_id, agent, max_steps):
    _compare("retail", task_id, agent, max_steps)


def test_too_many_errors_equals_official():
    """Cumulative: a success between errors does not reset the count; calls in flight end first."""
    script = [[("no_such_tool", {})] * 3, [("get_users", {})], [("no_such_tool", {})] * 8]
    orchestrator, simulation = official_run(
        domain="mock",
        task=find_task("mock", "update_task_1"),
        script=script,
        num_replies=9,
        max_steps=30,
    )
    _, (_, reward, _, truncated, info) = our_run(
        domain="mock", task_id="update_task_1", script=script, num_replies=9, max_steps=30
    )
    assert info["trajectory"].termination_reason == "too_many_errors"
    assert info["trajectory"].official.messages == simulation.messages
    assert info["trajectory"].num_tool_errors == orchestrator.num_errors == 11
    assert (reward, truncated) == (0.0, True)


@pytest.mark.parametrize(("max_steps", "reason"), [(3, "max_steps"), (4, "user_stop")])
def test_stop_on_the_last_step_counts_as_max_steps(max_steps, reason):
    script = ["I am sorry, I cannot help."]
    for run in (
        official_run(
            domain="mock",
            task=find_task("mock", "create_task_1_nl_eval"),
            script=script,
            num_replies=2,
            max_steps=max_steps,
        )[1],
        our_run(
            domain="mock",
            task_id="create_task_1_nl_eval",
            script=script,
            num_replies=2,
            max_steps=max_steps,
        )[1][4]["trajectory"].official,
    ):
        assert run.termination_reason.value == reason


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_every_task_equals_official(domain):
    for task_id in task_ids(domain, "all"):
        for agent, steps in (("gold", 40), ("nothing", 30), ("random-0", 30), ("random-1", 7)):
            _compare(domain, task_id, agent, steps)
