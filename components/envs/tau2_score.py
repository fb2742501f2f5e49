"""The official components of a run that has just ended, read off its live environment.

tau2's evaluator builds two environments from their files, replays the whole run in one and the
gold actions in the other, and hashes both: 0.2 to 0.6 s of CPU for retail. The live environment
already is what the replay would make, and the gold one depends on the task alone. The rest (what
counts, and how it is multiplied) is the official code's. tests/parity compares the two on every
task.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from components.envs.tau2_data import domain_data, find_task
from components.envs.tau2_records import digest

KNOWN = {"DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE", "NL_ASSERTION"}


def outcome(
    *, domain: str, task_id: str, environment: Any, messages: Sequence[Any]
) -> dict[str, float] | None:
    """The official components, as if the run had come to a scored end.

    Args:
        domain: tau2's name of the domain.
        task_id: of the task.
        environment: as the run left it, made by :attr:`DomainData.build`.
        messages: the run's official messages.

    Returns:
        ``official`` (the product that the task asks for), ``db``, ``communicate``, ``action`` and
        ``env_assertion``; ``{"official": 0.0, "evaluation_error": 1.0}`` where an assertion raises.
        None where only the official evaluator will do: the task is judged by a model, or by what
        this code does not know.
    """
    criteria = find_task(domain, task_id).evaluation_criteria
    if criteria is None:
        return _parts(official=1.0)
    basis = {part.value for part in criteria.reward_basis}
    if basis - KNOWN or ("NL_ASSERTION" in basis and criteria.nl_assertions):
        return None
    if criteria.actions is None and criteria.env_assertions is None:
        parts = {"db": 1.0, "env_assertion": 1.0}
    else:
        try:
            parts = {
                "db": _same_databases(domain, task_id, environment),
                "env_assertion": all_met(
                    environment.run_env_assertion(assertion, raise_assertion_error=False)
                    for assertion in criteria.env_assertions or ()
                ),
            }
        except Exception as error:
            if not raised_in_assertion(error):
                raise
            # The benchmark itself aborts here: an assertion met a database it does not expect.
            return {"official": 0.0, "evaluation_error": 1.0}
    parts |= _said_and_done(find_task(domain, task_id), messages)
    official = 1.0
    for name in basis - {"NL_ASSERTION"}:  # without assertions it is met, and no model is asked
        official *= parts[name.lower()]
    return _parts(official=official, **parts)


def _parts(*, official: float, **parts: float) -> dict[str, float]:
    met = dict.fromkeys(("communicate", "action", "env_assertion"), 1.0)
    return {"official": official, **met, **parts}


def _same_databases(domain: str, task_id: str, environment: Any) -> float:
    live = [digest(kit and kit.db) for kit in (environment.tools, environment.user_tools)]
    return float(live == gold_digests(domain, task_id))


@functools.lru_cache(maxsize=4096)
def gold_digests(domain: str, task_id: str) -> list[Any]:
    """Both databases after the gold actions, as the official evaluator runs them."""
    task = find_task(domain, task_id)
    environment = domain_data(domain).build()
    initial = task.initial_state
    environment.set_state(
        initialization_data=initial and initial.initialization_data,
        initialization_actions=initial and initial.initialization_actions,
        message_history=(initial and initial.message_history) or [],
    )
    for action in task.evaluation_criteria.actions or ():
        try:
            environment.make_tool_call(
                tool_name=action.name, requestor=action.requestor, **action.arguments
            )
        except Exception:  # the official evaluator ignores gold actions that fail
            continue
    return [digest(kit and kit.db) for kit in (environment.tools, environment.user_tools)]


def _said_and_done(task: Any, messages: Sequence[Any]) -> dict[str, float]:
    from tau2.evaluator.evaluator_action import ActionEvaluator
    from tau2.evaluator.evaluator_communicate import CommunicateEvaluator

    trajectory = list(messages)
    told = CommunicateEvaluator.calculate_reward(task=task, full_trajectory=trajectory)
    acted = ActionEvaluator.calculate_reward(task=task, full_trajectory=trajectory)
    return {"communicate": told.reward, "action": acted.reward}


def all_met(checks: Iterable[bool]) -> float:
    """1.0 if every check is met, the later ones made whether or not the earlier ones are."""
    return 1.0 if all(list(checks)) else 0.0


def raised_in_assertion(error: BaseException) -> bool:
    """Whether an error came out of one of the benchmark's assertions on the environment."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "run_env_assertion" for frame in frames)
