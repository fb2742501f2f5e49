"""From what a scenario tells its user (``you want ...``) to what the user says (``I want ...``)."""

from __future__ import annotations

import re

AGENT = r"the (?:customer service |service )?agent"
"""How scenarios name whom the user talks to."""


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def first_person(text: str) -> str:
    """Turn a sentence told to the user (``you want ...``) into one told by the user.

    ``you`` becomes ``I`` or ``me``, ``your`` ``my``, and ``the agent`` becomes ``you``.
    """
    rules = (
        (r"^You (name|mobile data)\b", r"Your \1"),  # the first three are slips of the scenarios
        (r"\byour forgot\b", "you forgot"),
        (r"\breturn you\b", "return your"),
        (r"^ask (?=how|what|if|whether|which)", "please tell me "),
        (rf"\b(?:you )?(?:also )?(?:explicitly )?ask {AGENT} (?:explicitly )?to\b", "please"),
        (rf"\b(?:you )?(?:also )?ask {AGENT} (?:explicitly )?(?:about )?", "please tell me "),
        (r"\byou (first |also |then )?ask about\b", r"please \1tell me about"),
        (r"\byou (first |also |then )?ask (?=if|whether|how|what)", r"please \1tell me "),
        (rf"\b{AGENT}'s\b", "\x01"),
        (rf"\b{AGENT} (?:is|has|does|says|thinks)\b", lambda m: _plural(m.group(0))),
        (rf"\b{AGENT}\b", "\x00"),
        (r"\byou are\b", "I am"),
        (r"\byou're\b", "I'm"),
        (r"\bare you\b", "am I"),
        (r"\byou were\b", "I was"),
        (r"\byourself\b", "myself"),
        (r"\byours\b", "mine"),
        (r"\byour\b", "my"),
        (
            r"\b(for|to|of|with|from|about|at|by|tell|told|gives?|helps?|lets?|asks?|asked|sent|send|saves?"
            r"|allows?|charges?|makes?|bothers?|costs?|suits?) you\b(?!')",
            r"\1 me",
        ),
        (r"\byou(?=\s*(?:[.,;!?)]|$))", "me"),
        (r"\byou\b", "I"),
        (r"\b(and|but) are (?=(?:not|in|willing)\b)", r"\1 am "),
        ("\x00", "you"),
        ("\x01", "your"),
    )
    for pattern, new in rules:
        text = re.sub(pattern, new, text, flags=re.I)  # type: ignore[arg-type]
    return capital(re.sub(r"\s+", " ", text).strip())


def _plural(phrase: str) -> str:
    verb = phrase.rsplit(" ", 1)[1].lower()
    return (
        "\x00 " + {"is": "are", "has": "have", "does": "do", "says": "say", "thinks": "think"}[verb]
    )
