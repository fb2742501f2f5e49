"""Checks that an environment keeps what :class:`components.envs.base.Env` promises.

For whoever writes an environment: each check says what it expected and what it found. Use it beside
``gymnasium.utils.env_checker.check_env``, which knows nothing of tools, refusals or breakdowns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from components.envs.base import Env, Message, Reward, ToolSpec, Trajectory

MAX_TURNS = 500


def check_env(
    env: Env,
    *,
    task_id: str,
    turns: Sequence[str | Message] = ("Hello.",),
    domain: str | None = None,
) -> None:
    """Play an episode and check every answer.

    Args:
        env: the environment; closed at the end.
        task_id: a task that it has.
        turns: agent turns, repeated until the episode ends.
        domain: of the task, for an environment that has several.

    Raises:
        ValueError: naming what was expected and what was found.
    """
    of_domain = {} if domain is None else {"domain": domain}
    options = {"task_id": task_id, **of_domain}
    first, info = _pair(env.reset(seed=7, options=options))
    _check_reset(first, info)
    again, _ = _pair(env.reset(seed=7, options=options))
    _expect(first == again, "the same first observation for the same seed", again)
    try:
        env.reset(seed=7, options={"task_id": "no such task", **of_domain})
    except ValueError:
        pass
    else:
        _expect(False, "ValueError for an unknown task_id", "no error")
    env.reset(seed=7, options=options)
    answer = _answer(env.step(""))
    _expect(bool(answer[4].get("refused")), "info['refused'] for a blank turn", answer[4])
    _expect(not (answer[2] or answer[3]), "an episode that goes on after a refusal", answer[2:4])
    for index in range(MAX_TURNS):
        observation, reward, terminated, truncated, info = _answer(
            env.step(turns[index % len(turns)])
        )
        _check_messages(observation, info)
        _expect(not (terminated and truncated), "one of terminated and truncated", "both")
        if terminated or truncated:
            _check_end(reward, info)
            break
        _expect(reward == 0.0, "reward 0 before the end", reward)
    else:
        _expect(False, f"an end within {MAX_TURNS} turns", "none")
    try:
        env.step("Hello?")
    except Exception:  # Gymnasium says ResetNeeded; any error will do
        pass
    else:
        _expect(False, "an error from step after the end", "no error")
    env.close()


def _expect(condition: bool, expected: str, found: Any) -> None:
    if not condition:
        raise ValueError(f"environment check: expected {expected}, found {str(found)[:300]}")


def _pair(value: Any) -> tuple[str, dict[str, Any]]:
    _expect(isinstance(value, tuple) and len(value) == 2, "(observation, info) from reset", value)
    return value


def _answer(value: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    _expect(isinstance(value, tuple) and len(value) == 5, "five values from step", value)
    _expect(isinstance(value[1], float), "a float reward", type(value[1]))
    _expect(isinstance(value[2], bool), "a bool terminated", type(value[2]))
    _expect(isinstance(value[3], bool), "a bool truncated", type(value[3]))
    return value


def _check_messages(observation: Any, info: dict[str, Any]) -> None:
    messages = info.get("messages")
    _expect(
        isinstance(messages, tuple) and all(isinstance(m, Message) for m in messages),
        "info['messages'], a tuple of Message",
        messages,
    )
    _expect(isinstance(observation, str), "an observation of type str", type(observation))
    shown = [(row["role"], row["content"]) for row in json.loads(observation)]
    told = [(m.role, m.content) for m in messages or ()]
    _expect(shown == told, "the JSON of info['messages'] as observation", observation)


def _check_reset(observation: Any, info: dict[str, Any]) -> None:
    _check_messages(observation, info)
    prompt, tools = info.get("system_prompt"), info.get("tools")
    _expect(isinstance(prompt, str) and bool(prompt), "info['system_prompt'], a text", prompt)
    _expect(
        isinstance(tools, tuple) and all(isinstance(tool, ToolSpec) for tool in tools),
        "info['tools'], a tuple of ToolSpec",
        tools,
    )
    for tool in tools or ():
        _expect(tool.parameters.get("type") == "object", f"an object schema of {tool.name}", tool)


def _check_end(reward: float, info: dict[str, Any]) -> None:
    given, trajectory = info.get("reward"), info.get("trajectory")
    _expect(isinstance(given, Reward), "info['reward'] at the end, a Reward", given)
    _expect(isinstance(trajectory, Trajectory), "info['trajectory'] at the end", trajectory)
    assert isinstance(given, Reward)
    _expect(given.value == reward, f"the step's reward {reward} in info['reward']", given.value)
    for name in ("official", "strict"):
        value = given.breakdown.get(name)
        found = value is not None and math.isfinite(value)
        _expect(found, f"a finite {name!r} in the reward's breakdown", given.breakdown)
