"""The scripted user of the telecom domain, which has a phone to act on.

It says what is wrong, does what it is told, tells what it then sees, and leaves when it works. Its
inputs are the scenario and the answers of its own tools: no gold action. It has no ideas of its
own: every change to the phone is one that the agent asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from components.envs.agent_cues import TRANSFERS
from components.envs.base import ToolCall
from components.envs.first_person import first_person
from components.envs.scenario import split_sentences
from components.envs.telecom_cues import SWITCHES, PhoneRequest, phone_requests

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
MAX_STALE = 3
"""Turns with nothing new after which the user leaves."""

# What the reason for the call says, the call that shows whether it is over, and how it shows it.
_GOALS: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("MMS", "can_send_mms", lambda shown: "app can send MMS" in shown),
    ("mobile data", "run_speed_test", lambda shown: "(Excellent)" in shown),
    ("No Service", "check_status_bar", lambda shown: "📶" in shown),
)


class TelecomUser:
    """Plays one scenario. See :class:`components.envs.base.ActingUserSimulator`."""

    def __init__(self, user_scenario: Any, *, seed: str) -> None:
        """Read the scenario.

        Args:
            user_scenario: a tau2 ``UserScenario`` of the telecom domain.
            seed: of the choice among phrasings.

        Raises:
            ValueError: for a scenario about something else than service, data or MMS.
        """
        told = user_scenario.instructions
        goals = [goal for goal in _GOALS if goal[0] in told.reason_for_call]
        if not goals:
            raise ValueError(f"cannot play this scenario: {told.reason_for_call!r}")
        self._goal = goals[0]
        self._reason = first_person(told.reason_for_call)
        self._known = [first_person(part) for part in split_sentences(told.known_info)]
        self._rng = random.Random(f"telecom user/{seed}")
        self._queue: list[PhoneRequest] = []
        self._doing = PhoneRequest(call=ToolCall(name=self._goal[1], arguments={}))
        self._seen: list[str] = []
        self._told: set[str] = set()
        self._started = self._look = False
        self._stale = 0

    def act(self, heard: str | list[str]) -> str | list[ToolCall]:
        """A text for the agent, or one call of a tool."""
        if isinstance(heard, list):
            self._note("\n".join(heard))
        elif not self._started:
            self._started = True
            return self._pick("Hi. ", "Hello, I need help. ", "Hi there! ") + self._reason
        elif TRANSFERS.search(heard):
            return f"Thank you. {TRANSFER}"
        else:
            self._queue = phone_requests(heard)
            self._look = bool(
                re.search(r"\b(?:solved|resolved|fixed|working|works)\b", heard, re.I)
            )
            if not self._queue and not self._look:
                return self._answer(heard)
        if self._queue:
            return self._do(self._queue.pop(0))
        if self._look:  # has it helped?
            self._look = False
            return self._do(PhoneRequest(call=ToolCall(name=self._goal[1], arguments={})))
        return self._report()

    def _do(self, request: PhoneRequest) -> list[ToolCall]:
        self._doing = request
        return [request.call]

    def _note(self, shown: str) -> None:
        """Keep what a call gave; a switch that went the wrong way is flipped back."""
        name = self._doing.call.name
        self._seen.append(shown)
        changed = not name.startswith(("check_", "run_", "can_"))
        if name != self._goal[1]:
            self._look |= changed
        if self._doing.wanted is not None and (SWITCHES[name][1] in shown) != self._doing.wanted:
            self._queue.insert(0, PhoneRequest(call=self._doing.call))

    def _report(self) -> str:
        seen, self._seen = self._seen, []
        text = " ".join(dict.fromkeys(part.strip() for part in seen))
        if self._doing.call.name == self._goal[1] and self._goal[2](seen[-1]):
            return f"{text} It works now, thank you! {STOP}"
        return self._once(self._pick("I did that. ", "Done. ", "Okay. ") + text, text)

    def _answer(self, heard: str) -> str:
        """What to say to a text that asks for nothing on the phone."""
        if re.search(r"\b(?:name|phone number|which (?:line|number))\b", heard, re.I):
            return self._once(self._known[0], "identity")
        if re.search(r"\b(?:where|abroad|travel\w*|location|country)\b", heard, re.I):
            place = [part for part in self._known if "currently" in part]
            return self._once(" ".join(place) or "I don't remember.", "place")
        if re.search(r"\b(?:change|upgrade|switch)\b[^.?!]*\bplan\b", heard, re.I):
            return self._once("No, I do not want to change my plan.", "plan")
        if "?" in heard and re.search(r"\brefuel|\bGB\b|\bgigabyte", heard, re.I):
            return self._once("Yes, please refuel 2.0 GB.", "refuel")
        if "?" in heard:
            return self._once("Yes, please go ahead.", heard)
        return self._once("Okay. What should I do on my phone?", "okay")

    def _once(self, text: str, fact: str) -> str:
        """Say something, or leave after too much of the same."""
        self._stale = self._stale + 1 if fact in self._told else 0
        self._told.add(fact)
        return f"This does not help me. Goodbye. {STOP}" if self._stale >= MAX_STALE else text

    def _pick(self, *phrases: str) -> str:
        return self._rng.choice(phrases)
