"""What a retail demonstrator knows from tool results, and how it puts it into words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

PHRASES: Mapping[str, tuple[str, ...]] = {
    "who": (
        "I can help with that. Could you give me your email address, or your name and zip code?",
        "Sure. May I have your email address, or your name and zip code?",
    ),
    "who_again": (
        "I could not find that account. Could you give me your name and zip code, or your email?",
        "No account matches that. Could you give me your name and zip code, or another email?",
    ),
    "more": ("Is there anything else you need, or is that all?", "Do you need anything else?"),
    "end": (
        "Is there anything else I can help you with?",
        "Can I help you with anything else?",
    ),
    "confirm": ("Do you confirm (yes/no)?", "Shall I go ahead (yes/no)?"),
    "all_items": (
        "Are these all the items, and do you confirm (yes/no)?",
        "Is that all, and do you confirm (yes/no)?",
    ),
}
"""What the demonstrator says around the facts, several phrasings of each."""


def number(text: Any) -> float | None:
    """The number that a text is, or None."""
    try:
        return float(str(text).replace(",", "").lstrip("$"))
    except ValueError:
        return None


def has_said(info: str, texts: Sequence[str]) -> bool:
    """Whether one text holds ``info`` as the benchmark's COMMUNICATE check looks for it."""
    return any(info.lower() in text.lower().replace(",", "") for text in texts)


def full_address(address: Record) -> str:
    """An address on one line."""
    parts = [address[key] for key in ("address1", "address2", "city", "state", "zip")]
    return ", ".join(part for part in parts if part)


def done(tool: str, arguments: Record) -> str:
    """What a write has done, in words."""
    order_id = arguments.get("order_id", "")
    return {
        "cancel_pending_order": f"Order {order_id} is cancelled.",
        "exchange_delivered_order_items": f"The exchange for order {order_id} is requested.",
        "modify_pending_order_address": f"The address of order {order_id} is updated.",
        "modify_pending_order_items": f"Order {order_id} is modified.",
        "modify_pending_order_payment": f"The payment method of order {order_id} is updated.",
        "modify_user_address": "Your default address is updated.",
        "return_delivered_order_items": f"The return for order {order_id} is requested.",
    }[tool]


class RetailFacts:
    """The latest version of every record that a tool has shown."""

    def __init__(self) -> None:
        self.user: dict[str, Any] = {}
        self.orders: dict[str, dict[str, Any]] = {}
        self.products: dict[str, dict[str, Any]] = {}

    def learn(self, record: Any) -> None:
        """Keep a tool result that is a user, an order or a product."""
        if not isinstance(record, dict):
            return
        if "order_id" in record:
            self.orders[record["order_id"]] = record
        elif "variants" in record:
            self.products[record["product_id"]] = record
        elif "payment_methods" in record:
            self.user = record

    def item(self, order_id: str, item_id: str) -> Record:
        """An item of an order that has been read."""
        return next(i for i in self.orders[order_id]["items"] if i["item_id"] == item_id)

    def variant(self, item_id: str) -> Record:
        """A variant of a product that has been read."""
        return next(
            p["variants"][item_id] for p in self.products.values() if item_id in p["variants"]
        )

    def streets(self) -> list[str]:
        """First line of every address seen."""
        holders = [*self.orders.values(), *([self.user] if self.user else [])]
        return [holder["address"]["address1"] for holder in holders]

    def listing(self, tool: str, arguments: Record) -> str:
        """What a write would do, in words."""
        order_id = arguments.get("order_id", "")
        payment = arguments.get("payment_method_id", "")
        if tool == "cancel_pending_order":
            return f"I will cancel order {order_id} with the reason '{arguments['reason']}'."
        if tool == "modify_user_address":
            return f"I will change your default address to {full_address(arguments)}."
        if tool == "modify_pending_order_address":
            return f"I will change the address of order {order_id} to {full_address(arguments)}."
        if tool == "modify_pending_order_payment":
            return f"I will change the payment method of order {order_id} to {payment}."
        items = [self.item(order_id, item_id) for item_id in arguments["item_ids"]]
        if tool == "return_delivered_order_items":
            names = ", ".join(item["name"] for item in items)
            return f"I will return from order {order_id}: {names}. The refund goes to {payment}."
        changes = []
        for item, new_id in zip(items, arguments["new_item_ids"], strict=True):
            new = self.variant(new_id)
            options = ", ".join(str(option) for option in new["options"].values())
            changes.append(f"{item['name']} to {new_id} ({options}, ${new['price']})")
        verb = "exchange" if tool.startswith("exchange") else "change"
        listed = "; ".join(changes)
        return f"In order {order_id} I will {verb}: {listed}. The difference goes to {payment}."

    def tell(self, info: str) -> str | None:
        """A sentence that holds ``info``, made of one value of a record; None if there is none."""
        wanted = number(info)
        for record, path, value in self._leaves():
            if wanted is not None and re.fullmatch(r"[\d.]+", info):
                found = number(value) == wanted and path[-1] != "item_id"
            else:
                found = info.lower() in str(value).lower() and path[-1] != "zip"
            sentence = _sentence(record, path, value, info) if found else None
            if sentence:
                return sentence
        return self._count(info)

    def _count(self, info: str) -> str | None:
        for product in self.products.values():
            free = sum(variant["available"] for variant in product["variants"].values())
            if info == str(free):
                return f"There are {free} {product['name']} options available."
        return None

    def _leaves(self) -> Iterator[tuple[Record, tuple[str, ...], Any]]:
        for record in (*self.orders.values(), *self.products.values(), self.user):
            for path, value in _walk(record, ()):
                yield record, path, value

    def refunds(self, writes: Sequence[tuple[str, Record]]) -> str:
        """The amounts that cancellations and returns give back, as a sum."""
        terms: list[Any] = []
        for tool, arguments in writes:
            if tool == "cancel_pending_order":
                order = self.orders[arguments["order_id"]]
                terms.append(order["payment_history"][0]["amount"])
            elif tool == "return_delivered_order_items":
                items = [self.item(arguments["order_id"], i) for i in arguments["item_ids"]]
                terms += [item["price"] for item in items]
        return " + ".join(str(term) for term in terms)

    def sums(self, info: str, writes: Sequence[tuple[str, Record]] = ()) -> str | None:
        """An expression over amounts of tool results whose value is ``info``; None if none is.

        Looked for in the refunds of all writes, then in sums of up to four price differences,
        payments, prices and savings, then in single differences of two prices.
        """
        wanted = number(info)
        if wanted is None or "." not in info:
            return None
        orders = list(self.orders.values())
        refunds = self.refunds(writes)
        if refunds and _equal(sum(float(term) for term in refunds.split(" + ")), wanted):
            return refunds
        pools = (
            [o["exchange_price_difference"] for o in orders if o.get("exchange_price_difference")],
            [o["payment_history"][0]["amount"] for o in orders],
            [item["price"] for o in orders for item in o["items"]],
        )
        for pool in pools:
            for count in range(2, 5):
                for terms in itertools.combinations(pool, count):
                    if _equal(sum(terms), wanted):
                        return " + ".join(str(term) for term in terms)
        savings = self._savings()
        for count in (1, 2):
            for chosen in itertools.combinations(savings, count):
                if _equal(sum(old - new for old, new in chosen), wanted):
                    return " + ".join(f"({old} - {new})" for old, new in chosen)
        return None

    def _savings(self) -> list[tuple[float, float]]:
        """(price, price of another variant) of every item whose product has been read."""
        pairs = []
        for order in self.orders.values():
            for item in order["items"]:
                variants = self.products.get(item["product_id"], {"variants": {}})["variants"]
                pairs += [(item["price"], v["price"]) for v in variants.values() if v["available"]]
        return pairs


def _equal(one: float, other: float) -> bool:
    return abs(abs(one) - other) < 0.005


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, (*path, str(key)))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _walk(inner, (*path, str(place)))
    elif value is not None:
        yield path, value


def _follow(record: Any, path: Sequence[str]) -> Any:
    for key in path:
        record = record[int(key)] if isinstance(record, list) else record[key]
    return record


def _sentence(record: Record, path: tuple[str, ...], value: Any, info: str) -> str | None:
    """One value in words, by where it stands."""
    order = record.get("order_id", "")
    holder = _follow(record, path[:-1])
    name = holder.get("name", "") if isinstance(holder, dict) else ""
    thing = name if isinstance(name, str) and name else str(record.get("name", "item"))
    if "tracking_id" in path:
        return f"The tracking number of order {order} is {value}."
    if "address" in path:
        whose = f"Order {order} goes to" if order else "Your default address is"
        return f"{whose} {full_address(record['address'])}."
    if "options" in path:
        parent = _follow(record, path[: path.index("options")])
        thing = str(parent.get("name") or record.get("name"))
        options = ", ".join(f"{key} {option}" for key, option in parent["options"].items())
        return f"The {thing} has {options}."
    if path[-1] == "price":
        return f"The price of the {thing} is ${info}."
    if path[-1] == "name" and order:
        return f"Order {order} holds: {value}."
    if path[-1] == "balance":
        return f"Your gift card balance is ${info}."
    if path[-1] == "amount":
        kind = "You paid" if holder["transaction_type"] == "payment" else "Your refund is"
        return f"{kind} ${info} for order {order}."
    if path[-1] == "exchange_price_difference":
        return f"The price difference for order {order} is ${info}."
    return None
