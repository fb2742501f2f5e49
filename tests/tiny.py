"""Tiny stand-ins that need no download."""

from __future__ import annotations

from pathlib import Path

_CORPUS = [
    "system user assistant tool\n",
    "Hello, I want to cancel my order. Yes, please go ahead. Thank you!\n",
    "Hi! How can I help you today? Your order is cancelled.\n",
    '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "#W1"}}\n</tool_call>\n',
    '<tool_response>\n{"status": "pending"}\n</tool_response>\n',
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n",
]


def tiny_tokenizer_dir(directory: Path) -> Path:
    """Write a byte-level BPE ChatML ``tokenizer.json`` of about 500 ids into ``directory``.

    Ids 0, 1, 2 are <|endoftext|>, <|im_start|>, <|im_end|>, as in SmolLM2. Any text can be encoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer=trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
