"""An environment whose episodes are long: an archive that is read page by page.

Every call is answered with a page of words, and the episode ends after ``num_calls`` calls. Plain
Python: the workers import it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import gymnasium

from components.envs.base import Message, Reward, Task, ToolCall, ToolSpec, Trajectory

_WORDS = """
account address agent amount answer arrival balance bill box branch brand cable card carrier case
change claim client code colour copy cost credit date day delay delivery desk detail discount door
email error exchange fee file form gift goods group house invoice item label lamp letter line list
month name note number office order page paper parcel part payment phone place plan price proof
"""
WORDS = tuple(_WORDS.split())
"""64 of them; the tokenizer of ``long_model`` has one id for each, with the space before it."""
READ_PAGE = ToolSpec(
    name="read_page",
    description="Read a page of the archive.",
    parameters={
        "type": "object",
        "properties": {
            "page": {"type": "integer", "minimum": 0, "maximum": 9},
            "note": {"type": "string", "description": "What it is read for."},
        },
        "required": ["page", "note"],
    },
)
POLICY = "You keep an archive of ten pages. Read as many as you are asked to, one at a time. " * 8


class ArchiveEnv(gymnasium.Env):
    """Asks for ``num_calls`` readings; each returns ``words_per_page`` words."""

    def __init__(self, *, checker: Any, num_calls: int, words_per_page: int) -> None:
        self.checker = checker
        self.num_calls, self.words_per_page = num_calls, words_per_page
        self.task: Task | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        task_id = str((options or {}).get("task_id", "archive_0"))
        if not task_id.startswith("archive_"):
            raise ValueError(f"task_id = {task_id!r}: must be archive_<number>")
        self.task = Task(id=task_id, domain="archive", split="train")
        self.words = random.Random(f"{task_id}/{seed}")
        self.messages = [Message(role="user", content=f"Read {self.num_calls} pages, please.")]
        self.num_read = self.num_errors = 0
        first = tuple(self.messages)
        return _shown(first), {"messages": first, "system_prompt": POLICY, "tools": (READ_PAGE,)}

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.task is None:
            raise gymnasium.error.ResetNeeded("call reset first")
        turn = Message(role="assistant", content=action) if isinstance(action, str) else action
        if len(turn.tool_calls) != 1:
            why = "Error: one call in each turn, and no other text"
            reply = (Message(role="tool", content=why, error=True),)
            if not turn.content.strip():
                return _shown(reply), 0.0, False, False, {"messages": reply, "refused": why}
            self.messages.append(turn)
            return self._end("agent_stop")
        reply = self._read(turn.tool_calls[0])
        self.messages += [turn, reply]
        if self.num_read == self.num_calls:
            return self._end("agent_stop")
        return _shown((reply,)), 0.0, False, False, {"messages": (reply,)}

    def _read(self, call: ToolCall) -> Message:
        page = call.arguments.get("page")
        if call.name != READ_PAGE.name or not isinstance(page, int) or not 0 <= page <= 9:
            self.num_errors += 1
            return Message(
                role="tool", content="Error: no such page", tool_call_id=call.id, error=True
            )
        self.num_read += 1
        text = "".join(f" {word}" for word in self.words.choices(WORDS, k=self.words_per_page))
        return Message(role="tool", content=f"{page}:{text}", tool_call_id=call.id)

    def _end(self, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert self.task is not None
        trajectory = Trajectory(
            task=self.task,
            messages=tuple(self.messages),
            termination_reason=reason,
            num_steps=self.num_read,
            num_tool_errors=self.num_errors,
        )
        self.task, reward = None, self.checker(trajectory)
        info = {"messages": (), "reward": reward, "trajectory": trajectory}
        return "[]", reward.value, True, False, info


class MeanPage:
    """The mean of the pages that were read, over 9: it differs between rollouts that chose others.

    A random model can be rewarded for it, and every call of the episode has its share in it.
    """

    def __call__(self, trajectory: Trajectory) -> Reward:
        calls = [call for message in trajectory.messages for call in message.tool_calls]
        pages = [call.arguments["page"] for call in calls]
        value = sum(pages) / (9 * len(pages)) if pages else 0.0
        done = float(bool(pages) and trajectory.num_steps == len(pages))
        return Reward(value=value, breakdown={"official": done, "strict": done, "pages": value})


class Archives(list):
    """Tasks ``archive_0``..., a sequence that is its own ``tasks``."""

    def __init__(self, *, number: int) -> None:
        super().__init__(
            Task(id=f"archive_{i}", domain="archive", split="train") for i in range(number)
        )
        self.tasks = self


def _shown(messages: tuple[Message, ...]) -> str:
    return json.dumps([{"role": m.role, "content": m.content} for m in messages])
