"""The types and protocols between an environment, its user simulator and its reward checker.

Nothing here imports torch: writing an environment takes plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of a benchmark: what a group of rollouts starts from."""

    id: str
    """Identifier inside its domain, e.g. ``"42"``."""
    domain: str
    """Benchmark domain, e.g. ``"retail"``."""
    split: str
    """``"train"``, ``"test"`` or ``"all"``: the split that it was drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What the agent is told of one tool."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments (an object)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool by the agent."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation, as the agent sees it."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only on assistant messages."""
    tool_call_id: str = ""
    """Only on tool messages: the id of the call that this answers."""
    tool_name: str = ""
    """Only on tool messages: the tool that answers. The episode knows it by the call's id; an
    environment may leave it empty."""
    error: bool = False
    """Only on tool messages: whether the tool refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """An episode that has ended, in the benchmark's own terms: what a reward checker reads."""

    task: Task
    messages: tuple[Message, ...]
    """Every message the agent could see, the greeting included."""
    termination_reason: str
    """The benchmark's own word: ``user_stop``, ``max_steps``, ``too_many_errors``..."""
    num_steps: int
    """Deliveries, as the benchmark counts them."""
    num_tool_errors: int
    official: Any = None
    """The benchmark's own record of the run (for tau2 a ``SimulationRun``)."""
    solo: bool = False
    """Whether there was no user: the agent worked a ticket alone."""
    outcome: Mapping[str, float] | None = None
    """The benchmark's components of the reward, measured where the run ended and as if it had come
    to a scored end; None where they must be found by executing the record again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of one trajectory and what it is made of."""

    value: float
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """Every component by name, ``official`` and ``strict`` among them."""


class UserError(RuntimeError):
    """The user simulator failed: the episode says nothing about the agent and is never reward 0."""


class UserSimulator(Protocol):
    """Who plays the user. It never sees the agent's tool calls."""

    def reply(self, agent_text: str) -> str:
        """The user's next message; a stop token of the benchmark in it ends the episode."""
        ...


class ActingUserSimulator(Protocol):
    """A user with tools of its own (telecom); the agent sees what it says, not what it does."""

    def act(self, heard: str | list[str]) -> str | Sequence[ToolCall]:
        """The user's next turn.

        Args:
            heard: the agent's text, or what the user's own last calls gave, in their order.

        Returns:
            A text for the agent, or calls of the user's tools.
        """
        ...


class UserMaker(Protocol):
    """Makes the user of each episode where the user must know the episode's environment."""

    def make_user(self, task: Any, environment: Any) -> Any:
        """The user of one episode.

        Args:
            task: the benchmark's own task.
            environment: the benchmark's own environment of the episode. Do not change it.
        """
        ...


class RewardChecker(Protocol):
    """Scores an ended trajectory. Swap it to change the training reward."""

    def __call__(self, trajectory: Trajectory) -> Reward: ...


class Env(Protocol):
    """The part of ``gymnasium.Env`` that the rollout workers use.

    ``reset`` and ``step`` return Gymnasium's tuples. The observation is the JSON text of the new
    messages; ``info["messages"]`` holds the same as a tuple of :class:`Message`. ``reset`` also
    gives ``info["system_prompt"]`` (str) and ``info["tools"]`` (tuple of :class:`ToolSpec`).
    ``info["refused"]`` is why a turn was not delivered (a text; empty when it was). When an episode
    ends, ``info["reward"]`` is its :class:`Reward` and ``info["trajectory"]`` its
    :class:`Trajectory`.
    """

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the task ``options["task_id"]``.

        ``options["domain"]`` is its domain, for an environment that has several.
        """
        ...

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Deliver an assistant message (text, or a :class:`Message` with tool calls)."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
