"""Tools as compact Python-like signatures: about a third of the tokens of their JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from components.envs.base import ToolSpec

_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
    "object": "dict",
    "array": "list",
}


_CHOICES = re.compile(r"(?i)\beither ((?:'[^']+'(?:, |,? or )?){2,})")
_EXAMPLE = re.compile(r"(?i)\bsuch as ('[^']*'(?: or '[^']*')*)")


def signatures(tools: Sequence[ToolSpec], *, max_description_chars: int = 90) -> str:
    """One line for each tool; an argument's example is shown where its name first occurs."""
    shown: set[str] = set()
    return "\n".join(
        signature(tool, max_description_chars=max_description_chars, shown=shown) for tool in tools
    )


def signature(
    tool: ToolSpec,
    *,
    max_description_chars: int = 90,
    shown: set[str] | None = None,
) -> str:
    """One line for one tool: name, typed arguments, the first sentence of its description.

    ``cancel_pending_order(order_id: str, reason: "a"|"b")  # Cancel a pending order.``

    Values come from ``enum``, or from "either 'a' or 'b'" in an argument's description; "such as
    '#W0'" there becomes an example.

    Args:
        tool: its JSON schema may use ``$ref``, ``anyOf``, ``enum``, ``items`` and ``default``.
        max_description_chars: a longer first sentence ends at a word with "...".
        shown: names of arguments that need no example again; this call adds its own.
    """
    schema = tool.parameters
    required = set(schema.get("required", ()))
    definitions = schema.get("$defs", schema.get("definitions", {}))
    shown = set() if shown is None else shown
    arguments = []
    for name, parameter in schema.get("properties", {}).items():  # the schema's own order
        text = f"{name}: {_argument_type(name, parameter, definitions, shown)}"
        if "default" in parameter:
            text += f" = {_literal(parameter['default'])}"
        elif name not in required:
            text += " = ..."
        arguments.append(text)
    line = f"{tool.name}({', '.join(arguments)})"
    summary = first_sentence(tool.description, max_chars=max_description_chars)
    return f"{line}  # {summary}" if summary else line


def first_sentence(text: str, *, max_chars: int) -> str:
    """The first sentence on one line; longer than ``max_chars`` it ends at a word with "..."."""
    flat = " ".join(text.split())
    match = re.search(r"(?<![.\s]\w)[.!?](?=\s+[A-Z]|$)", flat)
    sentence = flat[: match.end()] if match else flat
    if len(sentence) <= max_chars:
        return sentence
    return sentence[: max_chars - 2].rsplit(" ", 1)[0].rstrip(",;:") + "..."


def _argument_type(
    name: str,
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    shown: set[str],
) -> str:
    kind = _type(schema, definitions)
    description = " ".join(schema.get("description", "").split())
    if kind == "str" and (choices := _CHOICES.search(description)):
        return "|".join(_literal(value) for value in re.findall(r"'([^']+)'", choices[1]))
    example = _EXAMPLE.search(description)
    if example and name not in shown and "enum" not in schema:
        shown.add(name)
        return f"{kind} (e.g. {example[1]})"
    return kind


def _type(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int = 0) -> str:
    if depth > 4:  # recursive definitions
        return "dict"
    if "$ref" in schema:
        return _type(definitions.get(schema["$ref"].rsplit("/", 1)[-1], {}), definitions, depth + 1)
    if "enum" in schema:
        return "|".join(_literal(value) for value in schema["enum"])
    if "const" in schema:
        return _literal(schema["const"])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            parts = dict.fromkeys(_type(part, definitions, depth + 1) for part in schema[key])
            if any(part.startswith("{") for part in parts):
                parts.pop("dict", None)  # says less than the fields beside it
            return "|".join(parts)
    kind = schema.get("type")
    if isinstance(kind, list):
        return "|".join(_TYPES.get(part, "any") for part in kind)
    if kind == "array" and "items" in schema:
        return f"list[{_type(schema['items'], definitions, depth + 1)}]"
    if kind == "object" and schema.get("properties"):
        fields = (
            f"{name}: {_type(part, definitions, depth + 1)}"
            for name, part in schema["properties"].items()
        )
        return "{" + ", ".join(fields) + "}"
    return _TYPES.get(kind, "any") if kind else "any"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
