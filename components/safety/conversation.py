"""What a safety check reads: the delivered messages of one episode, and the facts of its domain."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.envs.base import Message, ToolCall, Trajectory
from components.envs.tau2_data import domain_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One occasion on which a rule was kept or broken."""

    check: str
    """``"S1"`` to ``"S12"``."""
    place: int
    """Index of the message in ``Conversation.messages``."""
    passed: bool
    text: str
    """What was looked at and, where the rule was broken, why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call of the agent, and its answer."""

    place: int
    """Index of the message that makes it."""
    name: str
    arguments: Mapping[str, Any]
    answer: Message | None
    """None where the episode ended before the tool answered."""

    @property
    def ok(self) -> bool:
        """Whether the tool answered without an error."""
        return self.answer is not None and not self.answer.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a domain before a conversation starts: tools, policy, start database."""

    domain: str
    policy: str
    tool_types: Mapping[str, str]
    """``read``, ``write``, ``generic`` or ``think`` for each tool of the agent."""
    users: Mapping[str, Any] = field(default_factory=dict)
    """Retail: records by id, as the tools print them."""
    orders: Mapping[str, Any] = field(default_factory=dict)
    products: Mapping[str, Any] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)
    """What belongs to one user alone (lower-cased e-mail, street, ids) -> the user's id."""


@functools.cache
def domain_facts(domain: str) -> Facts:
    """The facts of a tau2 domain, read once per process.

    Raises:
        ValueError: for a domain that tau2 does not have.
    """
    data = domain_data(domain)
    records: dict[str, Any] = {}
    if domain == "retail":
        database = data.build().tools.db.model_dump(mode="json")
        records = {name: database[name] for name in ("users", "orders", "products")}
        records["owners"] = _owners(records["users"], records["orders"])
    return Facts(domain=domain, policy=data.system_prompt, tool_types=data.tool_types, **records)


def _owners(users: Mapping[str, Any], orders: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for user_id, user in users.items():
        tokens = (user_id, user["email"], user["address"]["address1"], *user["payment_methods"])
        for token in tokens:
            found.setdefault(token.lower(), set()).add(user_id)
    for order_id, order in orders.items():
        for token in (order_id, order["address"]["address1"]):
            found.setdefault(token.lower(), set()).add(order["user_id"])
    return {token: next(iter(ids)) for token, ids in found.items() if len(ids) == 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One episode, as its user and its tools saw it: turns that were refused are not in it."""

    task_id: str
    messages: tuple[Message, ...]
    facts: Facts

    @property
    def domain(self) -> str:
        return self.facts.domain

    def said(self, role: str, *, before: int | None = None) -> list[str]:
        """Texts of ``"user"`` or ``"assistant"`` up to a place, that one left out.

        A text beside a tool call is left out: the user never sees it.
        """
        return [m.content for m in self.messages[:before] if m.role == role and not m.tool_calls]

    def calls(self) -> Iterator[Call]:
        """The agent's calls with their answers, in order."""
        for place, message in enumerate(self.messages):
            for index, call in enumerate(message.tool_calls):
                yield Call(
                    place=place,
                    name=call.name,
                    arguments=call.arguments,
                    answer=self._answer(place + 1 + index),
                )

    def _answer(self, place: int) -> Message | None:
        """The tool message at a place: answers follow their calls in the same order."""
        if place >= len(self.messages) or self.messages[place].role != "tool":
            return None
        return self.messages[place]


def from_trajectory(trajectory: Trajectory) -> Conversation:
    """The conversation of an episode that has just ended."""
    return Conversation(
        task_id=trajectory.task.id,
        messages=trajectory.messages,
        facts=domain_facts(trajectory.task.domain),
    )


def from_records(
    records: Iterable[Mapping[str, Any]], *, domain: str, task_id: str
) -> Conversation:
    """The conversation of a recorded rollout.

    Args:
        records: the ``messages`` of a line of rollouts.jsonl.
        domain: of its spec.
        task_id: of its spec.

    Raises:
        ValueError: for an unknown domain, or a message without role or content.
    """
    return Conversation(
        task_id=task_id,
        messages=tuple(_message(record) for record in records if not record.get("refused")),
        facts=domain_facts(domain),
    )


def _message(record: Mapping[str, Any]) -> Message:
    try:
        calls = tuple(
            ToolCall(name=c["name"], arguments=c["arguments"], id=c.get("id", ""))
            for c in record.get("tool_calls", ())
        )
        return Message(
            role=record["role"],
            content=record["content"],
            tool_calls=calls,
            tool_call_id=record.get("tool_call_id", ""),
            error=bool(record.get("error")),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"message {str(record)[:120]!r}: not of rollouts.jsonl: {error}") from None


def mentions(text: str, value: Any) -> bool:
    """Whether a text holds a value as a word of its own, whatever the case."""
    return _word(str(value)).search(text) is not None


@functools.lru_cache(maxsize=4096)
def _word(value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(value.lstrip('#'))}(?!\w)", re.I)


def any_mentions(texts: Sequence[str], value: Any) -> bool:
    """Whether one of the texts holds a value."""
    return any(mentions(text, value) for text in texts)
