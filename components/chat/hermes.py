"""ChatML with Hermes-style tool calls, on the ``tokenizers`` package alone.

A conversation looks like this, with the control tokens written out::

    <|im_start|>system
    POLICY

    # Tools ... <tools> ... </tools> ...<|im_end|>
    <|im_start|>user
    Hello<|im_end|>
    <|im_start|>assistant
    <tool_call>
    {"name": "get_order", "arguments": {"order_id": "#W1"}}
    </tool_call><|im_end|>
    <|im_start|>tool
    <tool_response>
    {"status": "pending"}
    </tool_response><|im_end|>
    <|im_start|>assistant

Text of the system prompt, the users and the tools is encoded with every added token of the
tokenizer switched off, so ``<|im_end|>`` inside a tool result is plain text: control ids come from
the renderer, or from the policy, and from nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

from components.chat.base import ParsedTurn, Rendered, joined
from components.chat.signatures import signatures
from components.chat.tokenizer import load_tokenizer
from components.chat.tool_calls import read_calls, turn_text
from components.envs.base import Message, ToolSpec
from components.rollout.types import Author

ToolFormat = Literal["json", "signatures"]

_START, _END = "<|im_start|>", "<|im_end|>"
_THINK, _THINK_END = "<think>", "</think>"

_TOOLS_PROMPT = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

_AUTHORS = {
    "system": Author.SYSTEM,
    "user": Author.USER,
    "tool": Author.TOOL,
    "assistant": Author.TEMPLATE,  # a fixed greeting: not sampled, never trained
}


class HermesRenderer:
    """The ``Renderer`` of ChatML models (SmolLM2, Qwen, Hermes).

    Args:
        tokenizer_dir: directory with ``tokenizer.json``, or the path of that file.
        tool_format: ``"json"`` writes every tool as its JSON schema, ``"signatures"`` as one line
            with types and the first sentence of its description (about a quarter of the tokens).

    Raises:
        FileNotFoundError: there is no ``tokenizer.json``.
        ValueError: an unknown ``tool_format``, or a tokenizer without ChatML's control tokens.
    """

    def __init__(self, tokenizer_dir: str | Path, *, tool_format: ToolFormat = "json") -> None:
        if tool_format not in get_args(ToolFormat):
            raise ValueError(f"tool_format={tool_format!r}: allowed are {get_args(ToolFormat)}")
        self.tool_format: ToolFormat = tool_format
        self._chat = load_tokenizer(tokenizer_dir)
        self._tokenizer = self._chat.tokenizer
        self._control_ids = frozenset(self._chat.special.values())
        self._tags = self._chat.tags
        # Longest first: a tag may be the beginning of another one.
        tags = sorted(self._tags, key=len, reverse=True)
        self._tag_pattern = re.compile("(" + "|".join(re.escape(tag) for tag in tags) + ")")
        self._start_id = self._chat.special_id(_START, format_name="ChatML")
        self._end_id = self._chat.special_id(_END, format_name="ChatML")
        end_of_text = self._tokenizer.token_to_id("<|endoftext|>")
        self.stop_ids = frozenset(
            {self._end_id} if end_of_text is None else {self._end_id, end_of_text}
        )
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render_system(self, system_prompt: str, tools: Sequence[ToolSpec]) -> Rendered:
        """The system turn with the tools in it: shared by every rollout of a domain."""
        if not tools:
            return joined([self._turn("system", [(system_prompt, False)])])
        if self.tool_format == "signatures":
            listed = signatures(tools)
        else:
            listed = "\n".join(_json_tool(tool) for tool in tools)
        before, _, after = _TOOLS_PROMPT.partition("{tools}")
        texts = [(system_prompt, False), (before, True), (listed, False), (after, True)]
        return joined([self._turn("system", texts)])

    def render_observation(
        self, messages: Sequence[Message], *, after_turn: bool, closed: bool = True
    ) -> Rendered:
        """New messages and the generation prompt; see ``Renderer.render_observation``.

        Neighbouring tool messages share one tool turn, in their order.
        """
        parts: list[tuple[list[int], list[int]]] = []
        if after_turn:
            ids = ([] if closed else [self._end_id]) + self._encode("\n")
            parts.append((ids, [Author.TEMPLATE] * len(ids)))
        for role, group in groupby(messages, key=lambda message: message.role):
            if role == "tool":
                texts: list[tuple[str, bool]] = []
                for message in group:
                    before = "\n<tool_response>\n" if texts else "<tool_response>\n"
                    after = "\n</tool_response>"
                    texts += [(before, True), (message.content, False), (after, True)]
                parts.append(self._turn(role, texts))
            else:
                parts += [self._turn(role, [(turn_text(message), False)]) for message in group]
        ids = [self._start_id, *self._encode("assistant\n")]
        parts.append((ids, [Author.TEMPLATE] * len(ids)))
        return joined(parts)

    def render_assistant(self, message: Message) -> tuple[int, ...]:
        """The ids a policy would have sampled for ``message``, end token included."""
        if message.role != "assistant":
            raise ValueError(f"render_assistant takes an assistant message, got {message.role!r}")
        return (*self._encode_texts([(turn_text(message), True)]), self._end_id)

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Read a sampled turn: text, tool calls, or both (the environment decides if both may be).

        Thinking (``<think>...</think>`` at the start) is not part of the message. The ids are read,
        never changed: the ledger keeps the turn as it was sampled.
        """
        ids = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        if any(token in self._control_ids for token in ids):
            return _error("Your turn holds a control token. Write plain text or a tool call.")
        text = self.decode(ids).strip()
        if text.startswith(_THINK):
            _, closed, text = text.partition(_THINK_END)
            if not closed:
                return _error("Your thinking is not closed by </think>.")
        try:
            content, calls = read_calls(text)
        except (ValueError, RecursionError) as error:
            return _error(f"Your tool call cannot be read: {error or 'nested too deeply'}.")
        if not content and not calls:
            return _error("Your turn is empty. Write to the user or call a tool.")
        return ParsedTurn(message=Message(role="assistant", content=content, tool_calls=calls))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens shown."""
        return self._chat.decode(list(ids))

    def _encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def _encode_texts(self, texts: Sequence[tuple[str, bool]]) -> list[int]:
        """Encode (text, ours) pieces as one text.

        In our own text tags like <tool_call> become single ids where the tokenizer has such; in
        text of others they stay plain text.
        """
        ids: list[int] = []
        pending = ""
        for text, ours in texts:
            for piece in self._tag_pattern.split(text) if ours and self._tags else [text]:
                if ours and piece in self._tags:
                    ids += [*self._encode(pending), self._tags[piece]]
                    pending = ""
                else:
                    pending += piece
        return ids + self._encode(pending)

    def _turn(self, role: str, texts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int]]:
        """<|im_start|>role, newline, texts, <|im_end|>, newline: ids and authors."""
        # Role and content are encoded together, as a template would: "\n" may merge with content.
        body = self._encode_texts([(f"{role}\n", False), *texts])
        header = min(len(self._encode(f"{role}\n")), len(body))
        newline = self._encode("\n")
        ids = [self._start_id, *body, self._end_id, *newline]
        template = int(Author.TEMPLATE)
        authors = [template] * (1 + header) + [int(_AUTHORS[role])] * (len(body) - header)
        return ids, authors + [template] * (1 + len(newline))


def _json_tool(tool: ToolSpec) -> str:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _error(text: str) -> ParsedTurn:
    return ParsedTurn(message=None, error=text)
