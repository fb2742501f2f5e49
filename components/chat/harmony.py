"""Harmony, the chat format of gpt-oss, on the ``tokenizers`` package alone.

A conversation looks like this, with the control tokens written out (line breaks between messages
are for the reader; there are none)::

    <|start|>system<|message|>You are ChatGPT, ...<|end|>
    <|start|>developer<|message|># Instructions ... # Tools ...<|end|>
    <|start|>user<|message|>Where is my order?<|end|>
    <|start|>assistant<|channel|>analysis<|message|>I must look it up.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_order <|constrain|>json<|message|>
    {"order_id":"#W1"}<|call|>
    <|start|>functions.get_order to=assistant<|channel|>commentary<|message|>pending<|end|>
    <|start|>assistant<|channel|>final<|message|>It is pending.<|return|>

A sampled turn is what follows ``<|start|>assistant``: any number of messages, the last of which a
stop id ends, ``<|call|>`` after a call and ``<|return|>`` otherwise. ``<|end|>`` stops nothing.

Source: https://github.com/openai/harmony, docs/format.md. Because the ledger only appends (sampled
ids stay as they were sampled), two habits of that guide are left out:

- A sampled turn of the past keeps its ``<|return|>``; the guide puts ``<|end|>`` in its place. (An
  assistant's text that nobody sampled, such as a fixed greeting, does end with ``<|end|>``.)
- Analysis of turns that ended with a final message stays in the context; the guide drops it.

Text of the system prompt, the users and the tools is encoded with every added token of the
tokenizer switched off: ``<|end|>`` inside a tool result is plain text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from components.chat.base import ParsedTurn, Rendered, joined
from components.chat.harmony_parse import CONTROL, read_turn
from components.chat.tokenizer import load_tokenizer
from components.chat.typescript import tools_section
from components.envs.base import Message, ToolSpec
from components.rollout.types import Author

ReasoningEffort = Literal["low", "medium", "high"]

_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS = (
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_TOOLS_CHANNEL = "Calls to these tools must go to the commentary channel: 'functions'."


class HarmonyRenderer:
    """The ``Renderer`` of gpt-oss.

    Args:
        tokenizer_dir: directory with ``tokenizer.json``, or the path of that file; any tokenizer
            with harmony's special tokens will do.
        reasoning_effort: how much thinking the system message asks for.
        current_date: the date in the system message, ``YYYY-MM-DD``; empty leaves the line out, so
            that a run does not depend on the day it is started.

    Raises:
        FileNotFoundError: there is no ``tokenizer.json``.
        ValueError: an unknown ``reasoning_effort``, or a tokenizer without harmony's tokens.
    """

    def __init__(
        self,
        tokenizer_dir: str | Path,
        *,
        reasoning_effort: ReasoningEffort = "medium",
        current_date: str = "",
    ) -> None:
        if reasoning_effort not in get_args(ReasoningEffort):
            allowed = get_args(ReasoningEffort)
            raise ValueError(f"reasoning_effort={reasoning_effort!r}: allowed are {allowed}")
        self.reasoning_effort: ReasoningEffort = reasoning_effort
        self.current_date = current_date
        self._chat = load_tokenizer(tokenizer_dir)
        ids = {token: self._chat.special_id(token, format_name="harmony") for token in CONTROL}
        self._start, self._end = ids["<|start|>"], ids["<|end|>"]
        self._message, self._channel = ids["<|message|>"], ids["<|channel|>"]
        self._constrain = ids["<|constrain|>"]
        self._return, self._call = ids["<|return|>"], ids["<|call|>"]
        self._names = {number: token for token, number in self._chat.special.items()}
        self.stop_ids = frozenset({self._return, self._call})
        self.vocab_size = self._chat.tokenizer.get_vocab_size(with_added_tokens=True)

    def render_system(self, system_prompt: str, tools: Sequence[ToolSpec]) -> Rendered:
        """The system and the developer message: shared by every rollout of a domain."""
        date = f"\nCurrent date: {self.current_date}" if self.current_date else ""
        system = f"{_IDENTITY}{date}\n\nReasoning: {self.reasoning_effort}\n\n{_CHANNELS}" + (
            f"\n{_TOOLS_CHANNEL}" if tools else ""
        )
        developer = f"# Instructions\n\n{system_prompt}"
        if tools:
            developer += f"\n\n{tools_section(tools)}"
        return joined(
            [
                self._turn(["system"], system, Author.SYSTEM),
                self._turn(["developer"], developer, Author.SYSTEM),
            ]
        )

    def render_observation(
        self, messages: Sequence[Message], *, after_turn: bool, closed: bool = True
    ) -> Rendered:
        """New messages and the generation prompt; see ``Renderer.render_observation``.

        A tool result names its tool (``Message.tool_name``); one that answers no call, such as the
        word that a turn could not be read, comes from ``functions``.
        """
        parts: list[tuple[list[int], list[int]]] = []
        if after_turn and not closed:
            parts.append(self._template(self._end))
        for message in messages:
            if message.role == "tool":
                name = f"functions.{message.tool_name}" if message.tool_name else "functions"
                header = (f"{name} to=assistant", self._channel, "commentary")
                parts.append(self._turn(header, message.content, Author.TOOL))
            elif message.role == "assistant":  # a fixed greeting: not sampled, never trained
                parts.append(self._template(self._start, "assistant"))
                parts.append(self._template(*self._assistant(message, sampled=False)))
            else:
                role = "developer" if message.role == "system" else message.role
                author = Author.USER if role == "user" else Author.SYSTEM
                parts.append(self._turn([role], message.content, author))
        parts.append(self._template(self._start, "assistant"))
        return joined(parts)

    def render_assistant(self, message: Message) -> tuple[int, ...]:
        """The ids a policy would have sampled for ``message``, stop id included.

        Raises:
            ValueError: not an assistant's message, or several calls in it: a turn ends with its
                first ``<|call|>``.
        """
        if message.role != "assistant":
            raise ValueError(f"render_assistant takes an assistant message, got {message.role!r}")
        if len(message.tool_calls) > 1:
            names = [call.name for call in message.tool_calls]
            raise ValueError(f"a harmony turn ends with its first call, so it cannot make {names}")
        return tuple(self._encode(self._assistant(message, sampled=True)))

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Read a sampled turn: text, one tool call, or both.

        Text is what the user may read: the final message and preambles (commentary to nobody).
        Analysis is not part of the message. The ids are read, never changed: the ledger keeps the
        turn as it was sampled.
        """
        pieces: list[tuple[str, list[int]]] = [("<|start|>", self._chat.encode("assistant"))]
        for token in ids:
            if token in self._names:
                pieces.append((self._names[token], []))
            else:
                pieces[-1][1].append(token)
        try:
            message = read_turn([(name, self._chat.decode(text)) for name, text in pieces])
        except ValueError as error:
            return ParsedTurn(message=None, error=str(error))
        return ParsedTurn(message=message)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens shown."""
        return self._chat.decode(list(ids))

    def _encode(self, pieces: Sequence[str | int]) -> list[int]:
        """Control tokens are ids; a str is text, even where it reads like a control token."""
        ids: list[int] = []
        for piece in pieces:
            ids += [piece] if isinstance(piece, int) else self._chat.encode(piece)
        return ids

    def _template(self, *pieces: str | int) -> tuple[list[int], list[int]]:
        ids = self._encode(pieces)
        return ids, [int(Author.TEMPLATE)] * len(ids)

    def _turn(
        self, header: Sequence[str | int], content: str, author: Author
    ) -> tuple[list[int], list[int]]:
        """<|start|>header<|message|>content<|end|>: ids, and authors (one for the content)."""
        before = self._encode([self._start, *header, self._message])
        body = self._chat.encode(content)
        template = int(Author.TEMPLATE)
        authors = [template] * len(before) + [int(author)] * len(body) + [template]
        return [*before, *body, self._end], authors

    def _assistant(self, message: Message, *, sampled: bool) -> list[str | int]:
        """What follows ``<|start|>assistant`` for a message, its text before its calls."""
        messages: list[list[str | int]] = []
        if message.content or not message.tool_calls:
            channel = "commentary" if message.tool_calls else "final"
            end = self._return if sampled and not message.tool_calls else self._end
            messages.append([self._channel, channel, self._message, message.content, end])
        for call in message.tool_calls:
            header = [self._channel, f"commentary to=functions.{call.name} ", self._constrain]
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False, separators=(",", ":"))
            messages.append([*header, "json", self._message, arguments, self._call])
        pieces = messages[0]
        for more in messages[1:]:
            pieces += [self._start, "assistant", *more]
        return pieces
