"""What every chat format offers: rendering that only appends, and parsing of sampled turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from components.envs.base import Message, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Token ids and, for each, who wrote it (an ``Author`` value of rollout/types.py)."""

    ids: tuple[int, ...]
    authors: tuple[int, ...]


def joined(parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rendered:
    """Pieces of (ids, authors) in their order."""
    return Rendered(
        ids=tuple(token for ids, _ in parts for token in ids),
        authors=tuple(int(author) for _, authors in parts for author in authors),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A sampled turn as a message, or why it is none."""

    message: Message | None
    error: str = ""
    """What to tell the model when it cannot be parsed; empty when ``message`` is set."""


class Renderer(Protocol):
    """A chat format bound to a tokenizer.

    Prefix stability holds by construction: a conversation's ids are ``render_system`` then any
    number of ``render_observation`` and sampled turns, each appended to what is there.
    """

    stop_ids: frozenset[int]
    """Ids that end a sampled turn."""
    vocab_size: int

    def render_system(self, system_prompt: str, tools: Sequence[ToolSpec]) -> Rendered:
        """The system turn with the tools in it: shared by every rollout of a domain."""
        ...

    def render_observation(
        self, messages: Sequence[Message], *, after_turn: bool, closed: bool = True
    ) -> Rendered:
        """New messages and the generation prompt.

        Args:
            messages: what the agent has not seen yet; an assistant message (a benchmark's fixed
                greeting) is rendered as untrained template text.
            after_turn: whether a sampled turn precedes (its separator is then rendered first).
            closed: whether that turn ended with a stop id; if not, a synthetic end token comes
                first (author template, never trained).
        """
        ...

    def render_assistant(self, message: Message) -> tuple[int, ...]:
        """The ids a policy would have sampled for ``message``, end token included."""
        ...

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Read a sampled turn (its stop id included or not)."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens shown."""
        ...
