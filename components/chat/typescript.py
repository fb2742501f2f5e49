"""Tools as the TypeScript-like namespace that gpt-oss was trained to read.

The format is that of the harmony guide (https://github.com/openai/harmony, docs/format.md) and of
the package ``openai-harmony``, with differences where the package says less or the same twice:

- ``$ref`` is looked up and ``anyOf`` and ``oneOf`` are written as unions; the package writes
  ``any`` for the first two and spreads the third over several lines.
- A union inside an array stands in brackets: ``("a" | "b")[]``.
- A title that only repeats its key ("Order Id" of ``order_id``, as pydantic writes) is left out,
  and so is the description of an object beside that of the key that holds it.
- A function whose arguments are an object without properties takes none: ``() => any``, as the
  guide has it. An argument that is such an object is an ``object``.
- Every line of a description is a comment; the package comments the first line only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from components.envs.base import ToolSpec

_TYPES = {"integer": "number", "array": "any[]"}
_MAX_DEPTH = 6  # of nested types: recursive definitions end there


def tools_section(tools: Sequence[ToolSpec]) -> str:
    """The ``# Tools`` section of a developer message, namespace ``functions``."""
    functions = "".join(f"{function_type(tool)}\n\n" for tool in tools)
    return (
        f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{functions}}} // namespace functions"
    )


def function_type(tool: ToolSpec) -> str:
    """One tool: its description as comments, then ``type NAME = (_: {...}) => any;``.

    Args:
        tool: its JSON schema may use ``$ref``, ``anyOf``, ``oneOf``, ``enum``, ``const``,
            ``items``, ``nullable``, ``default``, ``title`` and ``examples``.
    """
    schema = tool.parameters
    lines = _comment(tool.description, "")
    if schema.get("properties"):
        definitions = schema.get("$defs", schema.get("definitions", {}))
        lines.append(f"type {tool.name} = (_: {_type(schema, definitions)}) => any;")
    else:
        lines.append(f"type {tool.name} = () => any;")
    return "\n".join(lines)


def _comment(text: str, indent: str) -> list[str]:
    return [f"{indent}// {line}" for line in text.splitlines()]


def _type(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], indent: str = "", depth: int = 0
) -> str:
    """The type of a schema; the lines of an object are indented by ``indent``."""
    if depth > _MAX_DEPTH:
        return "any"
    if "$ref" in schema:
        target = definitions.get(str(schema["$ref"]).rsplit("/", 1)[-1], {})
        return _type(target, definitions, indent, depth + 1)
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            parts = [_type(part, definitions, indent, depth + 1) for part in schema[key]]
            if any(part.startswith("{") for part in parts):
                parts = [part for part in parts if part != "object"]  # says less than its fields
            return " | ".join(dict.fromkeys(parts))
    if schema.get("enum"):
        return " | ".join(_literal(value) for value in schema["enum"])
    if "const" in schema:
        return _literal(schema["const"])
    kind = schema.get("type", "object" if "properties" in schema else "any")
    if isinstance(kind, list):
        return " | ".join(_TYPES.get(str(part), str(part)) for part in kind)
    if kind == "array" and schema.get("items"):
        items = _type(schema["items"], definitions, indent, depth + 1)
        return f"({items})[]" if " | " in items and not items.startswith("{") else f"{items}[]"
    if kind == "object" and schema.get("properties"):
        return _object(schema, definitions, indent, depth)
    return _TYPES.get(kind, kind)


def _object(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], indent: str, depth: int
) -> str:
    required = set(schema.get("required", ()))
    lines = ["{"]
    for name, value in schema["properties"].items():  # the schema's own order
        title = value.get("title", "")
        if title and title.lower() != name.replace("_", " ").lower():
            lines += [f"{indent}// {title}", f"{indent}//"]
        lines += _comment(value.get("description", ""), indent)
        if value.get("examples"):
            lines.append(f"{indent}// Examples:")
            lines += [f"{indent}// - {_literal(example)}" for example in value["examples"]]
        kind = _type(value, definitions, indent + "    ", depth + 1)
        if value.get("nullable") and "null" not in kind.split(" | "):
            kind += " | null"
        optional = "" if name in required else "?"
        default = f" // default: {_default(value)}" if "default" in value else ""
        lines.append(f"{indent}{name}{optional}: {kind},{default}")
    return "\n".join([*lines, indent + "}"])


def _default(schema: Mapping[str, Any]) -> str:
    """A default; a choice among an enum's strings goes without quotation marks."""
    default = schema["default"]
    return default if isinstance(default, str) and schema.get("enum") else _literal(default)


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
