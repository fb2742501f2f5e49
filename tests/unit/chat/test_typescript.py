from __future__ import annotations

from typing import Any

from components.chat.typescript import function_type, tools_section
from components.envs.base import ToolSpec


def of(parameters: dict[str, Any], **kwargs: Any) -> str:
    return function_type(ToolSpec(name="f", description="", parameters=parameters, **kwargs))


def test_what_pydantic_writes():
    """$ref, anyOf with null, and a title that repeats its key."""
    leg = {
        "type": "object",
        "title": "Leg",
        "description": "One flight.",
        "properties": {"day": {"type": "string", "title": "Day"}},
        "required": ["day"],
    }
    parameters = {
        "$defs": {"Leg": leg},
        "properties": {
            "order_id": {"type": "string", "title": "Order Id", "description": "Two\nlines."},
            "legs": {
                "type": "array",
                "items": {"anyOf": [{"$ref": "#/$defs/Leg"}, {"type": "object"}]},
            },
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "picks": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
            "level": {"enum": [1, 2]},
            "kind": {"const": "x"},
            "any": {"type": "array"},
        },
        "required": ["order_id", "legs"],
    }
    assert of(parameters).splitlines() == [
        "type f = (_: {",
        "// Two",
        "// lines.",
        "order_id: string,",
        "legs: {",
        "    day: string,",
        "    }[],",
        "note?: string | null, // default: null",
        'picks?: ("a" | "b")[],',
        "level?: 1 | 2,",
        'kind?: "x",',
        "any?: any[],",
        "}) => any;",
    ]


def test_recursive_definitions_end():
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/T"}}}
    text = of({"$defs": {"T": tree}, "properties": {"t": {"$ref": "#/$defs/T"}}})
    assert "left?: any," in text


def test_every_retail_tool_is_written():
    """Nothing of a real benchmark's schemas is lost to ``any``."""
    from components.envs.tau2_data import domain_data

    for domain in ("retail", "airline"):
        tools = domain_data(domain).tools
        text = tools_section(tools)
        assert text.count("=> any;") == len(tools)
        assert text.count(": any") == 0
        for tool in tools:
            assert f"type {tool.name} = (" in text
            for name in tool.parameters["properties"]:
                assert f"\n{name}: " in text or f"\n{name}?: " in text
