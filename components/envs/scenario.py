"""Reads a tau2 user scenario into what a scripted user may say, in first person.

Only the scenario's own text is read: reason for calling, known facts, instructions. Sentences
become goals (said one after another), reactions (said when the agent does something), and facts
(said when asked). Persona sentences are dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from components.envs.first_person import AGENT, capital, first_person

Trigger = Literal["confirm", "refuse", "order", "payment", "reason", "which"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the user can say of who they are; several values are given one after another."""

    names: tuple[str, ...]
    emails: tuple[str, ...]
    zips: tuple[str, ...]
    user_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """Something said once, when the agent does what ``trigger`` names."""

    trigger: Trigger
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a scripted user may say, in first person."""

    goals: tuple[str, ...]
    """Requests, in the order of telling; never empty."""
    reactions: tuple[Reaction, ...]
    facts: tuple[str, ...]
    """Sentences given only when a question matches them."""
    known: tuple[str, ...]
    """The known_info sentences (address, home town), given only when asked."""
    identity: Identity


# Sentences about the agent's moves: said only when the move happens.
_REACTIVE = re.compile(
    r"\b(?:if|when|once)\b[^,.]*\b(?:agent|it) (?:\w+ly )?(?:asks?|says?|refuses?|cannot|can't|can"
    r" not|insists?|denies|tells?|mentions?|gives?|provides?|finds?|doesn't|does not|is unable)\b"
    r"|\b(?:if|when) asked\b|\bif that (?:fails|doesn't work)\b",
    re.I,
)
_NEW_GOAL = re.compile(
    r"(?:and |but )?(?:you(?:'d| would)? also|also\b|lastly|finally|and finally|in another order|"
    r"additionally|in addition|you then\b|second\b|after (?:this|that|the)\b|"
    r"for (?:order )?#)",
    re.I,
)
_TOGETHER = re.compile(r"at the same time|together|in one go|up ?front|very first message", re.I)
# How to behave, not what to say. "at the same time" and the like are read before these are dropped.
_MANNER = re.compile(
    r"(?:you are|you're) (?!okay|willing|certain|sure|not|.*\b(?:you want|to complain)\b)|be \w+|"
    r"do not (?!want)|don't |make (?:sure|every)|try to|your approach|provide all|mention the two|"
    r"you (?:like to|tend|speak|talk|randomly|try|always)\b|always ",
    re.I,
)
# An instruction that is a request of its own.
_REQUEST = re.compile(
    r"(?:then |after that |finally,? )?you (?:also )?want to (?:add|book|cancel|change|check|"
    r"downgrade|exchange|know|modify|remove|return|upgrade)\b",
    re.I,
)
_ZIP = re.compile(r"\bzip ?code\b", re.I)


def split_sentences(text: str) -> list[str]:
    """Split running text into sentences; abbreviations do not occur in the scenarios."""
    text = re.sub(r"(?<![.!?;:\n]) ?\n(?!\n)", " ", text.strip())  # a wrapped line
    parts = re.split(r"(?<=[.!?;])\s+(?=[A-Z(#])|\n+", text)
    cleaned = (part.strip().lstrip(".; ").strip() for part in parts)
    return [part for part in cleaned if re.search(r"\w", part)]


def _said(clause: str) -> str:
    """A reaction's clause (``say you ordered it by mistake``) as words of the user."""
    clause = re.sub(
        r"^(?:then |just |please )*(?:you )?(?:then )?(?:do not say yes immediately, because |"
        r"(?:say|mention|respond exactly with|correct yourself and say)\s+(?:that )?)",
        "",
        clause.strip(),
        flags=re.I,
    )
    clause = re.sub(r" (?:initially|first)\b|\s*\((?:common|don't)[^)]*\)", "", clause).strip(
        " '\""
    )
    clause = re.sub(r"^(?:you )?ask (?:explicitly )?(?:to|for)\b", "you want to", clause).replace(
        "want to changing", "want to change"
    )
    clause = re.sub(r"^(you made a mistake and )?provide (?=#?W?\d)", r"\1it is ", clause)
    clause = re.sub(r"^([^']*)'\.?$", r"\1", clause)  # a closing quote whose opening one is gone
    clause = re.sub(r"^go for\b", "you prefer", clause)
    clause = re.sub(r"^suddenly change your mind", "you have changed your mind", clause)
    if re.match(
        r"(?:only|return|cancel|exchange|modify|do not|transfer|just|use|change|see|check)\b",
        clause,
        re.I,
    ):
        return "Please " + first_person(clause)[:1].lower() + first_person(clause)[1:]
    if re.match(r"agree\b|insist\b|accept\b|carry\b|would\b", clause, re.I):
        clause = "you " + clause
    return first_person(clause)


def _read_reactions(sentences: list[str]) -> tuple[Reaction, ...]:
    reactions: list[Reaction] = []
    last: Trigger | None = "refuse"
    for sentence in sentences:
        condition, _, clause = sentence.partition(",")
        # "If that doesn't work" goes on with what came before; zips have a queue of their own.
        chained = re.search(r"\bthat (?:fails|doesn't work)", condition, re.I)
        trigger = last if chained else _trigger(condition)
        last = trigger
        if trigger is None or not clause.strip():
            continue
        text = _said(clause)
        if trigger == "refuse" and not re.match(r"(?:I|Please)\b", text):
            text = "In that case, " + text[:1].lower() + text[1:]
        reactions.append(Reaction(trigger=trigger, text=_end(text)))
    return tuple(reactions)


def _trigger(condition: str) -> Trigger | None:
    if _ZIP.search(condition):
        return None
    if not re.search(r"\bask", condition, re.I):
        return "which" if re.search(r"several|options", condition) else "refuse"
    words: tuple[tuple[Trigger, str], ...] = (
        ("confirm", r"confirm"),
        ("order", r"order id|double check"),
        ("payment", r"payment"),
        ("reason", r"reason"),
    )
    for slot, word in words:
        if re.search(word, condition, re.I):
            return slot
    return "which"


def _end(text: str) -> str:
    text = text.rstrip(" ;,")
    return text if text.endswith((".", "!", "?")) else text + "."


def _statement(sentence: str) -> str:
    sentence = re.sub(
        r"^(?:Make sure (?:to|you) mention[^,]*? that|Insist that)\s+", "", sentence, flags=re.I
    )
    sentence = re.sub(r"^(?:Tell the agent|Mention) that\s+", "", sentence, flags=re.I)
    sentence = re.sub(r",? but do not reveal it to the agent", "", sentence)
    return _end(first_person(sentence.strip("(). ") if sentence.startswith("(") else sentence))


def _split_reactive(sentence: str) -> list[str]:
    """Cut ``A, and if the agent asks ..., B`` before its reactive part."""
    parts = re.split(rf",?\s+(?:and|but) (?=(?:if|when) {AGENT})", sentence)
    return [capital(part) for part in parts]


def _identity(known: str, instructions: str) -> Identity:
    text = re.sub(r"\bYou name\b", "Your name", known)
    emails = tuple(re.findall(r"[\w.]+@[\w.]+\w", text))
    user_ids = tuple(re.findall(r"\b[a-z]+_[a-z]+_\d+\b", text))
    zips = tuple(re.findall(r"\b\d{5}\b", text))
    for sentence in split_sentences(instructions):
        if _ZIP.search(sentence):
            told = re.findall(r"\b\d{5}\b", instructions)
            zips = tuple(dict.fromkeys((*told, *zips)))
            break
    names = [
        f"{first} {last}"
        for first, last in re.findall(
            r"(?:[Nn]ame is|[Yy]ou(?: a|')re|called)\s+([A-Z][a-z]+) ([A-Z][a-z]+)", text
        )
    ]
    for user_id in user_ids:
        names.append(" ".join(part.title() for part in user_id.split("_")[:2]))
    if not names:
        for email in emails:
            found = re.match(r"([a-z]+)\.([a-z]+)\d*@", email)
            names += [f"{found.group(1).title()} {found.group(2).title()}"] if found else []
    return Identity(names=tuple(dict.fromkeys(names)), emails=emails, zips=zips, user_ids=user_ids)


def _read_goals(reason: str) -> tuple[list[list[str]], list[str], list[str]]:
    """Group the reason's sentences into goals; also its reactive and its withheld sentences."""
    goals: list[list[str]] = []
    reactive: list[str] = []
    withheld: list[str] = []
    for whole in split_sentences(reason):
        for sentence in _split_reactive(whole):
            if "intended task" in sentence or re.match(r"as you are interacting", sentence, re.I):
                continue
            if _REACTIVE.search(sentence):
                reactive.append(sentence)
                continue
            if "do not reveal it" in sentence.lower():
                withheld.append(sentence)
                continue
            told = re.match(r"make sure (?:to|you) mention[^,]* that ", sentence, re.I)
            if _TOGETHER.search(sentence) and goals and _MANNER.match(sentence):
                goals = [[part for goal in goals for part in goal]]
                continue
            emotion = re.match(r"you(?: a|')re (?:contact|angry|consider|trying)", sentence, re.I)
            if _MANNER.match(sentence) and not told and not emotion:
                continue
            if goals and not _NEW_GOAL.match(sentence):
                goals[-1].append(sentence)
            else:
                goals.append([sentence])
    return goals, reactive, withheld


def read_scenario(user_scenario: Any) -> Scenario:
    """Read ``task.user_scenario`` of a tau2 task.

    Raises:
        ValueError: if the scenario has no structured instructions or no reason for calling.
    """
    fields = getattr(user_scenario, "instructions", None)
    reason = getattr(fields, "reason_for_call", None)
    if not reason:
        raise ValueError(
            "user='scripted' needs a scenario with the field reason_for_call; "
            f"this one has instructions of type {type(fields).__name__}"
        )
    known = getattr(fields, "known_info", None) or ""
    instructions = getattr(fields, "task_instructions", None) or ""
    goals, reactive, withheld = _read_goals(reason)
    facts: list[str] = []
    for whole in split_sentences(instructions):
        for sentence in _split_reactive(whole):
            if _REACTIVE.search(sentence):
                reactive.append(sentence)
            elif _REQUEST.match(sentence):
                goals.append([sentence])
            elif not _MANNER.match(sentence) and not re.match(
                r"You(?: a|')re (?:a|very)\b", sentence
            ):
                facts.append(sentence)
    if _TOGETHER.search(instructions) and goals:
        goals = [[part for goal in goals for part in goal]]
    return Scenario(
        goals=tuple(" ".join(_statement(part) for part in goal) for goal in goals)
        or (_statement(reason),),
        reactions=(
            *_read_reactions(reactive),
            *(Reaction(trigger="which", text=_statement(part)) for part in withheld),
        ),
        facts=tuple(_statement(part) for part in facts),
        known=tuple(_statement(part) for part in split_sentences(known)),
        identity=_identity(known, instructions),
    )
