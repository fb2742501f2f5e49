"""A tiny random gpt-oss of 40,960 positions that writes well-formed calls of ``long_env``'s tool.

Nothing is forced: its turns are sampled. As in ``tools/make_tiny_gpt_oss.py``, a few rows of the
embeddings and of the head make one token follow another: ``assistant``, the start of a call, a
digit, the rest up to the note; then come words, at each of which the call closes with a probability
of about one in seven. Which digit and which words is left to the random layers, so that their
log-probabilities depend on all of the context.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.recipes.long_env import WORDS
from tests.unit.models.gpt_oss import tiny

CONTEXT, WINDOW = 40_960, 128
WIDTH, HEADS, KEY_HEADS, HEAD_DIM, EXPERTS, EXPERT_DIM, LAYERS = 32, 2, 1, 8, 4, 32, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL = '<tool_call>\n{"name": "read_page", "arguments": {"page": '
NOTE = ', "note": "'
CLOSE = '"}}\n</tool_call>'
FOLLOW, LEAD = 12.0, 6.0
"""How far the embedding of a token with a fixed successor reaches along a direction of its own, and
how far the successor's row of the head does: some 25 nats above any other token."""
STOP = 6.5
"""The row of CLOSE along the direction that all words share, where theirs reach LEAD."""


def write(directory: Path) -> Path:
    """Write a Hugging Face directory: config, weights and tokenizer, always the same."""
    directory.mkdir(parents=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = tiny.CONFIG | {
        "head_dim": HEAD_DIM,
        "hidden_size": WIDTH,
        "intermediate_size": EXPERT_DIM,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEY_HEADS,
        "num_local_experts": EXPERTS,
        "rope_scaling": tiny.CONFIG["rope_scaling"]
        | {"factor": 10.0, "original_max_position_embeddings": CONTEXT // 10},
        "sliding_window": WINDOW,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": SPECIAL.index("<|im_end|>"),
    }
    (directory / "config.json").write_text(json.dumps(config))

    def token(text: str) -> int:
        (number,) = tokenizer.encode(text).ids
        return number

    tensors = _weights(
        tokenizer.get_vocab_size(),
        chain=[
            [token("assistant\n")],
            [token(CALL)],
            [token(digit) for digit in "0123456789"],
            [token(NOTE)],
        ],
        words=[token(f" {word}") for word in WORDS],
        close=token(CLOSE),
        end=SPECIAL.index("<|im_end|>"),
    )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tokenizer():
    """Byte-level BPE with one id for each word and for each piece of a call."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Without the usual split at words: pieces of a call are one token each.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,  # not reached: training ends when every piece is whole
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = ["assistant\n", CALL, NOTE, CLOSE, *(f" {word}" for word in WORDS)]
    tokenizer.train_from_iterator(pieces, trainer=trainer)
    return tokenizer


def _weights(
    vocab_size: int, *, chain: list[list[int]], words: list[int], close: int, end: int
) -> dict[str, Tensor]:
    """All weights by their Hugging Face names, fp32.

    Args:
        vocab_size: rows of the embeddings and of the head.
        chain: groups of ids; each follows a token of the group before, the words the last one.
        words: ids that follow each other.
        close: the id that ends the words.
        end: the id that follows it.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    basis, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))
    steps = [*zip(chain, [*chain[1:], words], strict=True), (words, words), ([close], [end])]
    free = basis[len(steps) :]  # what is random stays clear of the directions that are fixed
    embeddings = normal(vocab_size, len(free), std=1.0) @ free
    head = normal(vocab_size, len(free), std=0.2) @ free
    for direction, (tokens, successors) in zip(basis, steps, strict=False):
        embeddings[tokens] += direction * FOLLOW
        head[successors] += direction * LEAD
    head[close] += basis[len(chain)] * STOP
    state = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": torch.ones(WIDTH),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        state |= {f"model.layers.{layer}.{name}": x for name, x in _layer(normal, free).items()}
    return state


def _layer(normal, free: Tensor) -> dict[str, Tensor]:
    """One layer, whose output lies in the rows of ``free``."""
    query, key = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
    onto = free.t() @ free
    state = {
        "self_attn.sinks": normal(HEADS, std=1.0),
        "self_attn.o_proj.weight": onto @ normal(WIDTH, query),
        "self_attn.o_proj.bias": onto @ normal(WIDTH),
        "mlp.router.weight": normal(EXPERTS, WIDTH),
        "mlp.router.bias": normal(EXPERTS),
        "mlp.experts.gate_up_proj": normal(EXPERTS, WIDTH, 2 * EXPERT_DIM, std=0.1),
        "mlp.experts.gate_up_proj_bias": normal(EXPERTS, 2 * EXPERT_DIM),
        "mlp.experts.down_proj": normal(EXPERTS, EXPERT_DIM, WIDTH, std=0.1) @ onto,
        "mlp.experts.down_proj_bias": normal(EXPERTS, WIDTH) @ onto,
        "input_layernorm.weight": torch.ones(WIDTH),
        "post_attention_layernorm.weight": torch.ones(WIDTH),
    }
    for name, outputs in (("q", query), ("k", key), ("v", key)):
        state[f"self_attn.{name}_proj.weight"] = normal(outputs, WIDTH)
        state[f"self_attn.{name}_proj.bias"] = normal(outputs)
    return {name: tensor.contiguous() for name, tensor in state.items()}
