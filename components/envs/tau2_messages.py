"""Messages: ours and tau2's, one into the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from components.envs.base import Message, ToolCall


def agent_may_see(message: Any) -> bool:
    """Whether a stored message of tau2's is part of what the agent sees, its own included."""
    if message.role == "assistant":
        return True
    if message.role == "user":
        return not message.is_tool_call()
    return message.role == "tool" and message.requestor == "assistant"


def _plain(value: Any) -> Any:
    """Arguments as plain dicts and lists that nobody else holds."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def to_official(message: Message) -> Any:
    """Our assistant message as tau2's."""
    from tau2.data_model.message import AssistantMessage
    from tau2.data_model.message import ToolCall as OfficialCall

    calls = [
        OfficialCall(
            id=call.id, name=call.name, arguments=_plain(call.arguments), requestor="assistant"
        )
        for call in message.tool_calls
    ]
    return AssistantMessage(
        role="assistant",
        content=message.content if message.content.strip() else None,
        tool_calls=calls or None,
    )


def from_official(message: Any) -> Message:
    """One stored message of tau2's as ours."""
    if message.role == "tool":
        return Message(
            role="tool",
            content=message.content or "",
            tool_call_id=message.id,
            error=message.error,
        )
    calls = tuple(
        ToolCall(id=call.id, name=call.name, arguments=_plain(call.arguments))
        for call in message.tool_calls or ()
    )
    return Message(role=message.role, content=message.content or "", tool_calls=calls)


def messages_json(messages: tuple[Message, ...]) -> str:
    """Messages as JSON text, fields that say nothing left out."""
    rows = []
    for message in messages:
        row: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            row["tool_calls"] = [
                {"id": call.id, "name": call.name, "arguments": call.arguments}
                for call in message.tool_calls
            ]
        if message.role == "tool":
            row |= {"tool_call_id": message.tool_call_id, "error": message.error}
        rows.append(row)
    return json.dumps(rows, ensure_ascii=False)
