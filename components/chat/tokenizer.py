"""A ``tokenizer.json`` for chat formats: text is only ever text, control ids have names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTokenizer:
    """A tokenizer that encodes whatever it is given as plain text."""

    path: Path
    tokenizer: Tokenizer
    special: Mapping[str, int]
    """The special tokens of the file: ``<|im_end|>``..."""
    tags: Mapping[str, int]
    """Its added tokens that are not special: ``<tool_call>`` in some vocabularies."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; an added token's name in it is spelled out like any other word."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, special tokens shown."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def special_id(self, token: str, *, format_name: str) -> int:
        """The id of a special token that a chat format cannot do without.

        Raises:
            ValueError: the tokenizer has none of that name.
        """
        if token not in self.special:
            raise ValueError(
                f"tokenizer {str(self.path)!r} has no special token {token}: not {format_name}"
            )
        return self.special[token]


def load_tokenizer(tokenizer_dir: str | Path) -> ChatTokenizer:
    """Read a tokenizer with every added token switched off for text, and nothing cut or padded.

    Args:
        tokenizer_dir: directory with ``tokenizer.json``, or the path of that file.

    Raises:
        FileNotFoundError: there is no ``tokenizer.json``.
        ValueError: the ids of its added tokens have gaps.
    """
    path = Path(tokenizer_dir)
    path = path if path.is_file() else path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer_dir={str(tokenizer_dir)!r} holds no tokenizer.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_str(json.dumps(_plain_text_only(data)))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for token in data.get("added_tokens") or []:
        # The library numbers them by their place; a file with gaps would get other ids.
        loaded = tokenizer.token_to_id(token["content"])
        if loaded is None or loaded != token["id"]:
            raise ValueError(
                f"{str(path)!r}: added token {token['content']!r} has id {token['id']} there and "
                f"{loaded} when loaded; ids of added tokens must follow each other"
            )
        ids[token["special"]][token["content"]] = loaded
    return ChatTokenizer(path=path, tokenizer=tokenizer, special=ids[True], tags=ids[False])


def _plain_text_only(data: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer file in which every added token can be switched off when text is encoded."""
    added = [{**token, "special": True} for token in data.get("added_tokens") or []]
    return {**data, "added_tokens": added}
