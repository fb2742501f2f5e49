"""An agent with tools of your own, a user who asks for things, and a state that is checked.

What :class:`components.envs.base.Env` asks for is here once. A
:class:`components.envs.tool_game.ToolGame` says how a task starts, which Python functions are the
tools, and what the user answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium

from components.envs.base import Message, RewardChecker, Task, Trajectory, UserError
from components.envs.refusals import refusal
from components.envs.spaces import Text
from components.envs.tau2_messages import messages_json
from components.envs.tool_functions import ToolFunctions
from components.envs.tool_game import ToolGame


class ToolEnv(gymnasium.Env):
    """A :class:`ToolGame` behind the protocol of environments.

    A trajectory's ``official`` is the game's ``end_state()``. It ends with ``user_stop`` when the
    user leaves, and is truncated with ``max_steps`` or ``too_many_errors``, the user's own end
    first. A turn with calls gets a tool message for each, in order.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(
        self,
        *,
        game: ToolGame,
        checker: RewardChecker,
        max_steps: int = 100,
        max_errors: int = 10,
        max_text_chars: int = 16_000,
    ) -> None:
        """Wrap a game.

        Args:
            game: a game of its own, no other environment's.
            checker: scores an ended trajectory.
            max_steps: deliveries after which an episode is truncated. A turn and what comes back
                are two, as in tau2-bench.
            max_errors: tool errors, over the episode, after which it is truncated.
            max_text_chars: longest text, and longest JSON of one call's arguments.

        Raises:
            ValueError: a setting is out of range, or a tool is not described.
        """
        limits = {"max_steps": max_steps, "max_errors": max_errors}
        for name, value in (limits | {"max_text_chars": max_text_chars}).items():
            if value < 1:
                raise ValueError(f"{name}: {value} must be above 0")
        self.game, self.checker = game, checker
        self._functions = ToolFunctions(game.tools)
        self._max_steps, self._max_errors = max_steps, max_errors
        self._max_text_chars = max_text_chars
        self.observation_space, self.action_space = Text(), Text(messages=True)
        self._task: Task | None = None
        self._said: list[Message] = []
        self._num_steps = self._num_tool_errors = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start ``options["task_id"]``, or a task that the seed draws.

        Raises:
            ValueError: there is no such task, or it starts without a prompt or words of the user.
        """
        super().reset(seed=seed)
        tasks = self.game.tasks
        task_id = (options or {}).get("task_id")
        if task_id is None:
            task_id = list(tasks)[int(self.np_random.integers(len(tasks)))]
        if task_id not in tasks:
            example = next(iter(tasks))
            raise ValueError(
                f"task_id = {task_id!r}: must be one of {len(tasks)}, e.g. {example!r}"
            )
        self.close()
        game_seed = int(self.np_random.integers(2**31)) if seed is None else seed
        prompt, words = self.game.start(task_id, seed=game_seed)
        self._task = tasks[task_id]
        if not prompt.strip() or not words.strip():
            raise ValueError(f"task {task_id!r}: start must give a system prompt and words, not ''")
        first = Message(role="user", content=words)
        self._said, self._num_steps, self._num_tool_errors = [first], 0, 0
        info = self._info((first,), refused="")
        info |= {"system_prompt": prompt, "tools": self._functions.specs, "task": self._task}
        return messages_json((first,)), info

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Deliver a turn; the episode's reward comes at its end.

        Raises:
            UserError: the user failed; the episode is lost, not scored. So it is with whatever a
                tool raises but a ValueError.
            gymnasium.error.ResetNeeded: without a running episode.
        """
        if self._task is None:
            raise gymnasium.error.ResetNeeded("step needs a running episode: call reset first")
        turn = Message(role="assistant", content=action) if isinstance(action, str) else action
        why = refusal(turn, max_text_chars=self._max_text_chars)
        if why is not None:
            answers = tuple(
                Message(role="tool", content=f"Error: {why}", tool_call_id=call_id, error=True)
                for call_id in [call.id for call in turn.tool_calls] or [""]
            )
            return messages_json(answers), 0.0, False, False, self._info(answers, refused=why)
        try:
            replies, left = self._deliver(turn)
        except BaseException:
            self.close()
            raise
        self._said += [turn, *replies]
        self._num_steps += 2
        self._num_tool_errors += sum(reply.error for reply in replies)
        info = self._info(replies, refused="")
        reason = self._end(left=left)
        if not reason:
            return messages_json(replies), 0.0, False, False, info
        info["trajectory"] = Trajectory(
            task=self._task,
            messages=tuple(self._said),
            termination_reason=reason,
            num_steps=self._num_steps,
            num_tool_errors=self._num_tool_errors,
            official=self.game.end_state(),
        )
        info["reward"] = self.checker(info["trajectory"])
        self.close()
        reward = float(info["reward"].value)
        return messages_json(replies), reward, left, not left, info

    def _deliver(self, turn: Message) -> tuple[tuple[Message, ...], bool]:
        """What comes back, and whether the user leaves."""
        if turn.tool_calls:
            return tuple(self._functions.call(call) for call in turn.tool_calls), False
        words, left = self.game.say(turn.content)
        if words.strip():
            return (Message(role="user", content=words),), left
        if not left:
            raise UserError("the user neither says anything nor leaves")
        return (), left

    def _end(self, *, left: bool) -> str:
        """Why the episode is over; empty while it goes on."""
        if left:
            return "user_stop"
        if self._num_tool_errors >= self._max_errors:
            return "too_many_errors"
        return "max_steps" if self._num_steps >= self._max_steps else ""

    def _info(self, messages: tuple[Message, ...], *, refused: str) -> dict[str, Any]:
        return {
            "messages": messages,
            "refused": refused,
            "num_steps": self._num_steps,
            "num_tool_errors": self._num_tool_errors,
        }

    def close(self) -> None:
        """End the episode, if one is running."""
        if self._task is not None:
            self._task = None
            self.game.close()
