"""Conversations by hand: ``you`` is the agent, ``call`` a tool call and its answer."""

from __future__ import annotations

import json

from components.envs.base import Message, ToolCall
from components.safety.conversation import Conversation, domain_facts

GREETING = Message(role="assistant", content="Hi! How can I help you today?")
ME = "sophia_thomas_5301"
MAIL = "sophia.thomas1364@example.com"
PENDING, DELIVERED = "#W4862767", "#W1867876"
PAYPAL, VISA, MASTERCARD = "paypal_5297429", "credit_card_7326294", "credit_card_1034663"
GIFT_CARD = "gift_card_9178183"
OTHER, OTHER_ORDER, OTHER_MAIL = "ethan_thomas_1791", "#W7764382", "ethan.thomas7730@example.com"


def user(text):
    return [Message(role="user", content=text)]


def you(text):
    return [Message(role="assistant", content=text)]


def calls(*named, text="", answers=None, error=False):
    """One assistant message with several (name, arguments)."""
    made = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in named)
    told = answers or ["{}"] * len(named)
    return [
        Message(role="assistant", content=text, tool_calls=made),
        *(
            Message(role="tool", content=a if isinstance(a, str) else json.dumps(a), error=error)
            for a in told
        ),
    ]


def call(name, answer="{}", *, error=False, **arguments):
    return calls((name, arguments), answers=[answer], error=error)


def talk(*parts, domain="retail"):
    messages = [GREETING, *(message for part in parts for message in part)]
    return Conversation(task_id="0", messages=tuple(messages), facts=domain_facts(domain))


LOGIN = [
    *user(f"I need help. My email is {MAIL}."),
    *call("find_user_id_by_email", ME, email=MAIL),
]


def order(order_id, status=None):
    """What get_order_details answers: the record in the start database."""
    record = dict(domain_facts("retail").orders[order_id])
    return record | ({"status": status} if status else {})


def read(order_id, status=None):
    return call("get_order_details", order(order_id, status), order_id=order_id)
