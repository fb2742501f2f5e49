"""Our environment against the official ``Orchestrator.run()`` and evaluator of tau2-bench.

The reference runs in tests/parity/tau2_scripts.py use tau2's classes alone: its environment built
from its files, its Orchestrator, its evaluator under the official domain name. ``make test`` plays
a few tasks of each domain; ``make test-tau2`` all of them, and prints how many runs were compared.
"""

from __future__ import annotations

from collections import Counter

import pytest

from components.envs.base import Reward
from components.envs.tau2_data import domain_data, find_task, task_ids
from components.envs.tau2_score import KNOWN
from components.envs.tau2_solo import solo_ids
from tests.parity import tau2_scripts
from tests.parity.tau2_scripts import Script, official_run, our_run, talk

AGENTS = ("gold", "nothing", "transfer", "random-0", "random-1")
MAX_STEPS = (200, 7)
# Exchanges, several writes, required information, a transfer, a failing gold write, tool errors.
QUICK = (
    ("retail", "0", "random-0", 200),
    ("retail", "4", "gold", 200),
    ("retail", "10", "transfer", 7),
    ("retail", "33", "gold", 200),
    ("retail", "59", "random-1", 7),
    ("retail", "105", "gold", 200),
    ("airline", "7", "gold", 200),
    ("airline", "14", "random-0", 200),
)
# Airplane mode and roaming; a payment; a slow VPN; a locked SIM, which is to be transferred.
QUICK_TELECOM = ("user_abroad", "overdue_bill", "bad_vpn", "lock_sim")


def _script(domain: str, task_id: str, agent: str, *, solo: bool = False) -> Script:
    task = find_task(domain, task_id)
    if not agent.startswith("random"):
        return (
            getattr(tau2_scripts, agent)(task, solo=solo)
            if agent == "gold"
            else getattr(tau2_scripts, agent)(solo=solo)
        )
    data = domain_data(domain)
    names = [*data.tool_types, *data.user_tool_types]
    acts = bool(data.user_tools)
    return tau2_scripts.random_run(task, names, int(agent.split("-")[1]), user_acts=acts, solo=solo)


def _official_rewards(domain: str, task, simulation, *, solo: bool) -> dict[str, float]:
    """The official reward, and the components as they would be had the run been scored."""
    from tau2.data_model.simulation import TerminationReason
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    def evaluate(run):
        tau2_scripts.pristine_classes()
        return evaluate_simulation(
            simulation=run,
            task=task,
            evaluation_type=EvaluationType.ALL,
            solo_mode=solo,
            domain=domain,
        )

    scored = simulation.termination_reason.value in ("user_stop", "agent_stop")
    if not scored:
        assert evaluate(simulation).reward == 0.0
        stop = {"termination_reason": TerminationReason.USER_STOP}
        simulation = simulation.model_copy(update=stop)
    try:
        info = evaluate(simulation)
    except ValueError as error:
        if "not found" not in str(error):
            raise
        return {"official": 0.0, "evaluation_error": 1.0}  # asserts on a task that is not there
    found = {"official": info.reward if scored else 0.0}
    found["db"] = info.db_check.db_reward if info.db_check else 1.0
    for name, met in (
        ("communicate", [c.met for c in info.communicate_checks or ()]),
        ("action", [c.action_match for c in info.action_checks or ()]),
        ("env_assertion", [c.met for c in info.env_assertions or ()]),
    ):
        found[name] = float(all(met))
    return found


def _compare(domain: str, task_id: str, agent: str, max_steps: int, *, solo: bool = False) -> str:
    """Run both, compare everything; returns the termination reason."""
    return _compare_script(
        domain, task_id, _script(domain, task_id, agent, solo=solo), max_steps=max_steps
    )


def _compare_script(domain: str, task_id: str, script: Script, *, max_steps: int) -> str:
    task = find_task(domain, task_id)
    orchestrator, simulation = official_run(
        domain=domain, task=task, script=script, max_steps=max_steps
    )
    official_hashes = (
        orchestrator.environment.get_db_hash(),
        orchestrator.environment.get_user_db_hash(),
    )
    env, (_, reward, terminated, truncated, info) = our_run(
        domain=domain,
        task_id=task_id,
        script=script,
        max_steps=max_steps,
        checker=(lambda trajectory: Reward(value=0.0)) if _judged(task) else None,
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
    assert env.database_hashes() == official_hashes
    assert all(
        m.role != "tool" or not m.tool_call_id.startswith("user_") for m in trajectory.messages
    )
    assert truncated == (trajectory.termination_reason in ("max_steps", "too_many_errors"))
    assert terminated != truncated
    if not _judged(task):
        expected = _official_rewards(domain, task, simulation, solo=script.solo)
        breakdown = info["reward"].breakdown
        assert {name: breakdown[name] for name in expected} == expected
        assert reward == expected["official"]
    env.close()
    return trajectory.termination_reason


def _judged(task) -> bool:
    """Whether a model is needed to score a task (upstream's retail)."""
    criteria = task.evaluation_criteria
    assert {part.value for part in criteria.reward_basis} <= KNOWN
    return bool("NL_ASSERTION" in criteria.reward_basis and criteria.nl_assertions)


def _cases(domain: str, solo: bool) -> list[str]:
    if solo:
        return list(solo_ids(domain))
    return list(task_ids(domain, "test" if domain == "mock" else "all"))


@pytest.mark.parametrize("solo", [False, True])
def test_mock_equals_official(solo):
    ids = _cases("mock", solo)
    assert len(ids) in ((6, 7) if solo else (9, 10))
    for task_id in ids:
        reasons = {_compare("mock", task_id, a, n, solo=solo) for a in AGENTS for n in MAX_STEPS}
        assert reasons & {"user_stop", "agent_stop"}
        assert "max_steps" in reasons or "too_many_errors" in reasons


@pytest.mark.parametrize(("domain", "task_id", "agent", "max_steps"), QUICK)
def test_a_few_equal_official(domain, task_id, agent, max_steps):
    _compare(domain, task_id, agent, max_steps)


@pytest.mark.parametrize("kind", QUICK_TELECOM)
@pytest.mark.parametrize("solo", [False, True])
def test_telecom_equals_official(kind, solo):
    task_id = next(task_id for task_id in task_ids("telecom", "all") if kind in task_id)
    for agent in AGENTS:
        for max_steps in MAX_STEPS:
            _compare("telecom", task_id, agent, max_steps, solo=solo)


def test_too_many_errors_equals_official():
    """Cumulative: a success between errors does not reset the count; calls in flight end first."""
    turns = [[("no_such_tool", {})] * 3, [("get_users", {})], [("no_such_tool", {})] * 8]
    for task_id in ("update_task_1", "update_task_with_message_history"):
        reason = _compare_script("mock", task_id, Script(agent=turns, user=talk(9)), max_steps=30)
        assert reason == "too_many_errors"


@pytest.mark.parametrize(("max_steps", "reason"), [(3, "max_steps"), (4, "user_stop")])
def test_stop_on_the_last_step_counts_as_max_steps(max_steps, reason):
    script = Script(agent=["I am sorry, I cannot help."], user=talk(2))
    found = _compare_script("mock", "create_task_1_nl_eval", script, max_steps=max_steps)
    assert found == reason


@pytest.mark.tau2
@pytest.mark.parametrize(
    ("domain", "solo"),
    [
        ("mock", False),
        ("mock", True),
        ("retail", False),
        ("airline", False),
        ("telecom", False),
        ("telecom", True),
    ],
)
def test_every_task_equals_official(domain, solo, capsys):
    reasons: Counter[str] = Counter()
    ids = _cases(domain, solo)
    for task_id in ids:
        for agent in AGENTS:
            for max_steps in MAX_STEPS:
                reasons[_compare(domain, task_id, agent, max_steps, solo=solo)] += 1
    name = domain + (" solo" if solo else "")
    with capsys.disabled():
        print(f"\n{name}: {reasons.total()} of {reasons.total()} runs equal ({len(ids)} tasks):")
        print("  " + ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())))
