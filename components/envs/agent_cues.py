"""What the scripted user recognises in the agent's words."""

from __future__ import annotations

import re

from components.envs.scenario import Trigger

ASK = re.compile(
    r"\b(?:provide|give|share|tell|what(?:'s| is| are)|may i|can i|could i|have your|need|know|"
    r"enter|verify|which|confirm your|under what|let me know)\b",
    re.I,
)
CONFIRM = re.compile(
    r"\(yes\b|\byes or no\b|\byes\b.{0,20}\b(?:confirm|proceed)|\bgo ahead\b|\bconfirm(?:ation)?\b",
    re.I,
)
# Also asks for consent, unless the question has a which, what or how in it.
OFFER = re.compile(
    r"\bproceed\b|\b(?:shall|should) (?:i|we)\b|\b(?:would you like|do you want)(?: me)? to\b|"
    r"\b(?:is|does) (?:this|that|it|everything) (?:look |sound )?(?:correct|right|ok|okay|good)\b|"
    r"\bdo you (?:agree|accept)\b",
    re.I,
)
OPEN = re.compile(r"\b(?:which|what|how|where|when|why)\b", re.I)
MORE = re.compile(
    r"\b(?:any ?thing|something) (?:else|more)\b|\bany (?:other|more|further)\b|\beverything you\b|"
    r"\ball (?:the |of the )?(?:items|requests|changes)\b|\b(?:is|will) that (?:be )?all\b|"
    r"\bhow else\b",
    re.I,
)
DONE = re.compile(
    r"\b(?:done|cancell?ed|returned|exchanged|modified|updated|changed|processed|completed?|submitted|"
    r"requested|succeeded|successful(?:ly)?|placed)\b",
    re.I,
)
REFUSES = re.compile(
    r"\b(?:can ?not|can't|unable|not (?:possible|able|allowed|available|found)|unfortunately|"
    r"don't see|does(?:n't| not) (?:exist|match)|no (?:order|user|account|item)|could(?:n't| not)|"
    r"only be)\b",
    re.I,
)
TRANSFERS = re.compile(r"being transferred|transferr(?:ed|ing) you|transfer you to a human", re.I)
# (trigger of a reaction, the question, the sentences that answer it)
SLOTS: tuple[tuple[Trigger | None, str, str], ...] = (
    (
        "payment",
        r"\bpay(?:ment)?\b|\bcard\b|\brefund(?:ed)? to\b|paypal",
        r"(?i)credit ?card|gift ?card|paypal|payment|visa|mastercard|amex|\bGC\b",
    ),
    ("reason", r"\breason\b|\bwhy\b", r"(?i)mistake|no longer need"),
    (
        "order",
        r"\border (?:id|number|#)|\bwhich order|\breservation (?:id|number)|\bconfirmation number",
        r"#?W\d{7}|\b(?=[A-Z]*\d)[A-Z0-9]{6}\b",
    ),
    (
        None,
        r"\baddress\b|\bwhere\b",
        r"\b\d+ [A-Z]\w+.*\b\d{5}\b",
    ),
    (None, r"\baddress\b|\bwhere\b", r"(?i)address|\bplace\b|\bhome\b|\blives?\b"),
)
_SMALL_WORDS = frozenset(
    re.findall(
        r"\w+",
        "about also and any are can could did does for from have how into item its like need new "
        "not order please that the there this today want was what which will with would you your",
    )
)


def content_words(text: str) -> frozenset[str]:
    """The words of a text that carry meaning, plural endings off."""
    words = re.findall(r"[a-z0-9][a-z0-9'-]{2,}", text.lower())
    return frozenset(word.rstrip("s") for word in words if word not in _SMALL_WORDS)
