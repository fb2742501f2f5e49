"""Components: callables that a config names by dotted path, with their keyword arguments.

Found, checked against their signature, and called. Configs say ``_component_: package.module.name``
as in torchtune; a value inside may be a component too.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from components.training.annotations import COMPONENT, fits, is_component, phrase

MAKERS = "component_makers"
"""Attribute of a class: argument -> keyword arguments that the class passes itself.

The components in such an argument are not built: the class gets a partial in place of each."""


class ConfigError(ValueError):
    """A config that cannot be used. The text names every problem, one a line."""


def locate(path: Any) -> Callable[..., Any]:
    """Import the callable at a dotted path.

    Raises:
        ConfigError: Nothing callable is there; the text says which part is wrong.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{path!r} is not a dotted path such as torch.optim.AdamW")
    parts = path.split(".")
    parent = found = _import(parts[0], "", {name.partition(".")[0] for name in sys.modules})
    for i, part in enumerate(parts[1:], start=1):
        parent, prefix = found, ".".join(parts[:i])
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, types.ModuleType) and hasattr(found, "__path__"):
            submodules = {module.name for module in pkgutil.iter_modules(found.__path__)}
            found = _import(part, prefix, submodules | _public(found))
        else:
            raise ConfigError(f"{prefix!r} has no {part!r}{did_you_mean(part, _public(found))}")
    if not callable(found):
        hint = did_you_mean(parts[-1], _public(parent) - {parts[-1]})
        raise ConfigError(f"{path!r} is a {type(found).__name__}, not a class or function{hint}")
    return found


def _import(part: str, prefix: str, candidates: Iterable[str]) -> Any:
    name = f"{prefix}.{part}" if prefix else part
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise ConfigError(f"importing {name!r} failed: {error}") from error
        where = f"{prefix!r} has no {part!r}" if prefix else f"no module {part!r} is installed"
        raise ConfigError(where + did_you_mean(part, candidates)) from error
    except Exception as error:
        raise ConfigError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _public(found: Any) -> set[str]:
    return {name for name in dir(found) if not name.startswith("_")}


def did_you_mean(word: str, candidates: Iterable[str] | Mapping[str, str]) -> str:
    """``"; did you mean 'x'?"`` for the closest candidate, or an empty string.

    A mapping's keys are compared and its values shown.
    """
    shown = candidates if isinstance(candidates, Mapping) else {c: c for c in candidates}
    cutoff = 0.5 if len(word) <= 2 else 0.65  # "rl" should find "lr"
    lower = {name.lower(): name for name in shown}
    close = [lower[word.lower()]] if word.lower() in lower else []  # "adamw" should find "AdamW"
    close = close or difflib.get_close_matches(word, list(shown), n=1, cutoff=cutoff)
    return f"; did you mean {shown[close[0]]!r}?" if close else ""


def check_component(
    node: Mapping[str, Any], path: str, *, provided: Iterable[str] = (), positional: int = 0
) -> list[str]:
    """What is wrong with a component and those inside it; nothing is called.

    Args:
        node: Plain mapping, interpolations resolved.
        path: Key path of the node, for the messages.
        provided: Keyword arguments that the recipe will pass.
        positional: Number of positional arguments that the recipe will pass.
    """
    target: Any = None
    unusable = []
    if COMPONENT not in node:
        unusable = [f"{path}: missing {COMPONENT}, the dotted path of a class or function"]
    else:
        try:
            target = locate(node[COMPONENT])
        except ConfigError as error:
            unusable = [f"{path}.{COMPONENT} = {node[COMPONENT]!r}: {error}"]
    makers = getattr(target, MAKERS, {})
    problems = []
    for key, value in node.items():
        problems += _check_inside(value, f"{path}.{key}", provided=makers.get(key, ()))
    if unusable:
        return problems + unusable
    try:
        signature = inspect.signature(target)
    except ValueError:  # some builtins have none
        return problems
    return problems + _check_call(
        node, path, signature, _hints(target), provided=provided, positional=positional
    )


def _check_inside(value: Any, path: str, *, provided: Iterable[str]) -> list[str]:
    """Check the components inside a value that is an argument of a component."""
    if is_component(value):
        return check_component(value, path, provided=provided)
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        inside = [(f"{path}.{k}", v) for k, v in value.items()]
    elif isinstance(value, list):
        inside = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    return [p for where, v in inside for p in _check_inside(v, where, provided=provided)]


def _check_call(
    node: Mapping[str, Any],
    path: str,
    signature: inspect.Signature,
    hints: Mapping[str, Any],
    *,
    provided: Iterable[str],
    positional: int,
) -> list[str]:
    problems = []
    parameters = list(signature.parameters.values())
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if positional > len(by_position) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        problems.append(
            f"{path}: {node[COMPONENT]} takes {len(by_position)} positional arguments, "
            f"and the recipe passes {positional}"
        )
    taken = {p.name for p in by_position[:positional]}
    provided = set(provided)
    named = {
        p.name: p
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in taken
    }
    for name in sorted(provided - set(named)):
        if not takes_any:
            problems.append(f"{path}: {node[COMPONENT]} takes no {name!r}, which the recipe passes")
    settable = sorted(set(named) - provided)
    for key, value in node.items():
        where = f"{path}.{key}"
        if key == COMPONENT:
            continue
        if key in taken or key in provided:
            problems.append(f"{where}: the recipe itself passes {key!r}; leave it out")
        elif key in named:
            if not fits(value, hints.get(key, Any)):
                problems.append(f"{where} = {value!r}: must be {phrase(hints[key])}")
        elif not takes_any:
            hint = did_you_mean(str(key), settable) or "; it takes " + (
                ", ".join(settable) or "nothing"
            )
            problems.append(f"{where}: {node[COMPONENT]} takes no {key!r}{hint}")
    for name in settable:
        if named[name].default is inspect.Parameter.empty and name not in node:
            wanted = f"; must be {phrase(hints[name])}" if name in hints else ""
            problems.append(f"{path}.{name}: missing, {node[COMPONENT]} needs it{wanted}")
    return problems


def _hints(target: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (AttributeError, NameError, TypeError):
        # Annotations that exist only for type checkers: names are checked, types are not.
        return {}


def build(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the component that a plain mapping names; components inside are called first (but for
    those that its class makes itself, see ``MAKERS``).

    Args:
        node: Mapping with ``_component_``, made of plain Python containers.
        args: Positional arguments, passed on.
        kwargs: Keyword arguments, passed on; they win over the mapping's.

    Raises:
        ConfigError: The node names no component.
    """
    if not is_component(node):
        raise ConfigError(f"{node!r}: a mapping with {COMPONENT} is needed here")
    target = locate(node[COMPONENT])
    makers = getattr(target, MAKERS, {})
    arguments = {
        key: _build_inside(value, partial if key in makers else build)
        for key, value in node.items()
        if key != COMPONENT and key not in kwargs
    }
    return target(*args, **arguments, **kwargs)


def partial(node: Mapping[str, Any], **kwargs: Any) -> functools.partial[Any]:
    """``build`` with the node bound: everything, nested components too, is made when called."""
    locate(node[COMPONENT])
    return functools.partial(build, node, **kwargs)


def _build_inside(value: Any, make: Callable[[Any], Any]) -> Any:
    if is_component(value):
        return make(value)
    if isinstance(value, Mapping):
        return {key: _build_inside(inner, make) for key, inner in value.items()}
    if isinstance(value, list):
        return [_build_inside(inner, make) for inner in value]
    return value
