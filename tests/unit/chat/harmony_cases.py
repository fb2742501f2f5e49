"""A harmony tokenizer without a download, and the vocabulary of gpt-oss where there is one."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path

from components.chat.harmony_tokens import write_harmony_tokenizer
from components.envs.base import ToolSpec
from tests.tiny import tiny_tokenizer_dir

GPT_OSS_IDS = {
    "<|endoftext|>": 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}
"""As published in the harmony guide."""

_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How o200k cuts a text into words."""


def harmony_dir(directory: Path) -> Path:
    """The tiny ChatML tokenizer with harmony's tokens behind its own."""
    source = tiny_tokenizer_dir(directory / "chatml")
    write_harmony_tokenizer(source, directory / "harmony")
    return directory / "harmony"


def o200k_file() -> Path:
    """The o200k vocabulary, which litellm (a dependency of tau2) carries for its own use."""
    spec = find_spec("litellm")  # found, not imported: importing it asks the internet
    assert spec is not None
    assert spec.origin is not None
    # tiktoken names a cached vocabulary by the SHA-1 of its address.
    name = "fb374d419588a4632f3f557e76b4b70aebbca790"
    return Path(spec.origin).parent / "litellm_core_utils" / "tokenizers" / name


def gpt_oss_tokenizer(directory: Path) -> Path:
    """Write gpt-oss's ``tokenizer.json``: o200k, and harmony's tokens at their published ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    visible = _visible_bytes()
    lines = [line.split() for line in o200k_file().read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}

    def text(token: bytes) -> str:
        return "".join(visible[byte] for byte in token)

    merges = []
    for token in ranks:  # in the order of their ranks
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(text(a), text(b)) for _, _, a, b in sorted(known)]
    vocab = {text(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()
    data = json.loads(tokenizer.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = {number: token for token, number in GPT_OSS_IDS.items()}
    data["added_tokens"] = [
        {
            "id": number,
            "content": names.get(number, f"<|reserved_{number}|>"),
            **flags,
            "special": True,
        }
        for number in range(len(vocab), max(names) + 1)
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(data))
    return directory


def _visible_bytes() -> dict[int, str]:
    """GPT-2's way to write any byte as a character that can be seen."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    pairs = zip(hidden, range(256, 256 + len(hidden)), strict=True)
    return {byte: chr(byte) for byte in shown} | {byte: chr(code) for byte, code in pairs}


WEATHER = (
    ToolSpec(
        name="get_location",
        description="Gets the location of the user.",
        parameters={"type": "object", "properties": {}},
    ),
    ToolSpec(
        name="get_current_weather",
        description="Gets the current weather in the provided location.",
        parameters={
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                },
                "format": {
                    "type": "string",
                    "enum": ["celsius", "fahrenheit"],
                    "default": "celsius",
                },
            },
            "required": ["location"],
        },
    ),
    ToolSpec(
        name="get_multiple_weathers",
        description="Gets the current weather in the provided list of locations.",
        parameters={
            "type": "object",
            "properties": {
                "locations": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": 'List of city and state, e.g. ["San Francisco, CA", '
                    '"New York, NY"]',
                },
                "format": {
                    "type": "string",
                    "enum": ["celsius", "fahrenheit"],
                    "default": "celsius",
                },
            },
            "required": ["locations"],
        },
    ),
)
"""The tools of the guide's complete example."""
