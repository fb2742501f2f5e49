"""Databases of tau2-bench: copied on write, and compared by what differs from a common base.

Copying all users and orders of retail takes 50 ms and hashing them 35 ms; an episode looks at a
handful.
"""

from __future__ import annotations

import copy
import json
from collections.abc import ItemsView, Mapping, ValuesView
from typing import Any


class BaseRecords(dict):
    """The records of a parsed database: shared by every environment, never changed."""

    def __init__(self, records: Mapping[str, Any]) -> None:
        super().__init__(records)
        self._texts: dict[str, str] = {}

    def text(self, key: str) -> str | None:
        """The JSON text of a record, None where there is none."""
        if key not in self:
            return None
        if key not in self._texts:
            self._texts[key] = _text(self[key])
        return self._texts[key]


class SharedRecords(dict):
    """Records of a database, shared with a base until looked at: then a copy of our own.

    Writes to a record never reach the base. pydantic dumps the dict's own storage, so a dump (and
    the official hash) sees base records and copies alike.
    """

    def __init__(self, base: BaseRecords) -> None:
        super().__init__(base)
        self._base = base
        self._own: set[str] = set()

    def changes(self) -> dict[str, str | None]:
        """JSON text of each record that differs from the base, None for one that is gone."""
        found: dict[str, str | None] = dict.fromkeys(self._base.keys() - self.keys())
        for key in self._own & self.keys():
            text = _text(super().__getitem__(key))
            if text != self._base.text(key):
                found[key] = text
        return found

    def __getitem__(self, key: str) -> Any:
        record = super().__getitem__(key)
        if key not in self._own:
            record = record.model_copy(deep=True)
            self[key] = record
        return record

    def __setitem__(self, key: str, record: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, record)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def values(self) -> ValuesView:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView:  # type: ignore[override]
        return ItemsView(self)

    def pop(self, key: str, *default: Any) -> Any:
        if key in self:
            record = self[key]
            del self[key]
            return record
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **records: Any) -> None:
        for key, record in dict(*others, **records).items():
            self[key] = record

    def popitem(self) -> Any:
        raise TypeError("SharedRecords has no popitem")

    def __ior__(self, other: Any) -> Any:
        raise TypeError("SharedRecords has no |=: use update")


def _text(record: Any) -> str:
    """A record as the official hash sees it."""
    return json.dumps(record.model_dump(), sort_keys=True, default=str)


def base_database(database: Any) -> Any:
    """A parsed database made ready for :func:`fresh_database`; do not change it afterwards."""
    from pydantic import BaseModel

    for name, value in database.__dict__.items():
        if isinstance(value, dict) and all(isinstance(v, BaseModel) for v in value.values()):
            database.__dict__[name] = BaseRecords(value)
    return database


def fresh_database(base: Any) -> Any:
    """A database equal to ``base`` (from :func:`base_database`) whose changes stay its own."""
    fresh = base.model_copy()
    for name, value in base.__dict__.items():
        fresh.__dict__[name] = (
            SharedRecords(value) if isinstance(value, BaseRecords) else copy.deepcopy(value)
        )
    return fresh


def digest(database: Any) -> Any:
    """What a database holds, in a form that is cheap to compare.

    Two databases made from one base by :func:`fresh_database`, and given the same initial data,
    have equal digests exactly where their official hashes are equal: the hash is taken of the JSON
    text of everything, the digest holds the same text of what differs from the base.

    Returns:
        None for no database, else a dict by field name.
    """
    if database is None:
        return None
    found: dict[str, Any] = {}
    plain = set()
    for name, value in database.__dict__.items():
        if isinstance(value, SharedRecords):
            found[name] = value.changes()
        else:
            plain.add(name)
    if plain:
        rest = database.model_dump(include=plain)
        found[""] = json.dumps(rest, sort_keys=True, default=str)
    return found


def class_state(toolkit: Any) -> dict[str, Any]:
    """Copies of the mutable values that a toolkit keeps on its class, by name.

    The telecom phone's default VPN is one: ``break_vpn`` changes it for every environment that is
    made later in the process. Give each environment copies of its own.
    """
    from pydantic import BaseModel

    values = vars(type(toolkit)) if toolkit is not None else {}
    return {k: v.model_copy(deep=True) for k, v in values.items() if isinstance(v, BaseModel)}
