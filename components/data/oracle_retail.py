"""A demonstrator for retail: knows what is to be done, and does it as the policy asks.

It reads the task's gold writes and required information, so it is for training tasks only. From
the user it takes identity, reasons and consent; from the tools everything it tells. It

1. authenticates with facts that the user said;
2. asks for all requests before it starts;
3. reads the profile, orders and products that the request needs;
4. lists each write and waits for a yes, then makes one call with no text beside it;
5. tells the results and the required information, and asks if there is anything else.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Generator, Sequence
from typing import Any

from components.data.oracle_facts import PHRASES, RetailFacts, done, has_said
from components.envs.base import Message, ToolCall, ToolSpec

WRITES = (
    "cancel_pending_order",
    "exchange_delivered_order_items",
    "modify_pending_order_address",
    "modify_pending_order_items",
    "modify_pending_order_payment",
    "modify_user_address",
    "return_delivered_order_items",
)
TRANSFER_TEXT = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT. PLEASE HOLD ON."
MAX_ASKS = 6
"""Times that one question is repeated before the demonstrator goes on."""

_Turns = Generator[Message, None, Any]


class RetailOracle:
    """Plays the agent of one episode.

    Args:
        tau2_task: a tau2 ``Task`` with its evaluation criteria.
        seed: chooses among phrasings.
    """

    def __init__(self, tau2_task: Any, *, seed: int) -> None:
        criteria = tau2_task.evaluation_criteria
        actions = criteria.actions or []
        self._gold = [(action.name, dict(action.arguments)) for action in actions]
        self._infos = [str(info) for info in criteria.communicate_info or []]
        self._random = random.Random(f"retail oracle/{tau2_task.id}/{seed}")
        self._facts = RetailFacts()
        self._messages: tuple[Message, ...] = ()
        self._script: _Turns | None = None
        self._reads: set[str] = set()

    def act(self, messages: tuple[Message, ...], tools: Sequence[ToolSpec] = ()) -> Message:
        """The next turn.

        Args:
            messages: everything the agent has seen and said so far.
            tools: not needed, its tools are those of the retail domain.
        """
        self._messages = messages
        if self._script is None:
            self._script = self._play()
        return next(self._script)

    # -- what the conversation holds so far

    @property
    def _last(self) -> Message:
        return self._messages[-1]

    def _user_text(self) -> str:
        return "\n".join(m.content for m in self._messages if m.role == "user")

    def _own_texts(self) -> list[str]:
        return [m.content for m in self._messages if m.role == "assistant"]

    def _phrase(self, key: str) -> str:
        return self._random.choice(PHRASES[key])

    # -- single turns

    def _say(self, *parts: str) -> _Turns:
        yield Message(role="assistant", content=" ".join(part for part in parts if part))
        return self._last.content

    def _call(self, name: str, **arguments: Any) -> _Turns:
        """Call a tool; its result, or None when it refused."""
        yield Message(role="assistant", tool_calls=(ToolCall(name=name, arguments=arguments),))
        if self._last.error:
            return None
        try:
            result = json.loads(self._last.content)
        except ValueError:
            return self._last.content
        self._facts.learn(result)
        return result

    def _read(self, name: str, key: str) -> _Turns:
        """Read a record once."""
        if key not in self._reads:
            self._reads.add(key)
            argument = {"get_order_details": "order_id", "get_product_details": "product_id"}[name]
            yield from self._call(name, **{argument: key})

    # -- the conversation

    def _play(self) -> _Turns:
        name = yield from self._authenticate()
        yield from self._collect(f"Thank you, {name}.")
        yield from self._research()
        news = self._resolve(money=False)
        for tool, arguments in self._writes():
            news = yield from self._write(news, tool, arguments)
        if any(name == "transfer_to_human_agents" for name, _ in self._gold):
            summary = next(a["summary"] for n, a in self._gold if n == "transfer_to_human_agents")
            yield from self._call("transfer_to_human_agents", summary=summary)
            yield from self._say(TRANSFER_TEXT)
        news = " ".join(filter(None, [news, (yield from self._compute(news))]))
        while True:
            yield from self._say(news, self._phrase("end"))
            news = ""

    def _authenticate(self) -> _Turns:
        """Find the user with what they said; their first name."""
        text = yield from self._say(self._phrase("who"))
        for _ in range(MAX_ASKS):
            user_id = yield from self._find(text)
            if user_id is not None:
                profile = yield from self._call("get_user_details", user_id=user_id)
                return profile["name"]["first_name"]
            text = yield from self._say(self._phrase("who_again"))
        raise RuntimeError("the user could not be identified")

    def _find(self, text: str) -> _Turns:
        email = re.search(r"[\w.]+@[\w.]+\w", text)
        if email:
            return (yield from self._call("find_user_id_by_email", email=email.group()))
        name = re.search(r"\b([A-Z][a-z]+) ([A-Z][a-z]+)\b", text)
        zip_code = re.search(r"\b\d{5}\b", text)
        if name is None or zip_code is None:
            return None
        return (
            yield from self._call(
                "find_user_id_by_name_zip",
                first_name=name.group(1),
                last_name=name.group(2),
                zip=zip_code.group(),
            )
        )

    def _collect(self, opening: str) -> _Turns:
        """Ask until the user has named every request."""
        for _ in range(MAX_ASKS):
            text = yield from self._say(opening, self._phrase("more"))
            if len(text) < 40 and re.search(r"\b(?:all|everything|nothing)\b", text, re.I):
                return
            opening = "I see."

    # -- reading

    def _writes(self) -> list[tuple[str, dict[str, Any]]]:
        """The gold writes; of two attempts at the same thing only the last."""
        last: dict[str, tuple[str, dict[str, Any]]] = {}
        for name, arguments in self._gold:
            if name in WRITES:
                same = {k: v for k, v in arguments.items() if k != "payment_method_id"}
                key = json.dumps([name, same], sort_keys=True)
                last.pop(key, None)
                last[key] = (name, arguments)
        return list(last.values())

    def _research(self) -> _Turns:
        """Read the orders, then the products, that the request needs."""
        said = self._user_text()
        mentioned = [o for o in self._facts.user["orders"] if o.strip("#W") in said]
        everything = re.search(
            r"\ball\b.{0,20}\borders|\ball (?:possible|things)|all my", said, re.I
        )
        for order_id in [*mentioned, *self._facts.user["orders"]]:
            if everything or self._lacks_order(order_id in mentioned):
                yield from self._read("get_order_details", order_id)
        for _, arguments in self._writes():
            for item_id in arguments.get("item_ids", ()) if "new_item_ids" in arguments else ():
                item = self._facts.item(arguments["order_id"], item_id)
                yield from self._read("get_product_details", item["product_id"])
        yield from self._research_infos()

    def _lacks_order(self, mentioned: bool) -> bool:
        """Whether a write's order or address has not been seen yet."""
        said = self._user_text()
        for _, arguments in self._writes():
            order_id = arguments.get("order_id")
            if order_id and order_id not in self._facts.orders:
                return True
            street = arguments.get("address1", "")
            if street not in said and street not in self._facts.streets():
                return True
        return mentioned and not self._facts.orders

    def _research_infos(self) -> _Turns:
        """Read on until the required information can be told, or there is nothing left to read."""
        gold_orders = [a["order_id"] for n, a in self._gold if n == "get_order_details"]
        for order_id in self._facts.user["orders"]:
            if self._unresolved() and (order_id in gold_orders or not gold_orders):
                yield from self._read("get_order_details", order_id)
        items = [item for order in self._facts.orders.values() for item in order["items"]]
        products = [a["product_id"] for n, a in self._gold if n == "get_product_details"]
        if not products:
            concerned = [i for _, a in self._writes() for i in a.get("item_ids", ())]
            products = [i["product_id"] for i in items if i["item_id"] in concerned]
        seen = {item["product_id"] for item in items}
        for product_id in products:
            if self._unresolved() and product_id in seen:
                yield from self._read("get_product_details", product_id)
        unseen = [product_id for product_id in products if product_id not in seen]
        if self._unresolved() and unseen:
            listed = yield from self._call("list_all_product_types")
            for product_id in unseen:
                if product_id in (listed or {}).values():
                    yield from self._read("get_product_details", product_id)

    def _unresolved(self) -> list[str]:
        later = any(name == "calculate" for name, _ in self._gold)
        return [
            info
            for info in self._infos
            if not (later or self._facts.tell(info) or self._facts.sums(info, self._writes()))
        ]

    # -- telling

    def _resolve(self, *, money: bool, said: str = "") -> str:
        """Sentences for the information that is not told yet and stands in a tool result."""
        told: list[str] = []
        for info in self._infos:
            if has_said(info, [*self._own_texts(), said, *told]):
                continue
            sentence = self._facts.tell(info)
            if sentence and (money or "$" not in sentence):
                told.append(sentence)
        return " ".join(told)

    def _compute(self, said: str) -> _Turns:
        """Tell what is left, with the calculator where no tool result holds it."""
        payments = [a.get("payment_method_id", "") for _, a in self._writes()]
        if "balance" in self._user_text() and any("gift_card" in pay for pay in payments):
            yield from self._call("get_user_details", user_id=self._facts.user["user_id"])
        told = [self._resolve(money=True, said=said)]
        expressions = [a["expression"] for n, a in self._gold if n == "calculate"]
        for info in self._infos:
            if has_said(info, [*self._own_texts(), said, *told]):
                continue
            expression = (
                expressions.pop(0) if expressions else (self._facts.sums(info, self._writes()))
            )
            if expression is None:
                continue
            result = yield from self._call("calculate", expression=expression)
            amount = f"{abs(float(result)):.2f}"
            told.append(f"The total is ${info if float(info) == float(amount) else amount}.")
        return " ".join(filter(None, told))

    # -- writing

    def _write(self, news: str, tool: str, arguments: dict[str, Any]) -> _Turns:
        """List a write, wait for a yes, make it; what to say of its result."""
        said = self._user_text()
        if tool == "cancel_pending_order" and not re.search(r"mistake|no longer need", said, re.I):
            ask = "What is the reason: no longer needed, or ordered by mistake?"
            yield from self._say(news, f"I can cancel order {arguments['order_id']}.", ask)
            news = ""
        elif "payment_method_id" in arguments and not re.search(
            r"card|paypal|payment|\bGC\b|\bpaid\b", said, re.I
        ):
            yield from self._say(news, "Which payment method would you like to use?")
            news = ""
        street = arguments.get("address1", "")
        if street not in said and street not in self._facts.streets():
            yield from self._say(news, "What is the full new address?")
            news = ""
        question = "all_items" if "new_item_ids" in arguments else "confirm"
        for _ in range(MAX_ASKS):
            listing = self._facts.listing(tool, arguments)
            text = yield from self._say(news, listing, self._phrase(question))
            if text.lower().startswith("yes"):
                break
            news = "Understood."
        result = yield from self._call(tool, **arguments)
        if result is None:
            return f"That was refused: {self._last.content.removeprefix('Error: ')}."
        return done(tool, arguments)
