"""Who plays the user when no language model does.

The scripted user reads a task's scenario and nothing else: no gold actions, no database. It

1. opens with the reason for calling, in first person, without saying who it is;
2. answers questions for e-mail, name, zip, user id, order, payment, address, reason and other
   details from the scenario, else does not remember;
3. confirms what the agent proposes, unless the scenario has it react otherwise first;
4. tells its further goals one by one, when the agent reports one done or asks if there is more;
5. ends with ``###STOP###`` when nothing is left or after three turns without news, and with
   ``###TRANSFER###`` when the agent announces a transfer;
6. is deterministic: the seed only chooses among phrasings.

Where the scenario is silent: the original payment method, and "no longer needed" for a reason.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

from components.envs.agent_cues import (
    ASK,
    CONFIRM,
    DONE,
    MORE,
    OFFER,
    OPEN,
    REFUSES,
    SLOTS,
    TRANSFERS,
    content_words,
)
from components.envs.base import ActingUserSimulator, UserSimulator
from components.envs.scenario import Scenario, Trigger, read_scenario, split_sentences
from components.envs.user_phrases import PHRASES, phrase_set

STOP = "###STOP###"
TRANSFER = "###TRANSFER###"
MAX_IDLE_TURNS = 3
"""Turns without news after which the user hangs up."""
SCRIPTED_DOMAINS = ("retail", "airline", "telecom", "mock")


class ScriptedUser:
    """Plays a scenario by rules; see the module's text for them.

    Args:
        scenario: what it may say.
        seed: chooses among phrasings.
        paraphrases: name of a set in :data:`PHRASES`.

    Raises:
        ValueError: for an unknown set.
    """

    def __init__(self, scenario: Scenario, *, seed: int | str, paraphrases: str = "train") -> None:
        self._scenario = scenario
        self._phrases = phrase_set(PHRASES, paraphrases)
        self._random = random.Random(f"scripted user/{seed}")
        self._goals = list(scenario.goals)
        self._reactions = list(scenario.reactions)
        self._changes: list[str] = []  # reactions said, the latest first
        self._given: Counter[str] = Counter()
        self._said: set[str] = set()
        self._heard: set[str] = set()
        self._started = self._acted = self._said_all = False
        self._idle = 0

    def reply(self, agent_text: str) -> str:
        """The user's next message; a stop token in it ends the episode."""
        if not self._started:
            self._started = True
            return f"{self._phrase('hello')} {self._next_goal()}"
        if TRANSFERS.search(agent_text):
            return TRANSFER
        text, news = self._answer(agent_text)
        self._heard.add(agent_text)
        self._idle = 0 if news else self._idle + 1
        if self._idle >= MAX_IDLE_TURNS:
            return STOP
        return text

    def _phrase(self, key: str, *values: str) -> str:
        return self._random.choice(self._phrases[key]).format(*values)

    def _next_goal(self) -> str:
        self._acted = False
        goal = self._goals.pop(0)
        self._said.add(goal)
        return goal.replace("I want to", self._phrase("want"))

    def _answer(self, agent_text: str) -> tuple[str, bool]:
        """The reply and whether there is anything new in it."""
        sentences = split_sentences(agent_text)
        asking = [
            s
            for s in sentences
            if s.endswith("?")
            or s.lower().startswith("please")
            or ("?" not in agent_text and ASK.search(s))
        ]
        asked = " ".join(asking)
        told = " ".join(s for s in sentences if s not in asking)
        num_given = len(self._said)
        identity = self._identity(asked)
        if identity:
            return identity, len(self._said) > num_given
        # Numbers told mean an answer; ids of accounts do not.
        if DONE.search(told) or REFUSES.search(told) or re.search(r"(?<!\w)[$#]?\d", told):
            self._acted = True
        refused = REFUSES.search(agent_text)
        reaction = self._react("refuse") if refused else None
        if reaction:
            return reaction, True
        more = MORE.search(asked)
        offer = OFFER.search(asked) and not OPEN.search(asked)
        confirm = offer or CONFIRM.search(asked)
        if self._goals and (more or (not asking and self._acted)):
            return self._next_goal(), True
        if confirm:
            return self._confirm(agent_text, refused=bool(refused))
        if more or (not asking and (self._acted or self._said_all)):
            if self._acted or self._said_all:
                return STOP, True
            self._said_all = True
            return self._phrase("all"), True
        detail = self._detail(asked or agent_text) if asking or refused else None
        if detail:
            return self._new(detail)
        return self._phrase("unknown" if asking else "okay"), False

    def _new(self, text: str) -> tuple[str, bool]:
        new = text not in self._said
        self._said.add(text)
        return text, new

    def _react(self, trigger: Trigger) -> str | None:
        for place, reaction in enumerate(self._reactions):
            if reaction.trigger == trigger:
                self._changes.insert(0, self._reactions.pop(place).text)
                return self._changes[0]
        return None

    def _confirm(self, agent_text: str, *, refused: bool) -> tuple[str, bool]:
        reaction = self._react("confirm")
        if reaction:
            return reaction, True
        if refused:  # an offer of something else: repeat what was to happen in that case
            for sentence in self._sentences(told_only=True):
                if re.search(r"\bif\b.*\b(?:not|cannot|can't)\b", sentence, re.I):
                    key = f"repeated: {sentence}"
                    if key not in self._said:
                        self._said.add(key)
                        return sentence, True
        return self._phrase("yes"), agent_text not in self._heard

    def _identity(self, asked: str) -> str | None:
        """The identity asked for, or None when none is."""
        brief = len(asked.split()) <= 6 and re.search(r"\byour\b", asked, re.I)
        if not (ASK.search(asked) or brief) or re.search(r"\(yes\b", asked, re.I):
            return None
        who = self._scenario.identity
        parts: list[str] = []
        if re.search(r"\be-?mail", asked, re.I):
            if self._given["email"] < len(who.emails):
                return self._give("email", who.emails)
            self._said.add("no email")
            parts.append(self._phrase("no_email"))
        wants_name = re.search(r"\bname\b", asked, re.I)
        wants_zip = re.search(r"\bzip|\bpostal", asked, re.I)
        if wants_name and who.names:
            parts.append(self._give("name", who.names))
        if wants_zip:
            parts.append(self._give("zip", who.zips) if who.zips else self._phrase("unknown"))
        if re.search(r"\b(?:user|account|customer) ?(?:id|name)\b", asked, re.I) and not wants_zip:
            known = who.user_ids
            parts = [self._give("user_id", known) if known else self._phrase("unknown")]
        return " ".join(parts) or None

    def _give(self, key: str, values: tuple[str, ...]) -> str:
        """The next of several values; the last one again when they are used up."""
        value = values[min(self._given[key], len(values) - 1)]
        self._given[key] += 1
        self._said.add(value)
        return self._phrase(key, value)

    def _sentences(self, *, told_only: bool) -> list[str]:
        """Reactions said, sentences of the goals (told ones, or all), facts."""
        goals = [g for g in self._scenario.goals if g in self._said or not told_only]
        told = [part for goal in goals for part in split_sentences(goal)]
        return [*self._changes, *told, *self._scenario.facts]

    def _detail(self, asked: str) -> str | None:
        """What answers a question about the request."""
        for trigger, question, answer in SLOTS:
            if not re.search(question, asked, re.I):
                continue
            reaction = self._react(trigger) if trigger else None
            if reaction:
                return reaction
            # What was told already first, what is known besides (the home address) last.
            told, goals = self._sentences(told_only=True), self._sentences(told_only=False)
            for sentences in (told, goals, self._scenario.known):
                matching = [s for s in sentences if re.search(answer, s)]
                if matching:
                    return self._least_said(matching, asked)
            if trigger in ("payment", "reason"):
                return self._phrase(trigger)
        reaction = self._react("which")
        if reaction:
            return reaction
        sentences = self._sentences(told_only=True)
        best = max((len(content_words(s) & content_words(asked)) for s in sentences), default=0)
        if best == 0:
            return None
        matching = [s for s in sentences if len(content_words(s) & content_words(asked)) == best]
        return self._least_said(matching, asked)

    def _least_said(self, sentences: list[str], asked: str) -> str:
        wanted = content_words(asked)
        return max(sentences, key=lambda s: (s not in self._said, len(content_words(s) & wanted)))


def make_scripted_user(
    domain: str, tau2_task: Any, seed: int, *, paraphrases: str = "train"
) -> UserSimulator | ActingUserSimulator:
    """The scripted user of a task.

    Args:
        domain: ``"retail"``, ``"airline"``, ``"telecom"`` or ``"mock"``.
        tau2_task: a tau2 ``Task``; only ``id`` and ``user_scenario`` are read.
        seed: chooses among phrasings.
        paraphrases: ``"train"`` or ``"held_out"``: disjoint sets of phrasings.

    Raises:
        ValueError: for a domain without a scripted user, or an unknown set.
    """
    if domain == "mock":
        from components.envs.mock_tasks import make_mock_user

        return make_mock_user(tau2_task, seed, paraphrases=paraphrases)
    if domain not in SCRIPTED_DOMAINS:
        raise ValueError(
            f"user='scripted' plays {', '.join(SCRIPTED_DOMAINS)}, not {domain!r}; "
            "give Tau2Env a callable that makes the user of a task"
        )
    if domain == "telecom":
        from components.envs.users_telecom import TelecomUser

        return TelecomUser(tau2_task.user_scenario, seed=f"{tau2_task.id}/{seed}")
    scenario = read_scenario(tau2_task.user_scenario)
    return ScriptedUser(scenario, seed=f"{domain}/{tau2_task.id}/{seed}", paraphrases=paraphrases)
