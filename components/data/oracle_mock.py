"""A scripted agent for the mock domain: demonstrations for a warm start, and an upper bound.

It reads nothing but the conversation: what the user said and what tools answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from components.envs.base import Message, ToolCall, ToolSpec

_HAND_OVER = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."
_ANYTHING_ELSE = "Is there anything else I can do for you?"


class MockOracle:
    """Solves tasks of the mock domain one call at a time. It keeps no state between turns."""

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        """The next agent turn.

        Args:
            messages: the whole conversation that the agent may see.
            tools: the agent's tools; only those are called.

        Returns:
            An assistant message: text, or one tool call.

        Raises:
            ValueError: if a tool that it needs is missing.
        """
        last = messages[-1]
        if last.role == "tool":
            name = _call_of(messages, last).name
            if name != "get_users":
                return _say(_report(name, last))
        # The request that is open: what the user said since the last one was dealt with.
        request = _open_request(messages)
        name, arguments = self._decide(request, messages)
        if name == "say":
            return _say(arguments["text"])
        if name not in {tool.name for tool in tools}:
            raise ValueError(f"the oracle needs the tool {name!r}, which is not there")
        number = sum(len(message.tool_calls) for message in messages)
        call = ToolCall(id=f"call_{number}", name=name, arguments=arguments)
        return Message(role="assistant", tool_calls=(call,))

    def _decide(self, request: str, messages: Sequence[Message]) -> tuple[str, dict[str, str]]:
        title = re.search(r"(?:task (?:titled|called|named)|title is) '([^']+)'", request)
        if title:
            return self._create(title[1], request, messages)
        status = re.findall(r"\b(pending|completed)\b", request)
        named = re.search(r"\btask_\d+\b", request)
        if status:
            task_id = named[0] if named else _last_created(messages)
            if not task_id:
                return _text("Which task do you mean? Please tell me its id.")
            return "update_task_status", {"task_id": task_id, "status": status[-1]}
        if re.search(r"\b(?:delete|human)\b", request):
            return "transfer_to_human_agents", {"summary": f"The user asks: {request.strip()}"}
        if named:
            return _refuse("the status of a task can only be pending or completed.")
        if "one of my tasks" in request:
            return _text("Which task do you mean, and what should its status be?")
        if re.search(r"\b(?:create a|new) task\b", request):
            return _text("Certainly. What is the title of the task?")
        if "compliment" in request:
            return _text("You are wonderfully well organised.")
        return _text("How can I help you with your tasks?")

    def _create(
        self, title: str, request: str, messages: Sequence[Message]
    ) -> tuple[str, dict[str, str]]:
        description = re.search(r"description is '([^']+)'", request)
        if not description and re.search(r"\ba description\b", request):
            return _text("Certainly. What is the description of the task?")
        user_id = _user_id(request, messages)
        if not user_id:
            name = _own_name(messages)
            if not name:
                return _text("Certainly. Could you tell me your user id, please?")
            if any(c.name == "get_users" for message in messages for c in message.tool_calls):
                return _refuse(f"only existing users can create tasks, and {name} is not one.")
            return "get_users", {}
        arguments = {"user_id": user_id, "title": title}
        if description:
            arguments["description"] = description[1]
        return "create_task", arguments


def _text(text: str) -> tuple[str, dict[str, str]]:
    return "say", {"text": text}


def _refuse(why: str) -> tuple[str, dict[str, str]]:
    """What the policy forbids; the words end the request, for ``_open_request`` too."""
    return _text(f"I am sorry, I cannot do that: {why} {_ANYTHING_ELSE}")


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


def _call_of(messages: Sequence[Message], answer: Message) -> ToolCall:
    calls = [call for message in messages for call in message.tool_calls]
    return next(call for call in reversed(calls) if call.id == answer.tool_call_id)


def _report(name: str, answer: Message) -> str:
    """Tell the user what a tool has done."""
    if answer.error:
        return f"I am sorry, that failed. {answer.content}"
    if name == "transfer_to_human_agents":
        return _HAND_OVER
    task = json.loads(answer.content)
    if name == "create_task":
        done = f"I have created the task '{task['title']}' as {task['task_id']}."
    else:
        done = f"The status of {task['task_id']} is now {task['status']}."
    return f"{done} {_ANYTHING_ELSE}"


def _open_request(messages: Sequence[Message]) -> str:
    """What the user has said since the agent last reported something done."""
    said: list[str] = []
    for message in reversed(messages):
        if message.role == "user":
            said.append(message.content)
        elif message.role == "assistant" and "anything else" in message.content:
            break
    return " ".join(reversed(said))


def _user_id(request: str, messages: Sequence[Message]) -> str:
    """The id that the user gave, or the one that get_users has for the user's name."""
    texts = [request, *(m.content for m in messages if m.role == "user")]
    for text in texts:
        if given := re.search(r"\buser_\d+\b", text):
            return given[0]
    name = _own_name(messages)
    for message in messages:
        if message.role == "tool" and _call_of(messages, message).name == "get_users":
            users = json.loads(message.content)
            return next((u["user_id"] for u in users if u["name"] == name), "")
    return ""


def _own_name(messages: Sequence[Message]) -> str:
    said = " ".join(message.content for message in messages if message.role == "user")
    given = re.search(r"My name is ([^.]+)\.", said)
    return given[1] if given else ""


def _last_created(messages: Sequence[Message]) -> str:
    answers = [m for m in messages if m.role == "tool" and not m.error]
    created = [m for m in answers if _call_of(messages, m).name == "create_task"]
    return json.loads(created[-1].content)["task_id"] if created else ""
