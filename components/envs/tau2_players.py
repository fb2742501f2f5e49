"""Who sits in tau2's chairs: an agent driven from outside, our user simulators, nobody (solo).

Built at run time, because their base classes are tau2's and have other names in other packages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from components.envs.base import Message


class _Slot:
    """Says what was put into its slot, and waits for nothing."""

    turn: Any = None

    def get_init_state(self, message_history: Any = None) -> list:
        return list(message_history or [])

    def generate_next_message(self, message: Any, state: list) -> tuple[Any, list]:
        assert self.turn is not None, "the Orchestrator asked for a turn that is not there"
        turn, self.turn = self.turn, None
        return turn, state

    def set_seed(self, seed: int) -> None:
        pass


@functools.cache
def _agent_class() -> type:
    try:
        from tau2.agent.base_agent import HalfDuplexAgent as AgentBase  # type: ignore
    except ImportError:
        from tau2.agent.base import LocalAgent as AgentBase

    class SlotAgent(_Slot, AgentBase):  # type: ignore[misc]
        """Plays beside a user; never stops a run by itself."""

    return SlotAgent


@functools.cache
def _solo_agent_class() -> type:
    from tau2.agent.llm_agent import LLMSoloAgent

    class SlotSoloAgent(_Slot, LLMSoloAgent):  # type: ignore[misc]
        """Works a ticket alone and stops the run with ``done``, as the official solo agent does."""

        def generate_next_message(self, message: Any, state: list) -> tuple[Any, list]:
            turn, state = super().generate_next_message(message, state)
            return self._check_if_stop_toolcall(turn) if turn.tool_calls else turn, state

        def add_stop_tool(self) -> None:
            """Nobody reads the tools of this agent."""

        def validate_tools(self) -> None:
            pass

    return SlotSoloAgent


@functools.cache
def _text_user_class() -> type:
    from tau2.data_model.message import UserMessage
    from tau2.user.user_simulator import UserSimulator

    class TextUser(UserSimulator):
        """Lets one of our user simulators (agent text in, user text out) sit in tau2's place."""

        def __init__(self, simulator: Any) -> None:
            super().__init__(llm=None)
            self.simulator = simulator

        def get_init_state(self, message_history: Any = None) -> list:  # type: ignore[override]
            return list(message_history or [])

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            text = self.simulator.reply(message.content)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"expected text from the user, got {text!r}")
            return UserMessage(role="user", content=text, cost=0.0), state

        def set_seed(self, seed: int) -> None:
            if hasattr(self.simulator, "set_seed"):
                self.simulator.set_seed(seed)

    return TextUser


@functools.cache
def _acting_user_class() -> type:
    from tau2.data_model.message import ToolCall, UserMessage

    class ActingUser(_text_user_class()):  # type: ignore[misc]
        """The same for a user that acts: it answers a text, or the results of its own calls."""

        def __init__(self, simulator: Any) -> None:
            super().__init__(simulator)
            self.num_calls = 0

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            if message.role == "tool":
                results = getattr(message, "tool_messages", None) or [message]
                turn = self.simulator.act([result.content for result in results])
            else:
                turn = self.simulator.act(message.content)
            if isinstance(turn, str):
                return UserMessage(role="user", content=turn, cost=0.0), state
            assert turn, "expected text or calls from the user"
            calls = []
            for call in turn:
                calls.append(
                    ToolCall(
                        id=f"user_{self.num_calls}",
                        name=call.name,
                        arguments=dict(call.arguments),
                        requestor="user",
                    )
                )
                self.num_calls += 1
            return UserMessage(role="user", tool_calls=calls, cost=0.0), state

    return ActingUser


def make_agent(environment: Any) -> Any:
    """The agent of a run with a user."""
    # Nobody reads the agent's tools here, and building them takes 10 ms.
    return _agent_class()(tools=[], domain_policy=environment.policy)


def make_solo_agent(environment: Any, task: Any) -> Any:
    """The agent of a run without a user."""
    policy = environment.policy
    return _solo_agent_class()(tools=[], domain_policy=policy, task=task, llm=None)


def plays_solo(task: Any) -> bool:
    """Whether the official solo agent takes a task: it has a ticket, and nobody has spoken yet."""
    return task.ticket is not None and _solo_agent_class().check_valid_task(task)


def solo_tools() -> Sequence[Any]:
    """tau2's own tools of a solo agent beside the environment's: ``done``."""
    from tau2.agent.llm_agent import LLMSoloAgent

    agent = LLMSoloAgent.__new__(LLMSoloAgent)
    agent.tools = []
    agent.add_stop_tool()
    return agent.tools


def seat_user(user: Any) -> Any:
    """A user as tau2's: one of its own as it is, one of ours behind an adaptor."""
    if user is None:
        from tau2.user.user_simulator import DummyUser

        return DummyUser()
    if hasattr(user, "generate_next_message"):
        return user
    return (_acting_user_class() if hasattr(user, "act") else _text_user_class())(user)


def solo_refusal(message: Message) -> str | None:
    """Why a turn of a solo agent cannot be delivered: the official run would crash on it."""
    named = any(call.name == "done" for call in message.tool_calls)
    if message.tool_calls and not named and "###STOP###" in message.content:
        return "to stop, call done alone; do not write ###STOP### beside another call"
    return None
