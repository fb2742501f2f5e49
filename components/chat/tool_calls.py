"""Tool calls as text.

Hermes writes ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` into the turn; harmony
has the name in a message's header and the arguments as its content.
"""

from __future__ import annotations

import json
import re
from typing import Any

from components.envs.base import Message, ToolCall

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_MAX_DEPTH = 32  # of a call's JSON: deeper ones would hit recursion limits further down
_BARE_CALL = re.compile(r'\s*\{\s*"(name|arguments)"\s*:')


def turn_text(message: Message) -> str:
    """An assistant message as a policy writes it: its text, then each call on lines of its own."""
    calls = [
        f'{_CALL}\n{{"name": {_dumps(call.name)}, "arguments": {_dumps(dict(call.arguments))}}}'
        f"\n{_CALL_END}"
        for call in message.tool_calls
    ]
    return "\n".join(([message.content] if message.content else []) + calls)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Text outside the calls, and the calls.

    Raises:
        ValueError: with what is wrong, in words for the model.
    """
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    outside: list[str] = []
    calls: list[ToolCall] = []
    while True:
        before, opened, rest = text.partition(_CALL)
        outside.append(before)
        if not opened:
            break
        rest = rest.lstrip()
        # raw_decode finds the end of the JSON itself: a "</tool_call>" in a string does no harm.
        value, end = decoder.raw_decode(rest)
        calls.append(_call(value))
        text = rest[end:].lstrip()
        if not text.startswith(_CALL_END):
            raise ValueError(f"{_CALL_END} must follow the JSON object")
        text = text[len(_CALL_END) :]
    content = "\n".join(part.strip() for part in outside if part.strip())
    if _CALL_END in content:
        raise ValueError(f"{_CALL_END} without {_CALL}")
    if not calls and _BARE_CALL.match(content):
        raise ValueError(f"it must stand between {_CALL} and {_CALL_END}")
    return content, tuple(calls)


def read_arguments(name: str, text: str) -> ToolCall:
    """A call whose name is known, from the JSON of its arguments.

    Raises:
        ValueError: with what is wrong, in words for the model.
    """
    arguments = json.loads(text, parse_constant=_refuse_constant)
    return _call({"name": name, "arguments": arguments})


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise ValueError('it must be a JSON object {"name": ..., "arguments": {...}}')
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError('"name" must be the name of a tool')
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be a JSON object')
    _check_depth(value)
    try:
        _dumps(value).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None
    return ToolCall(name=name, arguments=arguments)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [item for item in level if isinstance(item, (dict, list))]
        if not nested:
            return
        level = []
        for item in nested:
            level += item.values() if isinstance(item, dict) else item
    raise ValueError(f"its JSON is nested deeper than {_MAX_DEPTH} levels")


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
