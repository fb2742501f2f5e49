"""Reading what a gpt-oss policy sampled: headers, channels, recipients, the call of a turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from components.chat.tool_calls import read_arguments
from components.envs.base import Message, ToolCall

CONTROL = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
"""The special tokens that the format is made of."""

_STOPS = ("<|return|>", "<|call|>")
_CHANNELS = ("analysis", "commentary", "final")
_NAMESPACE = "functions."
_SHAPES = (
    ["<|start|>", "<|channel|>", "<|message|>"],
    ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"],
)
_NO_START = "After <|end|> a new message must start with <|start|>assistant."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One message of a turn."""

    channel: str
    recipient: str
    """Empty, or what stands after ``to=``."""
    content_type: str
    content: str


def read_turn(pairs: Sequence[tuple[str, str]]) -> Message:
    """The message that a sampled turn stands for.

    Args:
        pairs: each control token of the turn with the text that follows it; the generation prompt
            ``<|start|>assistant`` comes first, the stop token last, if there is one.

    Returns:
        Text is the final message and the preambles (commentary to nobody) before it, joined by line
        breaks; the call, if there is one, is the turn's last message.

    Raises:
        ValueError: with what is wrong, in words for the model.
    """
    stop = pairs[-1][0] if pairs[-1][0] in _STOPS and not pairs[-1][1] else ""
    parts = [_part(pairs) for pairs in _split(pairs[:-1] if stop else pairs)]
    *before, last = parts
    if any(part.recipient or part.channel == "final" for part in before):
        raise ValueError("Nothing may follow a call or a final message in the same turn.")
    if stop == "<|call|>" and not last.recipient:
        raise ValueError("<|call|> may only end a call: to=functions.NAME is missing.")
    if stop == "<|return|>" and last.recipient:
        raise ValueError("A call must end with <|call|>, not with <|return|>.")
    calls = (_call(last),) if last.recipient else ()
    said = [part for part in parts if part.channel != "analysis" and not part.recipient]
    content = "\n".join(text for part in said if (text := part.content.strip()))
    if not content and not calls:
        raise ValueError(
            "Your turn says nothing. Write a message on the final channel or call a tool."
        )
    return Message(role="assistant", content=content, tool_calls=calls)


def _split(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The messages of a turn, ``<|end|>`` left out."""
    messages: list[list[tuple[str, str]]] = [[]]
    for control, text in pairs:
        if control != "<|end|>":
            messages[-1].append((control, text))
            continue
        if text:
            raise ValueError(_NO_START)
        messages.append([])
    return messages


def _part(pairs: Sequence[tuple[str, str]]) -> _Part:
    """One message: ``<|start|>header<|message|>content``."""
    controls, texts = [control for control, _ in pairs], [text for _, text in pairs]
    if not controls or controls[0] != "<|start|>":
        raise ValueError(_NO_START)
    if controls not in _SHAPES:
        raise ValueError(_shape_error(controls))
    role, *words = texts[0].split() or [""]
    channel, *more = texts[1].split() or [""]
    if role != "assistant":
        raise ValueError(f"You may only write messages of the assistant, not of {_short(role)}.")
    if channel not in _CHANNELS:
        raise ValueError(f"{_short(channel)} is no channel: use analysis, commentary or final.")
    words += more  # the recipient may stand in the role's part or in the channel's
    to = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    types = [word for word in words if not word.startswith("to=")]
    if "<|constrain|>" in controls:
        types += texts[2].split()
    if len(to) > 1 or len(types) > 1:
        raise ValueError(f"The header {_short(' '.join(texts[:-1]))} cannot be read.")
    if to and channel == "final":
        raise ValueError("A call belongs on the commentary channel, not on final.")
    return _Part(
        channel=channel,
        recipient=to[0] if to else "",
        content_type=types[0] if types else "",
        content=texts[-1],
    )


def _shape_error(controls: Sequence[str]) -> str:
    """What is wrong with control tokens that make no message."""
    if "<|message|>" not in controls:
        return "Your message has no <|message|> after its header."
    if "<|channel|>" not in controls:
        return "Your message names no channel: use analysis, commentary or final."
    return f"These control tokens make no message: {' '.join(controls[:8])}."


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _call(part: _Part) -> ToolCall:
    name = part.recipient.removeprefix(_NAMESPACE)
    if not part.recipient.startswith(_NAMESPACE) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"There is no tool {_short(part.recipient)}: a call goes to functions.NAME."
        )
    if part.content_type not in ("", "json"):
        raise ValueError(f"A call's arguments must be json, not {_short(part.content_type)}.")
    try:
        return read_arguments(name, part.content)
    except (ValueError, RecursionError) as error:
        why = error or "nested too deeply"
        raise ValueError(f"Your tool call cannot be read: {why}.") from None
