"""SmolLM2 against transformers' GGUF loader and Llama, and byte-pair encoding by the book.

The tests marked `model` need the directory that tools/get_model.py makes, and the GGUF it keeps.
"""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.attention.plan import MaskPlan
from components.models.lora import adapters
from components.models.paths import model_dir, sinkflex_home
from components.models.smollm2 import lora_smollm2, smollm2
from components.models.weights import save_hf

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = [
    "The capital of France is Paris. " * 30,
    '<|im_start|>user\nWhere is order #W2378156?<|im_end|>\n<|im_start|>assistant\n{"name": '
    '"get_order_details", "arguments": {"order_id": "#W2378156"}}<|im_end|>\n',
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n" * 8,
    "Ünïcödé, 漢字, Ελληνικά, عربى and emoji 🙂👩‍👩‍👧 — 3.14159, 2,718 & 10^9.",
    "a",
]

# ---------------------------------------------------------------- strings


def strings(count: int = 200) -> list[str]:
    """Varied texts, always the same ones."""
    rng = random.Random(0)
    words = ["the", "order", "was", "shipped", "to", "Ann's", "flat", "on", "Sunday", "we'll"]
    words += ["refund", "don't", "get_order_details"]
    foreign = ["Grüße", "naïve", "漢字仮名", "Привет", "שלום", "مرحبا", "हिन्दी", "ไทย", "e\u0301"]
    emoji = ["🙂", "👩‍👩‍👧", "🇫🇷", "👍🏽", "❤️", "🤖"]
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u00a0", "\u3000", "        "]
    control = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end", "<repo_name>", "<|x|>"]
    digits = ["7", "42", "2024-05-15", "#W2378156", "$1,234.50", "³²", "½", "٣٤", "Ⅻ", "1e-5", "00"]
    punctuation = ["...", "!?", "—", "“quoted”", "it's", "I'LL", "@user", "//", "->", "::", "«»"]

    def tool_json() -> str:
        call = {
            "name": rng.choice(["get_user_details", "exchange_delivered_order_items"]),
            "arguments": {
                "id": f"#W{rng.randrange(10**7)}",
                "items": [str(rng.randrange(10**10)) for _ in range(rng.randrange(3))],
                "note": rng.choice(foreign + emoji),
            },
        }
        return json.dumps(
            call, indent=rng.choice([None, 2, 4]), ensure_ascii=rng.random() < 0.5
        ).replace("<", rng.choice(control))

    def code() -> str:
        depth = "    " * rng.randrange(4)
        body = f"x[i] += {rng.random():.6f}"
        return f"{depth}for i in range({rng.randrange(999)}):\n{depth}\t{body}\n"

    kinds = [
        lambda: "".join(rng.choice(words) + rng.choice(spaces) for _ in range(12)),
        lambda: "".join(rng.choice(foreign + emoji) + rng.choice(spaces) for _ in range(8)),
        lambda: "".join(rng.choice(digits) + rng.choice(spaces) for _ in range(8)),
        lambda: "".join(rng.choice(control + words) + rng.choice(spaces) for _ in range(8)),
        lambda: "".join(rng.choice(punctuation + words + digits) for _ in range(10)),
        lambda: "".join(rng.choice(spaces) for _ in range(rng.randrange(9))),
        lambda: "".join(chr(rng.choice([rng.randrange(32, 0x250), 10, 13])) for _ in range(20)),
        tool_json,
        code,
        lambda: "".join(rng.choice(words + foreign + digits + emoji + spaces) for _ in range(30)),
    ]
    return [kinds[i % len(kinds)]() for i in range(count)]


# ---------------------------------------------------------------- an independent tokenizer


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte (Radford et al. 2019, encoder.py)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


class Bpe:
    """SmolLM2's tokenizer written down from its definition, on the vocabulary of the GGUF file.

    Control tokens, then each numeric character alone, then GPT-2's pattern, then merges by rank;
    a byte that has no token is dropped.
    """

    def __init__(self, fields: dict) -> None:
        import regex

        self.pattern = regex.compile(
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        )
        tokens = fields["tokenizer.ggml.tokens"]
        kinds = fields["tokenizer.ggml.token_type"]
        self.vocab = {token: i for i, token in enumerate(tokens)}
        self.control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, self.control)) + ")")
        merges = fields["tokenizer.ggml.merges"]
        self.rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        self.letters = byte_alphabet()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        pieces = self.special.split(text) if special else [text]
        ids: list[int] = []
        for piece in pieces:
            if special and piece in self.control:
                ids.append(self.vocab[piece])
            else:
                ids += [i for part in self.split_digits(piece) for i in self.merge(part)]
        return ids

    @staticmethod
    def split_digits(text: str) -> list[str]:
        parts, run = [], ""
        for character in text:
            if unicodedata.category(character).startswith("N"):
                parts += [run, character]
                run = ""
            else:
                run += character
        return [part for part in [*parts, run] if part]

    def merge(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self.pattern.findall(text):
            letters = [self.letters[byte] for byte in word.encode()]
            # bytes that the training data never had are no tokens, and are dropped
            symbols = [letter for letter in letters if letter in self.vocab]
            while len(symbols) > 1:
                pairs = list(zip(symbols, symbols[1:]))  # noqa: B905, RUF007
                best = min(pairs, key=lambda pair: self.rank.get(pair, 10**9))
                if best not in self.rank:
                    break
                merged, i = [], 0
                while i < len(symbols):
                    if tuple(symbols[i : i + 2]) == best:
                        merged.append(symbols[i] + symbols[i + 1])
                        i += 2
                    else:
                        merged.append(symbols[i])
                        i += 1
                symbols = merged
            ids += [self.vocab[symbol] for symbol in symbols]
        return ids


# ---------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def directory() -> Path:
    return model_dir("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def downloads() -> Path:
    folder = sinkflex_home() / "downloads"
    assert (folder / GGUF).is_file(), "run: python tools/get_model.py --force"
    return folder


@pytest.fixture(scope="module")
def fields(downloads) -> dict:
    from gguf import GGUFReader

    reader = GGUFReader(downloads / GGUF)
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.fixture(scope="module")
def reference(directory):
    """transformers' Llama on our directory, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def encoded(directory) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def logits(model, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    with torch.no_grad():
        return model(tokens, mask=MaskPlan.causal(len(ids)), input_pos=positions)


# ---------------------------------------------------------------- weights


@pytest.mark.model
def test_weights_have_the_bits_of_transformers_gguf_loader(directory, downloads):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(downloads, gguf_file=GGUF, dtype=torch.float32)
    expected = dict(theirs.named_parameters())  # the tied head is listed once
    ours = load_file(directory / "model.safetensors")
    assert ours.keys() == expected.keys()
    assert len(ours) == 272
    for name, value in ours.items():
        assert value.dtype == torch.float32
        bits, wanted = value.view(torch.int32), expected[name].detach().view(torch.int32)
        assert torch.equal(bits, wanted), name


# ---------------------------------------------------------------- tokenizer


@pytest.mark.model
def test_ids_equal_the_definition_of_smollm2s_tokenizer(directory, fields):
    from tokenizers import Tokenizer

    ours, oracle = Tokenizer.from_file(str(directory / "tokenizer.json")), Bpe(fields)
    texts = strings()
    assert len(set(texts)) > 180
    for text in texts:
        assert ours.encode(text).ids == oracle.encode(text), repr(text)
    # text of users and tools: control tokens spelled out are plain text
    ours.encode_special_tokens = True
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == oracle.encode(text, special=False), repr(text)
        assert min(ids, default=17) >= 17  # the 17 control tokens come first


@pytest.mark.model
def test_text_survives_the_round_trip(directory, fields):
    from tokenizers import Tokenizer

    ours, oracle = Tokenizer.from_file(str(directory / "tokenizer.json")), Bpe(fields)
    known = {byte for byte, letter in oracle.letters.items() if letter in oracle.vocab}
    # what UTF-8 needs for text; the missing ones are C0 controls and leads of planes 4 and up
    assert sorted(set(range(0xF1)) - known) == sorted(
        {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1}
    )
    for text in strings():
        ids = ours.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_ids_equal_transformers_gguf_tokenizer_but_for_its_missing_digit_split(
    directory, downloads
):
    """transformers 5.24 knows no rule for the "smollm" split and leaves the digits step out.

    It shows only where white space stands before a digit; piece by piece all ids are equal.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(downloads, gguf_file=GGUF)

    def their_ids(text: str) -> list[int]:
        return theirs(text, add_special_tokens=False)["input_ids"]

    whole = 0
    for text in strings():
        ids = ours.encode(text).ids
        parts = Bpe.split_digits(text)
        assert ids == [i for part in parts for i in their_ids(part)], repr(text)
        if len(parts) == 1:
            assert ids == their_ids(text)
            whole += 1
    assert whole > 50
    assert ours.encode("a\n\n5").tokens == ["a", "ĊĊ", "5"]


@pytest.mark.model
def test_transformers_reads_the_directory_as_the_tokenizers_package_does(directory, fields):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(directory)
    for text in strings():
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).ids
        assert theirs(text)["input_ids"] == ours.encode(text).ids  # no token is added
    assert theirs.chat_template == fields["tokenizer.chat_template"]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)


# ---------------------------------------------------------------- logits


@pytest.mark.model
def test_logits_equal_transformers_in_float32(directory, reference, encoded):
    model = smollm2(directory, dtype=torch.float32)
    worst = 0.0
    for ids in encoded:
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0]
        worst = max(worst, float((logits(model, ids) - expected).abs().max()))
    print(f"largest difference of logits: {worst:.1e}")
    # logits reach 40; float32 sums over 30 layers in another order: 6e-5 was seen
    assert worst < 1e-3


@pytest.mark.model
def test_bfloat16_is_close_to_float32(directory, reference, encoded):
    model = smollm2(directory, dtype=torch.bfloat16)
    for ids in encoded[:4]:
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        got = logits(model, ids).log_softmax(-1)
        kl = (expected.exp() * (expected - got)).sum(-1).mean()
        print(f"mean KL of bfloat16 to float32: {kl:.1e}")
        assert kl < 5e-3  # 1.5e-3 was seen


@pytest.mark.model
def test_it_knows_the_capital_of_france(directory, fields):
    model, bpe = smollm2(directory, dtype=torch.bfloat16), Bpe(fields)
    ids = bpe.encode(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer: list[int] = []
    while len(answer) < 12 and (not answer or answer[-1] != 2):
        answer.append(int(logits(model, ids + answer)[-1].argmax()))
    assert answer == bpe.encode("The capital of France is Paris.<|im_end|>")


# ---------------------------------------------------------------- saved models


@pytest.mark.parametrize("tie", [True, False])
def test_what_is_saved_gives_transformers_the_same_logits(tmp_path, tie):
    """A tiny Llama, in and out, with trained adapters in between."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]

    def theirs(folder: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    plain = smollm2(tmp_path / "source", dtype=torch.float32)
    expected = theirs(tmp_path / "source")
    assert (logits(plain, ids) - expected).abs().max() < 1e-5 * expected.abs().max()

    model = lora_smollm2(
        tmp_path / "source",
        dtype=torch.float32,
        lora_rank=4,
        lora_alpha=8,
        lora_modules=["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"],
    )
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_b.weight.normal_(std=0.1)
    ours = logits(model, ids)
    assert (ours - expected).abs().max() > 0.1
    save_hf(model, tmp_path / "saved", tmp_path / "source")
    saved = theirs(tmp_path / "saved")
    assert (ours - saved).abs().max() < 1e-5 * saved.abs().max()
