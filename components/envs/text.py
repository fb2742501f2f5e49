"""Conversations in plain text, such as other packages have, as an environment.

What :class:`components.envs.base.Env` asks for beyond turns and rewards is here once: a package is
wrapped by saying how an episode starts and what a turn gives (:class:`TextGame`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import gymnasium

from components.envs.base import Message, RewardChecker, Task, Trajectory
from components.envs.spaces import Text
from components.envs.tau2_messages import messages_json


class TextGame(Protocol):
    """One conversation at a time, without tools: the agent writes, the other side answers."""

    @property
    def tasks(self) -> Mapping[str, Task]:
        """What can be played, by id."""
        ...

    def start(self, task_id: str) -> Sequence[Message]:
        """Start a task; gives the first messages, one of the system in front."""
        ...

    def say(self, text: str) -> tuple[Sequence[Message], float, bool]:
        """Deliver the agent's text; gives the replies, this turn's reward, and whether it ends."""
        ...

    def close(self) -> None:
        """Free what the task that was started last holds; called once for each start."""
        ...


class TextEnv(gymnasium.Env):
    """A :class:`TextGame` behind the protocol of environments.

    A trajectory's ``official`` is the tuple of the turns' rewards, its termination reason
    ``game_over``. A blank turn and a call of a tool are refused; the game does not hear of them.
    """

    def __init__(self, *, game: TextGame, checker: RewardChecker) -> None:
        """Wrap a game.

        Args:
            game: a game of its own, no other environment's.
            checker: scores an ended trajectory.
        """
        self.game, self.checker = game, checker
        self.observation_space, self.action_space = Text(), Text(messages=True)
        self._task: Task | None = None
        self._said: list[Message] = []
        self._rewards: list[float] = []

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start ``options["task_id"]``, or a task that the seed draws.

        Raises:
            ValueError: there is no such task, or its first message is not of the system.
        """
        super().reset(seed=seed)
        ids = list(self.game.tasks)
        task_id = (options or {}).get("task_id")
        if task_id is None:
            task_id = ids[int(self.np_random.integers(len(ids)))]
        if task_id not in self.game.tasks:
            raise ValueError(f"task_id = {task_id!r}: must be one of {len(ids)}, e.g. {ids[0]!r}")
        self.close()
        first, *messages = self.game.start(task_id)
        self._task = self.game.tasks[task_id]
        if first.role != "system" or not first.content:
            raise ValueError(f"task {task_id!r}: its first message must be a text of the system")
        self._said, self._rewards = messages, []
        info = {
            "messages": tuple(messages),
            "system_prompt": first.content,
            "tools": (),
            "task": self._task,
        }
        return messages_json(info["messages"]), info

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Deliver a turn; the episode's reward comes at its end."""
        if self._task is None:
            raise gymnasium.error.ResetNeeded("step needs a running episode: call reset first")
        turn = Message(role="assistant", content=action) if isinstance(action, str) else action
        if turn.tool_calls or not turn.content.strip():
            why = "Error: write a text; there is no tool to call"
            answers = tuple(
                Message(role="tool", content=why, tool_call_id=call_id, error=True)
                for call_id in [call.id for call in turn.tool_calls] or [""]
            )
            info: dict[str, Any] = {"messages": answers, "refused": why}
            return messages_json(answers), 0.0, False, False, info
        replies, reward, over = self.game.say(turn.content)
        self._said += [turn, *replies]
        self._rewards.append(float(reward))
        info = {"messages": tuple(replies), "refused": ""}
        if not over:
            return messages_json(info["messages"]), 0.0, False, False, info
        info["trajectory"] = Trajectory(
            task=self._task,
            messages=tuple(self._said),
            termination_reason="game_over",
            num_steps=len(self._rewards),
            num_tool_errors=0,
            official=tuple(self._rewards),
        )
        info["reward"] = self.checker(info["trajectory"])
        self.close()
        return messages_json(info["messages"]), float(info["reward"].value), True, False, info

    def close(self) -> None:
        """End the episode, if one is running."""
        if self._task is not None:
            self._task = None
            self.game.close()
