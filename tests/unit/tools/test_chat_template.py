"""The chat template for servers says the same as our own renderer of that format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from components.envs.base import Message, ToolCall, ToolSpec
from tests.unit.rollout.fakes import TOOLS, make_renderer

TEMPLATE = Path(__file__).parents[3] / "tools/chatml_tools.jinja"
CALL = ToolCall(id="1", name="get_order", arguments={"order_id": "#W1", "note": "<ü> & 'x'"})
CONVERSATION = (
    Message(role="user", content="Where is it?"),
    Message(role="assistant", content="", tool_calls=(CALL,)),
    Message(role="tool", content='{"status": "pending"}', tool_call_id="1"),
    Message(role="assistant", content="One more.", tool_calls=(CALL, replace(CALL, id="2"))),
    Message(role="tool", content="a", tool_call_id="1"),
    Message(role="tool", content="b", tool_call_id="2"),
    Message(role="assistant", content="Pending."),
    Message(role="user", content="Thanks."),
)


def rendered_by_template(system: str, tools: tuple[ToolSpec, ...]) -> str:
    """As transformers and vLLM render a template."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def raise_exception(text: str) -> None:
        raise jinja2.TemplateError(text)

    environment.globals["raise_exception"] = raise_exception
    messages = [{"role": "system", "content": system}] if system else []
    for message in CONVERSATION:
        functions = [
            {"id": c.id, "function": {"name": c.name, "arguments": dict(c.arguments)}}
            for c in message.tool_calls
        ]
        content = message.content or None  # as OpenAI's protocol has it
        messages.append({"role": message.role, "content": content, "tool_calls": functions})
    functions = [
        {"name": t.name, "description": t.description, "parameters": dict(t.parameters)}
        for t in tools
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        messages=messages,
        tools=[{"type": "function", "function": function} for function in functions],
        add_generation_prompt=True,
    )


@pytest.mark.parametrize("tools", [TOOLS, TOOLS * 2, ()])
def test_the_template_renders_what_the_renderer_does(tools):
    renderer = make_renderer()
    ids = list(renderer.render_system("Be kind.", tools).ids)
    ids += renderer.render_observation(CONVERSATION, after_turn=False).ids
    assert rendered_by_template("Be kind.", tools) == renderer.decode(ids)


def test_tools_need_a_system_message():
    with pytest.raises(jinja2.TemplateError, match="tools are listed in the system message"):
        rendered_by_template("", TOOLS)
    assert rendered_by_template("", ()).startswith("<|im_start|>user\nWhere is it?<|im_end|>\n")
