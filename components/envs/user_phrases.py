"""Phrasings of the scripted user, in disjoint sets."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_PLAIN: Mapping[str, tuple[str, ...]] = {
    "hello": ("Hi.", "Hello.", "Hi there."),
    "email": ("My email is {0}.", "It is {0}.", "Sure, my email address is {0}."),
    "name": ("My name is {0}.", "I am {0}."),
    "zip": ("My zip code is {0}.", "The zip code is {0}."),
    "user_id": ("My user id is {0}.", "The user id is {0}."),
    "no_email": ("I don't remember my email address.", "Sorry, I do not know my email."),
    "unknown": ("I don't remember.", "I don't remember that, sorry."),
    "yes": ("Yes, please go ahead.", "Yes, please do.", "Yes, go ahead please."),
    "all": ("That is all I need.", "That is everything for now."),
    "payment": ("Please use the original payment method.", "The original payment method, please."),
    "reason": ("I no longer need it.", "It is no longer needed."),
    "okay": ("Okay.", "All right."),
    "want": ("I want to", "I would like to"),
}
_VARIED: Mapping[str, tuple[str, ...]] = {
    "hello": ("Good morning!", "Hey, I could use some help.", "Good day."),
    "email": ("You can find me under {0}.", "{0} is what I signed up with.", "Try {0}."),
    "name": ("It's {0}.", "You should have me as {0}.", "{0} is the name."),
    "zip": ("Zip: {0}.", "I'm in {0}.", "My area's zip is {0}."),
    "user_id": ("My account is {0}.", "Login: {0}."),
    "no_email": ("No idea which email I used.", "I can't recall the email on my account."),
    "unknown": ("I have no idea.", "I really can't say.", "Not sure about that."),
    "yes": ("Yes, I confirm.", "Yes, that works for me.", "Yes, proceed."),
    "all": ("Nothing more from my side.", "No, nothing else."),
    "payment": ("Just put it on whatever I paid with originally.", "Same way I paid, please."),
    "reason": ("I just no longer need this.", "Simply no longer needed."),
    "okay": ("Fine.", "I see.", "Got it."),
    "want": ("I'd like to", "I was hoping to"),
}
PHRASES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"plain": _PLAIN, "varied": _VARIED}
)
"""Disjoint sets of phrasings: train on one, test robustness on another."""
