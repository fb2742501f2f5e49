"""What an environment with tools of your own is made of: a game, its tasks, and their checker.

:class:`components.envs.tools.ToolEnv` plays it. CONTRIBUTING.md ("From tau2 to your own tools") has
one that is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from components.envs.base import Reward, Task, Trajectory


class ToolGame(Protocol):
    """One episode at a time: a state, functions on it, and a user."""

    @property
    def tasks(self) -> Mapping[str, Task]:
        """What can be played, by id."""
        ...

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:
        """The agent's tools, the same in every task.

        What it is told of them comes from their docstrings and type hints
        (:class:`components.envs.tool_functions.ToolFunctions`). A ValueError is how a tool says no:
        the agent reads its text. Look before you change the state, for what was changed before the
        error stays.
        """
        ...

    def start(self, task_id: str, *, seed: int) -> tuple[str, str]:
        """Start a task on a state of its own; gives the system prompt and the user's first words.

        ``seed`` is all the chance there may be: equal seeds and turns give an equal episode.
        """
        ...

    def say(self, text: str) -> tuple[str, bool]:
        """Tell the user a text of the agent; gives the answer, and whether the user leaves.

        The user does not see calls of tools, nor a text beside one. A UserError loses the episode.
        """
        ...

    def end_state(self) -> Any:
        """What the checker reads as ``official``: for :class:`FinalState` an :class:`EndState`.

        Called once, at the end; later episodes must not change it.
        """
        ...

    def close(self) -> None:
        """Free what the task that was started last holds; called once for each start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EndState:
    """The state at the end of an episode."""

    state: Any
    expected: Any
    """What ``state`` must be equal to."""


class FinalState:
    """1 if the user ended the episode with the state as expected, else 0; strict is the same.

    An episode that a limit ended earns nothing, as in tau2-bench.
    """

    def __call__(self, trajectory: Trajectory) -> Reward:
        end, ended = trajectory.official, trajectory.termination_reason == "user_stop"
        value = float(ended and end.state == end.expected)
        return Reward(value=value, breakdown={"official": value, "strict": value})


class GameTasks(list):
    """The tasks of a game as a dataset: a sequence that is its own ``tasks``."""

    def __init__(self, *, game: ToolGame, split: str) -> None:
        """Take the tasks of ``split``; ``"all"`` takes every one.

        Raises:
            ValueError: the game has none there.
        """
        every = list(game.tasks.values())
        super().__init__(task for task in every if split in ("all", task.split))
        if not self:
            splits = ", ".join(sorted({task.split for task in every} | {"all"}))
            raise ValueError(f"split = {split}: the game has no such task; must be one of {splits}")
        self.tasks = self
