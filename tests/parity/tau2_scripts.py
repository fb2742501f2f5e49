"""Fixed agent turns for tau2 runs, and the same run by the official Orchestrator.

A script is a list of turns; a turn is a text or a list of (tool name, arguments). The agent plays
it whatever it hears, so two implementations of the protocol can be compared turn by turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

Turn = str | list[tuple[str, dict[str, Any]]]

FILLER = "Is there anything else?"


def gold_script(task: Any) -> list[Turn]:
    """The gold actions, one call a turn, then all that is to be told."""
    criteria = task.evaluation_criteria
    turns: list[Turn] = [
        [(action.name, dict(action.arguments))] for action in (criteria.actions or [])
    ]
    return [*turns, "Done: " + " ; ".join(criteria.communicate_info or ["all"])]


def random_script(task: Any, tool_names: list[str], seed: int) -> list[Turn]:
    """Right calls, calls with wrong names and arguments, several calls a turn, texts."""
    rng = random.Random(f"{task.id}/{seed}")
    gold = [(a.name, dict(a.arguments)) for a in (task.evaluation_criteria.actions or [])]

    def call() -> tuple[str, dict[str, Any]]:
        kind = rng.random()
        if gold and kind < 0.5:
            return rng.choice(gold)
        if kind < 0.65:
            return "no_such_tool", {"x": 1}
        name = rng.choice(tool_names)
        wrong = ({}, {"order_id": "#W0"}, {"user_id": "nobody", "title": "T"}, {"self": 1})
        if gold and kind < 0.8:  # a gold call's arguments under another name, or cut
            return name, dict(rng.choice(gold)[1])
        return name, dict(rng.choice(wrong))

    turns: list[Turn] = []
    for _ in range(12):
        kind = rng.random()
        if kind < 0.3:
            turns.append(rng.choice(["###STOP###", "One moment, please.", "{}\n\u00e9"]))
        else:
            turns.append([call() for _ in range(1 if kind < 0.8 else rng.randint(2, 3))])
    return turns


def user_text(index: int, num_replies: int) -> str:
    """What the user says: the same few words, then a stop."""
    return f"Please go on ({index})." if index < num_replies - 1 else "Yes, thanks. ###STOP###"


class TextUser:
    """A user of ours with fixed texts."""

    def __init__(self, num_replies: int) -> None:
        self.num_replies = num_replies
        self.index = -1

    def reply(self, agent_text: str) -> str:
        assert isinstance(agent_text, str)
        assert agent_text
        self.index += 1
        return user_text(self.index, self.num_replies)


def official_run(
    *, domain: str, task: Any, script: Sequence[Turn], num_replies: int, max_steps: int
) -> tuple[Any, Any]:
    """Play a script with tau2's own classes alone.

    Returns:
        (Orchestrator after ``run()``, its SimulationRun).
    """
    from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
    from tau2.orchestrator.orchestrator import Orchestrator
    from tau2.registry import registry
    from tau2.user.user_simulator import UserSimulator

    try:
        from tau2.agent.base import LocalAgent as AgentBase
    except ImportError:  # upstream 1.0
        from tau2.agent.base_agent import HalfDuplexAgent as AgentBase  # type: ignore

    class Agent(AgentBase):  # type: ignore[misc]
        played = 0
        calls = 0

        def get_init_state(self, message_history=None):
            return []

        def set_seed(self, seed):
            pass

        def generate_next_message(self, message, state):
            turn = script[self.played] if self.played < len(script) else FILLER
            self.played += 1
            if isinstance(turn, str):
                return AssistantMessage(role="assistant", content=turn), state
            calls = []
            for name, arguments in turn:
                call_id = f"call_{self.calls}"
                self.calls += 1
                calls.append(
                    ToolCall(id=call_id, name=name, arguments=arguments, requestor="assistant")
                )
            return AssistantMessage(role="assistant", tool_calls=calls), state

    class User(UserSimulator):
        index = -1

        def get_init_state(self, message_history=None):
            return []

        def set_seed(self, seed):
            pass

        def generate_next_message(self, message, state):
            self.index += 1
            return UserMessage(role="user", content=user_text(self.index, num_replies)), state

    environment = registry.get_env_constructor(domain)()
    orchestrator = Orchestrator(
        domain=domain,
        agent=Agent(tools=environment.get_tools(), domain_policy=environment.policy),
        user=User(llm=None),
        environment=environment,
        task=task,
        max_steps=max_steps,
        max_errors=10,
        seed=3,
    )
    return orchestrator, orchestrator.run()


def our_run(*, domain: str, task_id: str, script: Sequence[Turn], num_replies: int, max_steps: int):
    """Play a script in our environment.

    Returns:
        (environment at the end of the episode, last answer of ``step``).
    """
    from components.envs.base import Message, ToolCall
    from components.envs.tau2 import Tau2Env

    env = Tau2Env(domain=domain, user=lambda task: TextUser(num_replies), max_steps=max_steps)
    env.reset(seed=3, options={"task_id": task_id})
    calls, played, end = 0, 0, None
    while end is None:
        turn = script[played] if played < len(script) else FILLER
        played += 1
        action: str | Message = turn if isinstance(turn, str) else ""
        if not isinstance(turn, str):
            made = []
            for name, arguments in turn:
                made.append(ToolCall(id=f"call_{calls}", name=name, arguments=arguments))
                calls += 1
            action = Message(role="assistant", tool_calls=tuple(made))
        answer = env.step(action)
        if answer[2] or answer[3]:
            end = answer
    return env, end
