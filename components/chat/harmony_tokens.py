"""Any tokenizer with harmony's special tokens added: for tests and for tiny models.

gpt-oss comes with its own tokenizer, which has them already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.chat.harmony_parse import CONTROL


def with_harmony_tokens(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a ``tokenizer.json`` with harmony's special tokens at the end of its ids.

    A token that is there already keeps its id; text is encoded as before.
    """
    added = list(data.get("added_tokens") or [])
    known = {token["content"] for token in added}
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in added)]
    new = [token for token in CONTROL if token not in known]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, token in enumerate(new, start=max(ids) + 1):
        added.append({"id": number, "content": token, **flags, "special": True})
    return {**data, "added_tokens": added}


def write_harmony_tokenizer(tokenizer_dir: str | Path, out_dir: str | Path) -> dict[str, int]:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``out_dir``.

    Args:
        tokenizer_dir: directory with the ``tokenizer.json`` to start from.
        out_dir: is made if it does not exist.

    Returns:
        The id of every special token.

    Raises:
        FileNotFoundError: there is no ``tokenizer.json``.
        ValueError: ``<|endoftext|>``, which pads, is not among its special tokens.
    """
    source, out = Path(tokenizer_dir) / "tokenizer.json", Path(out_dir)
    if not source.is_file():
        raise FileNotFoundError(f"tokenizer_dir={str(tokenizer_dir)!r} holds no tokenizer.json")
    data = with_harmony_tokens(json.loads(source.read_text(encoding="utf-8")))
    special = {token["content"]: token["id"] for token in data["added_tokens"] if token["special"]}
    if "<|endoftext|>" not in special:
        raise ValueError(f"tokenizer_dir={str(tokenizer_dir)!r} has no special <|endoftext|>")
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|return|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return special
