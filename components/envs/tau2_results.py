"""Rollouts as tau2-bench's own results file, for its viewer and its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from components.envs.base import Trajectory
from components.envs.tau2_data import domain_data, find_task

_REASONS = {
    "truncated_max_steps": "max_steps",
    "truncated_errors": "too_many_errors",
    "error_user": "user_error",
}
"""Ends of ours in tau2's words; any other is ``agent_error``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One rollout as far as tau2 is concerned."""

    rollout_id: str
    task_id: str
    trial: int
    seed: int
    status: str
    official: float
    """The official reward that was recorded; 0 for a rollout that failed."""
    trajectory: Trajectory | None
    """None where the environment did not end the episode."""
    messages: tuple[Any, ...] = ()
    """tau2's own messages of such an episode."""


def tau2_results(
    played: Iterable[Played],
    *,
    domain: str,
    env: Mapping[str, Any],
    agent: str,
    num_trials: int,
    seed: int,
) -> Any:
    """A tau2 ``Results``.

    Every rollout is a simulation, failures too, so that tau2's means have the same denominator. The
    rewards are found by the official evaluator from the official record, and must be those that
    were recorded.

    Args:
        played: in any order.
        domain: tau2's name.
        env: settings of ``Tau2Env`` (``max_steps``, ``max_errors``, ``user``).
        agent: what played: a model's directory, say.
        num_trials: per task.
        seed: of the evaluation.

    Raises:
        ValueError: if the official evaluator gives another reward than what was recorded.
    """
    from tau2.data_model.simulation import AgentInfo, Info, Results, UserInfo
    from tau2.environment.environment import EnvironmentInfo

    simulations = [_simulation(one, domain) for one in played]
    user = env.get("user", "scripted")
    info = Info(
        git_commit="",
        num_trials=num_trials,
        max_steps=env.get("max_steps", 100),
        max_errors=env.get("max_errors", 10),
        user_info=UserInfo(implementation=user if isinstance(user, str) else "llm"),
        agent_info=AgentInfo(implementation="sinkflex_rl", llm=agent),
        environment_info=EnvironmentInfo(
            domain_name=domain, policy=domain_data(domain).system_prompt
        ),
        seed=seed,
    )
    ids = dict.fromkeys(simulation.task_id for simulation in simulations)
    tasks = [find_task(domain, task_id) for task_id in ids]
    return Results(info=info, tasks=tasks, simulations=simulations)


def _simulation(one: Played, domain: str) -> Any:
    from tau2.data_model.simulation import RewardInfo, SimulationRun, TerminationReason

    if one.trajectory is not None:
        simulation = one.trajectory.official.model_copy(
            update={"id": one.rollout_id, "trial": one.trial, "seed": one.seed}
        )
        return simulation.model_copy(update={"reward_info": _reward_info(one, simulation, domain)})
    now = datetime.now().isoformat()
    failed = RewardInfo(  # pyright: ignore[reportCallIssue] (its defaults are pydantic's)
        reward=0.0, reward_breakdown={}, info={"status": one.status}
    )
    return SimulationRun(
        id=one.rollout_id,
        task_id=one.task_id,
        start_time=now,
        end_time=now,
        duration=0.0,
        termination_reason=TerminationReason(_REASONS.get(one.status, "agent_error")),
        agent_cost=0.0,
        user_cost=0.0,
        reward_info=failed,
        messages=list(one.messages),
        trial=one.trial,
        seed=one.seed,
    )


def _reward_info(one: Played, simulation: Any, domain: str) -> Any:
    from tau2.data_model.simulation import RewardInfo
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    from components.envs.tau2_score import raised_in_assertion

    assert one.trajectory is not None
    try:
        info = evaluate_simulation(
            simulation=simulation,
            task=find_task(domain, one.task_id),
            evaluation_type=EvaluationType.ALL,
            solo_mode=one.trajectory.solo,
            domain=domain_data(domain).cached_name,
        )
    except Exception as error:
        if not raised_in_assertion(error):
            raise
        # The benchmark itself aborts here: an assertion met a database it does not expect.
        info = RewardInfo(  # pyright: ignore[reportCallIssue] (its defaults are pydantic's)
            reward=0.0, info={"evaluation_error": str(error)}
        )
    if float(info.reward) != one.official:
        raise ValueError(
            f"{one.rollout_id}: the official evaluator gives {info.reward}, recorded is "
            f"{one.official}"
        )
    return info.model_copy(update={"reward_breakdown": info.reward_breakdown or {}})
