"""The scripted user of the mock domain: reads a scenario's requests, makes them one at a time."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any, Literal

from components.envs.user_phrases import MOCK_PHRASES, phrase_set

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
MAX_STALE = 3
"""Turns with nothing new after which the user leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing the user wants."""

    kind: Literal["create", "update", "delete", "compliment", "human"]
    title: str = ""
    description: str = ""
    task_id: str = ""
    """Empty: the task that was just created (update), or all tasks (delete)."""
    status: str = ""
    withheld: Literal["", "title", "description", "task"] = ""
    """What the user says only when asked; ``task``: which one, and its new status."""
    user_id: str = ""
    """Set where the scenario has the request itself name the user."""


_REQUESTS = re.compile(
    r"task (?:titled|called) '(?P<title>[^']+)'(?: with the description '(?P<description>[^']+)')?"
    r"(?:; say that its description is '(?P<asked_description>[^']+)' when asked)?"
    r"(?: for (?P<user>user_\d+))?"
    r"|new task; say that its title is '(?P<asked_title>[^']+)' when asked"
    r"|say that (?P<asked_id>task_\d+) is to be (?P<asked_status>\w+) when asked"
    r"|(?P<be_id>task_\d+) be marked as (?P<be_status>pending|completed)"
    r"|mark (?P<mark_id>task_\d+|the new task|the task) as (?P<mark_status>\w+)"
    r"|delete (?P<delete>task_\d+|all)"
    r"|request a (?P<compliment>compliment)"
    r"|talk to a (?P<human>human) agent"
)

_IDENTITY = re.compile(r"\b(?:user ?id|your id|your name|full name|who are|which user)\b", re.I)
_USER_ID = re.compile(r"user ?id|your id|which user", re.I)
_WITHHELD = {
    "title": re.compile(r"\b(?:title|titled|called|call it|name it|name (?:of|for))\b", re.I),
    "task": re.compile(r"\b(?:which|what|task ?id|its id|the id|status)\b", re.I),
}
_CONFIRM = re.compile(
    r"\b(?:confirm|proceed|go ahead|(?:shall|should|may|can) i|(?:want|like) me to|right|correct|"
    r"sure|okay|ok)\b",
    re.I,
)
_DONE = re.compile(
    r"\b(?:created|added|updated|marked|changed|set|done|is now|are now|completed)\b",
    re.I,
)
_REFUSED = re.compile(
    r"\b(?:cannot|can't|can not|could not|couldn't|unable|not able|not allowed|not possible|"
    r"not been|failed|sorry|error|does not exist|not found)\b",
    re.I,
)
_REQUEST_FOR = re.compile(
    r"(?:please|kindly|tell me|provide|confirm|i(?:'ll| will| would)? need)\b", re.I
)
_HANDED_OVER = re.compile(r"\btransfer(?:red|ring)?\b", re.I)


def _requests(task: Any) -> tuple[Request, ...]:
    """The requests that a scenario's text makes, in order."""
    instructions = task.user_scenario.instructions
    text = instructions if isinstance(instructions, str) else instructions.reason_for_call
    history = (task.initial_state and task.initial_state.message_history) or []
    mentioned = re.findall(r"\btask_\d+\b", text + " ".join(m.content or "" for m in history))
    found: list[Request] = []
    for match in _REQUESTS.finditer(text):
        part = match.groupdict()
        if part["title"] or part["asked_title"]:
            request = Request(
                kind="create",
                title=part["title"] or part["asked_title"],
                description=part["description"] or part["asked_description"] or "",
                user_id=part["user"] or "",
                withheld=_withheld(part),
            )
        elif part["asked_id"]:
            request = Request(
                kind="update",
                task_id=part["asked_id"],
                status=part["asked_status"],
                withheld="task",
            )
        elif part["human"]:
            request = Request(kind="human")
        elif part["be_id"] or part["mark_id"]:
            task_id = part["be_id"] or part["mark_id"]
            if task_id == "the task":  # the one that the text or the conversation so far is about
                task_id = mentioned[-1]
            request = Request(
                kind="update",
                task_id=task_id if task_id.startswith("task_") else "",
                status=part["be_status"] or part["mark_status"],
            )
        elif part["delete"]:
            request = Request(kind="delete", task_id=part["delete"].removeprefix("all"))
        else:
            request = Request(kind="compliment")
        found.append(request)
    if not found:
        raise ValueError(f"task {task.id!r}: found no request in its scenario: {text!r}")
    return tuple(found)


def _withheld(part: dict[str, str]) -> Literal["", "title", "description"]:
    """What a request to create a task leaves out."""
    if part["asked_title"]:
        return "title"
    return "description" if part["asked_description"] else ""


class MockUser:
    """Makes one request at a time, answers what it is asked, and leaves when all is done.

    It believes what the agent says: only the database knows better. Who it is it says when asked.
    """

    def __init__(self, task: Any, *, seed: int, paraphrases: str = "train") -> None:
        """Read the scenario.

        Args:
            task: a tau2 ``Task`` of the mock domain, official or generated.
            seed: of the choice among paraphrases.
            paraphrases: name of a set in ``MOCK_PHRASES``.
        """
        instructions = task.user_scenario.instructions
        known = "" if isinstance(instructions, str) else instructions.known_info or ""
        named = re.search(r"Your name is ([^.]+)\.", known)
        with_id = re.search(r"\buser_\d+\b", known or str(instructions))
        self._name = named[1] if named else ""
        self._user_id = with_id[0] if with_id else ""
        self._requests = _requests(task)
        self._rng = random.Random(f"mock user/{seed}")
        self._phrases = phrase_set(MOCK_PHRASES, paraphrases)
        self._current = -1
        self._said: set[tuple[int, str]] = set()
        self._stale = 0

    def reply(self, agent_text: str) -> str:
        """The user's next message."""
        if self._current < 0:
            return self._next(self._pick("hello"))
        asked, statements = _split(agent_text)
        request = self._requests[self._current]
        if _HANDED_OVER.search(statements):
            return TRANSFER
        if _REFUSED.search(statements):
            return self._next(self._pick("refused"))
        if (request.kind == "compliment" and statements) or _DONE.search(statements):
            return self._next(self._pick("thanks"))
        if _IDENTITY.search(asked):
            return self._say("identity", self._identity(asked))
        if re.search(r"\bdescription\b", asked, re.I) and request.kind == "create":
            key = "description" if request.description else "no_description"
            return self._say("description", self._pick(key, request.description))
        if (asks := _WITHHELD.get(request.withheld)) and asks.search(asked):
            return self._say(request.withheld, self._tell(request))
        if _CONFIRM.search(asked) and "else" not in asked:
            return self._say("yes", self._pick("yes"))
        return self._say("request", self._ask(request))

    def _pick(self, key: str, *values: str) -> str:
        """A phrase, its gaps filled in."""
        first, *others = self._phrases[key]
        # Nothing is drawn where there is no choice.
        return (self._rng.choice([first, *others]) if others else first).format(*values)

    def _next(self, lead: str) -> str:
        """Make the next request, or leave."""
        self._current += 1
        if self._current >= len(self._requests):
            return f"{lead}{self._pick('end')}{STOP}"
        return self._say("request", lead + self._ask(self._requests[self._current]))

    def _say(self, kind: str, text: str) -> str:
        """Say something, unless it has been said too often."""
        fact = (self._current, kind)
        self._stale = self._stale + 1 if fact in self._said else 0
        self._said.add(fact)
        return f"{self._pick('leave')}{STOP}" if self._stale >= MAX_STALE else text

    def _identity(self, question: str) -> str:
        parts = []
        if _USER_ID.search(question):
            key = "user_id" if self._user_id else "no_user_id"
            parts.append(self._pick(key, self._user_id))
        if self._name and (not self._user_id or not parts):
            parts.append(self._pick("name", self._name))
        return " ".join(parts) or self._pick("user_id", self._user_id)

    def _tell(self, request: Request) -> str:
        """The title or the task that was asked for."""
        if request.withheld == "title":
            return self._pick("title", request.title)
        return self._pick("update", request.task_id, request.status)

    def _ask(self, request: Request) -> str:
        if request.withheld in ("title", "task"):
            return self._pick("create_untitled" if request.kind == "create" else "update_unnamed")
        if request.kind == "create":
            asked = self._pick("create", request.title)
            text = asked + (f" for {request.user_id}." if request.user_id else ".")
            if request.withheld == "description":
                text += " " + self._pick("has_description")
            elif request.description:
                text += " " + self._pick("description", request.description)
            return text
        if request.kind == "update":
            which = request.task_id or self._pick("the_new")
            return self._pick("update", which, request.status)
        if request.kind == "delete":
            return self._pick("delete", request.task_id or "all my current tasks")
        return self._pick(request.kind)


def _split(text: str) -> tuple[str, str]:
    """What an agent asks (questions, "Please tell me..."), and what it says (all but questions)."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    asked = " ".join(s for s in sentences if s.endswith("?") or _REQUEST_FOR.match(s))
    return asked, " ".join(s for s in sentences if not s.endswith("?"))


def make_mock_user(tau2_task: Any, seed: int, *, paraphrases: str = "train") -> MockUser:
    """The scripted user of a mock task."""
    return MockUser(tau2_task, seed=seed, paraphrases=paraphrases)
