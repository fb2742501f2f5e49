"""Python functions as an agent's tools: what the agent is told of them, and calls of them."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.envs.base import Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tool:
    function: Callable[..., Any]
    arguments: Any
    """A pydantic model of the arguments; no others are allowed."""
    takes: str
    """The arguments as Python shows them, e.g. ``(title: str, days: int = 14)``."""


class ToolFunctions:
    """Functions by name, described by their docstrings and type hints.

    The description is the docstring without its ``Args`` section, which describes the arguments one
    by one (any style that docstring_parser reads), as for the tools of tau2-bench.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Read the signatures.

        Args:
            functions: a bound method is told to the agent without ``self``.

        Raises:
            ValueError: a name is there twice, or a function has no docstring, an argument without a
                type, or one that cannot be named in a call or has no JSON schema.
        """
        self._tools: dict[str, _Tool] = {}
        specs = []
        for function in functions:
            name = getattr(function, "__name__", "")
            if not name.isidentifier():
                raise ValueError(f"tools: {function!r} has no name; must be a function or method")
            if name in self._tools:
                raise ValueError(f"tools: {name} is there twice")
            self._tools[name], spec = _read(name, function)
            specs.append(spec)
        self.specs: tuple[ToolSpec, ...] = tuple(specs)

    def call(self, call: ToolCall) -> Message:
        """Call a tool; a mistake of the agent comes back as a message with ``error``.

        Mistakes are an unknown name, arguments that do not fit the type hints (JSON as it is:
        ``"7"`` is no integer), and a ValueError of the function. Anything else that the function
        raises is a fault of the environment and passes through.

        Raises:
            TypeError: what the function returned is neither a text nor JSON.
        """
        text, error = self._answer(call)
        return Message(
            role="tool",
            content=f"Error: {text}" if error else text,
            tool_call_id=call.id,
            tool_name=call.name,
            error=error,
        )

    def _answer(self, call: ToolCall) -> tuple[str, bool]:
        from pydantic import ValidationError

        tool = self._tools.get(call.name)
        if tool is None:
            return f"there is no tool {call.name!r}; must be one of {', '.join(self._tools)}", True
        try:
            given = tool.arguments.model_validate_json(
                json.dumps(call.arguments, default=dict), strict=True
            )
        except ValidationError as error:
            return f"{call.name}: {_wrong(error)}. It takes {tool.takes}", True
        values = {name: getattr(given, name) for name in given.model_fields_set}
        try:
            result = tool.function(**values)
        except ValueError as error:
            return str(error) or f"{call.name} refuses these arguments", True
        return _text(call.name, result), False


def _read(name: str, function: Callable[..., Any]) -> tuple[_Tool, ToolSpec]:
    """A tool and what the agent is told of it."""
    from docstring_parser import parse
    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    doc = parse(inspect.getdoc(function) or "")
    if not doc.short_description:
        raise ValueError(f"tools: {name} has no docstring; the agent needs one")
    of_argument = {argument.arg_name: argument.description for argument in doc.params}
    try:
        signature = inspect.signature(function, eval_str=True)
        fields: dict[str, Any] = {}
        for key, parameter in signature.parameters.items():
            _check_parameter(name, parameter)
            default = ... if parameter.default is parameter.empty else parameter.default
            described = Field(default, description=of_argument.get(key))
            fields[key] = (parameter.annotation, described)
        config = ConfigDict(extra="forbid", protected_namespaces=())
        with warnings.catch_warnings():
            # An argument may be called copy or json as the methods of a pydantic model are.
            warnings.filterwarnings(
                "ignore", message=".*shadows an attribute", category=UserWarning
            )
            model = create_model("parameters", __config__=config, **fields)
        schema: Mapping[str, Any] = model.model_json_schema()
    except (NameError, TypeError, PydanticUserError) as error:
        raise ValueError(f"tools: {name}: its arguments cannot be described: {error}") from error
    parts = [part for part in (doc.short_description, doc.long_description) if part]
    spec = ToolSpec(name=name, description="\n\n".join(parts), parameters=schema)
    takes = str(signature.replace(return_annotation=signature.empty))
    return _Tool(function=function, arguments=model, takes=takes), spec


def _check_parameter(name: str, parameter: inspect.Parameter) -> None:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ValueError(f"tools: {name}: {parameter} cannot be named in a call")
    if parameter.annotation is parameter.empty:
        raise ValueError(f"tools: {name}: argument {parameter.name} has no type, e.g. str")


def _wrong(error: Any) -> str:
    """What a pydantic ValidationError says; three of its errors, for there may be thousands."""
    found = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()]
    more = [f"and {len(found) - 3} more"] if len(found) > 3 else []
    return "; ".join([*found[:3], *more])


def _text(name: str, result: Any) -> str:
    """What the agent reads: a text as it is, anything else as JSON."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"tool {name} must return a text or JSON: {error}") from error
