"""Gymnasium spaces for conversations."""

from __future__ import annotations

from typing import Any

import gymnasium

from components.envs.base import Message, ToolCall


class Text(gymnasium.Space):
    """Any string; as an action space, a :class:`Message` as well.

    ``gymnasium.spaces.Text`` refuses newlines, braces and whatever is not ASCII.
    """

    def __init__(
        self, *, messages: bool = False, calls: tuple[str, ...] = (), seed: int | None = None
    ) -> None:
        """Describe the space.

        Args:
            messages: whether a :class:`Message` is in it.
            calls: tools to draw samples from, where a text would end the episode (solo mode).
            seed: of the samples.
        """
        super().__init__(shape=None, dtype=None, seed=seed)
        self.messages = messages
        self.calls = calls

    def sample(self, mask: Any = None, probability: Any = None) -> str | Message:
        if self.calls:
            name = self.calls[int(self.np_random.integers(len(self.calls)))]
            call = ToolCall(id="sample", name=name, arguments={})
            return Message(role="assistant", tool_calls=(call,))
        return f"Could you tell me more about number {self.np_random.integers(100)}?"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) or (self.messages and isinstance(x, Message))

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and other.messages == self.messages

    def __repr__(self) -> str:
        return f"Text(messages={self.messages})"
