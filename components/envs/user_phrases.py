"""Phrasings of the scripted users, in disjoint sets: one to train on, one that is held out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

_TRAIN: Mapping[str, tuple[str, ...]] = {
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
_HELD_OUT: Mapping[str, tuple[str, ...]] = {
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
    {"train": _TRAIN, "held_out": _HELD_OUT}
)
"""What the users of retail and airline say around the facts of their scenario."""

_MOCK_TRAIN: Mapping[str, tuple[str, ...]] = {
    "hello": ("Hi! ",),
    "thanks": ("Thank you. ", "Great, thanks. ", "Perfect. "),
    "refused": ("Too bad. ",),
    "end": ("That is all. ",),
    "leave": ("I have to go now. ",),
    "yes": ("Yes, please go ahead.",),
    "user_id": ("My user id is {0}.",),
    "no_user_id": ("I don't remember my user id.",),
    "name": ("My name is {0}.",),
    "description": ("The description is '{0}'.",),
    "no_description": ("It needs no description.",),
    "create": (
        "Please create a task titled '{0}'",
        "I need a new task called '{0}'",
        "Could you add a task named '{0}'",
    ),
    "the_new": ("the new task", "the task you just created"),
    "update": (
        "Please mark {0} as {1}.",
        "I would like {0} to be {1}.",
        "Please change the status of {0} to {1}.",
    ),
    "delete": ("Please delete {0}.", "I want to delete {0}."),
    "compliment": ("Could you pay me a compliment?",),
    "create_untitled": ("Please create a task for me.", "I need a new task."),
    "title": ("The title is '{0}'.",),
    "has_description": ("It needs a description.",),
    "update_unnamed": (
        "I want to change the status of one of my tasks.",
        "The status of one of my tasks has changed.",
    ),
    "human": ("I want to talk to a human.", "Please let me talk to a human agent."),
}
_MOCK_HELD_OUT: Mapping[str, tuple[str, ...]] = {
    "hello": ("Good morning. ", "Hey there, "),
    "thanks": ("Lovely. ", "Much appreciated. "),
    "refused": ("What a pity. ", "Never mind then. "),
    "end": ("Nothing else from me. ", "I am all set. "),
    "leave": ("I am out of time. ",),
    "yes": ("Yes, that is right.", "Yes, I confirm."),
    "user_id": ("{0} is my id.", "Look for {0}."),
    "no_user_id": ("No idea what my id is.",),
    "name": ("Of course. My name is {0}.", "Sure. My name is {0}."),
    "description": ("Its description is '{0}'.", "As for details, the description is '{0}'."),
    "no_description": ("Leave the details empty.",),
    "create": (
        "There should be one more task named '{0}'",
        "Let us put down a task titled '{0}'",
    ),
    "the_new": ("the one we just added", "that latest one"),
    "update": ("From now on {0} should be {1}.", "Kindly set {0} to {1}."),
    "delete": ("Would you delete {0}?", "It is time to delete {0}."),
    "compliment": ("A compliment would make my day.",),
    "create_untitled": ("Let us put down a new task.", "There is a new task to add."),
    "title": ("Sure, the title is '{0}'.", "Its title is '{0}'."),
    "has_description": ("There is a description to go with it.",),
    "update_unnamed": ("The status of one of my tasks is out of date.",),
    "human": ("A human should look after this.", "Could a human take over?"),
}
MOCK_PHRASES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"train": _MOCK_TRAIN, "held_out": _MOCK_HELD_OUT}
)
"""What the user of the mock domain says."""


def phrase_set(
    sets: Mapping[str, Mapping[str, tuple[str, ...]]], name: str
) -> Mapping[str, tuple[str, ...]]:
    """One set by name.

    Raises:
        ValueError: for a set that there is not.
    """
    if name not in sets:
        close = difflib.get_close_matches(str(name), list(sets), n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"paraphrases: {name!r} is none of {', '.join(sets)}{hint}")
    return sets[name]
