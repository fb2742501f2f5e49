"""What YAML values can stand for an annotation of a component's argument."""

from __future__ import annotations

import collections.abc
import enum
import types
import typing
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

COMPONENT = "_component_"


def is_component(value: Any) -> bool:
    """Whether a plain value is a mapping that names a component."""
    return isinstance(value, Mapping) and COMPONENT in value


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain YAML value can stand for an annotation; unknown annotations take anything."""
    if is_component(value) or hint is Any:
        return True
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return any(type(value) is type(arg) and value == arg for arg in args)
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    kind = origin or hint
    if kind in (list, tuple, set, frozenset, *_SEQUENCES):
        elements = [arg for arg in args if arg is not Ellipsis]
        alike = kind is not tuple or Ellipsis in args
        return isinstance(value, list) and all(
            fits(v, elements[0]) for v in value if elements and alike
        )
    if kind in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        return isinstance(value, Mapping) and all(
            fits(v, args[1]) for v in value.values() if len(args) == 2
        )
    # A class that YAML cannot write, such as Tensor: only a component can stand for it.
    if not isinstance(hint, type) or hint is object or issubclass(hint, (PurePath, enum.Enum)):
        return True
    return not isinstance(value, (str, bool, int, float))


_SEQUENCES = (
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
)


_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "null",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    collections.abc.Mapping: "a mapping",
    **dict.fromkeys(_SEQUENCES, "a list"),
}


def phrase(hint: Any) -> str:
    """What an annotation allows, as a phrase in the words of YAML that follows "must be"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(phrase, args)))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    kind = _NAMES.get(origin or hint)
    if kind == "a list" and args:
        return f"a list, each element {phrase(args[0])}"
    return kind or (hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", ""))
