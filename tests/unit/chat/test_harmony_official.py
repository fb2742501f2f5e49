"""Ids against the package ``openai-harmony``, on the vocabulary of gpt-oss itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.chat.harmony import HarmonyRenderer
from components.envs.base import Message, ToolCall, ToolSpec
from tests.unit.chat.harmony_cases import GPT_OSS_IDS, WEATHER, gpt_oss_tokenizer, o200k_file

official = pytest.importorskip("openai_harmony")

TOOL = ToolSpec(
    name="update_order",
    description="Change an order.\n\nOnly once.",
    parameters={
        "type": "object",
        "properties": {
            "order_id": {"type": "string", "title": "The order", "examples": ["#W1", "#W2"]},
            "reason": {"type": "string", "enum": ["a b", "c"], "description": "Why it changes."},
            "count": {"type": "integer", "default": 3, "description": "How many."},
            "note": {"type": "string", "nullable": True, "default": "none"},
            "either": {"type": ["number", "string"]},
            "items": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string", "description": "Its id, 10 digits."},
                        "gift": {"type": "boolean", "default": False},
                    },
                    "required": ["id"],
                },
            },
            "address": {"type": "object", "properties": {"zip": {"type": "string"}}},
            "extra": {},
        },
        "required": ["order_id", "items"],
    },
)
TEXTS = ("Where is my order #W1234567?", "你好 🙂 <|end|>  x\r\n\tDON'T I'll 12345 naïve", " \n a ")


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("encodings")
    (directory / "o200k_base.tiktoken").symlink_to(o200k_file())
    with pytest.MonkeyPatch.context() as patch:
        # Without it the package asks the internet; it checks the file's SHA-256 either way.
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(directory))
        return official.load_harmony_encoding(official.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_tokenizer(tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def renderer(directory: Path) -> HarmonyRenderer:
    return HarmonyRenderer(directory, current_date="2025-06-28")


def start(prompt: str, tools: tuple[ToolSpec, ...]) -> list[Any]:
    described = [
        official.ToolDescription.new(
            tool.name,
            tool.description,
            # the guide writes a function without arguments as () => any
            parameters=dict(tool.parameters) if tool.parameters["properties"] else None,
        )
        for tool in tools
    ]
    developer = official.DeveloperContent.new().with_instructions(prompt)
    if tools:
        developer = developer.with_function_tools(described)
    system = official.SystemContent.new().with_conversation_start_date("2025-06-28")
    return [
        official.Message.from_role_and_content(official.Role.SYSTEM, system),
        official.Message.from_role_and_content(official.Role.DEVELOPER, developer),
    ]


def theirs(encoding: Any, messages: list[Any]) -> tuple[int, ...]:
    conversation = official.Conversation.from_messages(messages)
    keep = official.RenderConversationConfig(auto_drop_analysis=False)
    return tuple(
        encoding.render_conversation_for_completion(
            conversation, official.Role.ASSISTANT, config=keep
        )
    )


def said(text: str, channel: str) -> Any:
    message = official.Message.from_role_and_content(official.Role.ASSISTANT, text)
    return message.with_channel(channel)


def test_text_is_cut_into_the_same_ids(encoding, renderer):
    for text in (*TEXTS, Path(__file__).read_text(encoding="utf-8")):
        ids = renderer._chat.encode(text)
        assert ids == encoding.encode(text, disallowed_special=())
        assert renderer.decode(ids) == text
    assert GPT_OSS_IDS.items() <= renderer._chat.special.items()
    assert renderer.stop_ids == set(encoding.stop_tokens_for_assistant_actions())


@pytest.mark.parametrize("tools", [(), WEATHER, (TOOL,), (*WEATHER, TOOL)])
def test_prompts(encoding, renderer, tools):
    prompt = "Use a friendly tone.\n\n## Rules\n- <|start|> is text.\n"
    user = official.Message.from_role_and_content(official.Role.USER, TEXTS[1])
    system = renderer.render_system(prompt, tools).ids
    first = renderer.render_observation(
        [Message(role="user", content=TEXTS[1])], after_turn=False
    ).ids
    assert (*system, *first) == theirs(encoding, [*start(prompt, tools), user])


def test_a_conversation_with_calls(encoding, renderer):
    """Equal but for two things: ``<|return|>`` stays, and the guide puts the recipient in the
    channel's part where the package puts it in the role's."""
    call = ToolCall(name="update_order", arguments={"order_id": "#W1", "note": 'ü "x"'})
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False, separators=(",", ":"))
    result = official.Message.from_author_and_content(
        official.Author.new(official.Role.TOOL, "functions.update_order"), TEXTS[1]
    )
    user = [official.Message.from_role_and_content(official.Role.USER, text) for text in TEXTS]
    expected = theirs(
        encoding,
        [
            *start("Be kind.", (TOOL,)),
            said("Hi! How can I help you today?", "final"),
            user[0],
            said("Which one?", "final"),
            user[1],
            said("Let me look.", "commentary"),
            said(arguments, "commentary")
            .with_recipient("functions.update_order")
            .with_content_type("<|constrain|>json"),
            result.with_channel("commentary").with_recipient("assistant"),
        ],
    )
    greeting = Message(role="assistant", content="Hi! How can I help you today?")
    seen = [Message(role="user", content=text) for text in TEXTS]
    ids = [
        *renderer.render_system("Be kind.", (TOOL,)).ids,
        *renderer.render_observation([greeting, seen[0]], after_turn=False).ids,
        *renderer.render_assistant(Message(role="assistant", content="Which one?")),
        *renderer.render_observation([seen[1]], after_turn=True).ids,
        *renderer.render_assistant(
            Message(role="assistant", content="Let me look.", tool_calls=(call,))
        ),
        *renderer.render_observation(
            [Message(role="tool", content=TEXTS[1], tool_name="update_order")], after_turn=True
        ).ids,
    ]
    returns, end = GPT_OSS_IDS["<|return|>"], GPT_OSS_IDS["<|end|>"]
    assert ids.count(returns) == 1
    text = renderer.decode([end if token == returns else token for token in ids])
    text = text.replace(
        "<|start|>assistant<|channel|>commentary to=functions.update_order ",
        "<|start|>assistant to=functions.update_order<|channel|>commentary ",
    )
    assert text == renderer.decode(expected)


@pytest.mark.parametrize(
    "message",
    [
        Message(role="assistant", content=TEXTS[1].strip()),
        Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"a": "ü"}),)),
        Message(
            role="assistant",
            content="Let me look.",
            tool_calls=(ToolCall(name="f", arguments={}),),
        ),
    ],
)
def test_their_parser_reads_our_turns(encoding, renderer, message):
    parsed = encoding.parse_messages_from_completion_tokens(
        renderer.render_assistant(message), official.Role.ASSISTANT, strict=True
    )
    content = [part.content[0].text for part in parsed if not part.recipient]
    calls = [part for part in parsed if part.recipient]
    assert content == ([message.content] if message.content else [])
    assert [part.recipient for part in calls] == [f"functions.{c.name}" for c in message.tool_calls]
    assert [json.loads(part.content[0].text) for part in calls] == [
        dict(call.arguments) for call in message.tool_calls
    ]
    assert all(part.channel == "commentary" for part in calls)


def test_our_parser_reads_their_turns(encoding, renderer):
    """What the package renders for a turn: analysis, then a call addressed in the role's part."""
    turn = [
        said("I must look.", "analysis"),
        said('{"order_id": "#W1"}', "commentary").with_recipient("functions.update_order"),
    ]
    conversation = official.Conversation.from_messages(turn)
    ids = encoding.render_conversation(
        conversation, config=official.RenderConversationConfig(auto_drop_analysis=False)
    )
    parsed = renderer.parse(ids[2:])  # <|start|>assistant is the generation prompt
    call = ToolCall(name="update_order", arguments={"order_id": "#W1"})
    assert parsed.message == Message(role="assistant", tool_calls=(call,))


def test_the_guides_parsing_example(renderer):
    """Ids printed in the guide."""
    ids = [200005, 35644, 200008, 1844, 31064, 25, 392, 4827, 382, 220, 17, 659, 220, 17, 16842]
    ids += [12295, 81645, 13, 51441, 6052, 13, 200007, 200006, 173781, 200005, 17196, 200008, 17]
    ids += [659, 220, 17, 314, 220, 19, 13, 200002]
    assert renderer.parse(ids).message == Message(role="assistant", content="2 + 2 = 4.")
