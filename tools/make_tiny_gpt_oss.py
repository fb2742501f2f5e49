"""Write a tiny random gpt-oss with every feature of the real ones, as a Hugging Face directory.

    python tools/make_tiny_gpt_oss.py [OUT_DIR] [--tokenizer DIR] [--seed N]

OUT_DIR is ``tiny-gpt-oss`` in the model cache unless it is given; that is the model that
``configs/gpt_oss/tiny_mock.yaml`` trains. The tokenizer is SmolLM2's with harmony's special tokens
added. What is written loads in transformers (``GptOssForCausalLM``) and in
``components.models.gpt_oss.gpt_oss``: bf16 weights, sinks that are not zero, windows on every other
layer, YaRN, experts with biases.

All weights are random but for a few rows of the embeddings and of the head. A random model would
never write a message in the chat format, and an episode in which every turn is refused teaches
nothing. So these rows make one token follow another, nearly always: ``<|start|>assistant``, then
``<|channel|>``, ``final``, ``<|message|>``; after that come random words, and at each of them the
turn ends with a probability of about one in ten.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from components.chat.harmony_tokens import write_harmony_tokenizer
from components.models.paths import model_dir, sinkflex_home

NAME = "tiny-gpt-oss"
TOKENIZER = "smollm2-135m-instruct"
HIDDEN, HEADS, KEY_HEADS, HEAD_DIM = 64, 4, 2, 32
LAYERS, EXPERTS, EXPERTS_PER_TOKEN, EXPERT_DIM = 4, 8, 2, 64
WINDOW = 32
YARN_FACTOR, ORIGINAL_POSITIONS = 32.0, 128

FOLLOW = 3.0
"""How far the embedding of a token with a fixed successor reaches along a direction of its own; the
successor's row of the head reaches as far, which puts it some 20 nats above a random token."""
STOP = 3.1
"""How far the head's row of <|return|> reaches along the direction that ordinary tokens share:
against 49,000 random tokens that is about one end of a turn in ten tokens."""


def config(vocab_size: int, special: Mapping[str, int]) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": special["<|return|>"],
        "experts_per_token": EXPERTS_PER_TOKEN,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": EXPERT_DIM,
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(LAYERS)
        ],
        "max_position_embeddings": int(YARN_FACTOR) * ORIGINAL_POSITIONS,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEY_HEADS,
        "num_local_experts": EXPERTS,
        "output_router_logits": False,
        "pad_token_id": special["<|endoftext|>"],
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": ORIGINAL_POSITIONS,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": WINDOW,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def layer_weights(layer: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The weights of one layer by their Hugging Face names, float32."""

    def normal(*shape: int, std: float = 0.05) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    query, key = HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM
    tensors = {
        "self_attn.sinks": normal(HEADS, std=1.0),
        "mlp.router.weight": normal(EXPERTS, HIDDEN, std=0.2),
        "mlp.router.bias": normal(EXPERTS),
        # gate and up take turns along the last dimension; both maps are stored [in, out]
        "mlp.experts.gate_up_proj": normal(EXPERTS, HIDDEN, 2 * EXPERT_DIM),
        "mlp.experts.gate_up_proj_bias": normal(EXPERTS, 2 * EXPERT_DIM),
        "mlp.experts.down_proj": normal(EXPERTS, EXPERT_DIM, HIDDEN),
        "mlp.experts.down_proj_bias": normal(EXPERTS, HIDDEN),
        "input_layernorm.weight": 1.0 + normal(HIDDEN),
        "post_attention_layernorm.weight": 1.0 + normal(HIDDEN),
    }
    for name, outputs, inputs in (
        ("q", query, HIDDEN),
        ("k", key, HIDDEN),
        ("v", key, HIDDEN),
        ("o", HIDDEN, query),
    ):
        tensors[f"self_attn.{name}_proj.weight"] = normal(outputs, inputs)
        tensors[f"self_attn.{name}_proj.bias"] = normal(outputs)
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def weights(
    vocab_size: int, *, chain: list[int], stop: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """All weights by their Hugging Face names, bfloat16.

    Args:
        vocab_size: rows V of the embeddings and of the head.
        chain: ids of which each follows the one before.
        stop: the id that ends a turn.
        generator: of all that is random.
    """
    basis, _ = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=generator))
    embeddings = torch.randn(vocab_size, HIDDEN, generator=generator) * 0.05 + basis[-1]
    head = torch.randn(vocab_size, HIDDEN, generator=generator) / HIDDEN**0.5  # logits of std 1
    head[stop] = basis[-1] * STOP
    for number, (token, successor) in enumerate(pairwise(chain)):
        embeddings[token] = basis[number] * FOLLOW
        head[successor] = basis[number] * FOLLOW
    embeddings[chain[-1]] = basis[len(chain)]  # no part of the shared direction: no empty turns
    tensors = {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        tensors |= layer_weights(layer, generator)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def make(out_dir: Path, *, tokenizer_dir: Path, seed: int = 0) -> Path:
    """Write the directory.

    Args:
        out_dir: is made if it does not exist; files of the same names are written over.
        tokenizer_dir: a Hugging Face directory whose ``tokenizer.json`` is taken as a base.
        seed: of the weights; the same seed and tokenizer give the same bytes.

    Returns:
        ``out_dir``.
    """
    special = write_harmony_tokenizer(tokenizer_dir, out_dir)
    tokenizer = Tokenizer.from_file(str(out_dir / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    header = [
        tokenizer.encode(word, add_special_tokens=False).ids for word in ("assistant", "final")
    ]
    if len(header[1]) != 1:
        raise ValueError(f"tokenizer_dir={str(tokenizer_dir)!r}: 'final' must be a single token")
    chain = [header[0][-1], special["<|channel|>"], header[1][0], special["<|message|>"]]
    tensors = weights(
        vocab_size,
        chain=chain,
        stop=special["<|return|>"],
        generator=torch.Generator().manual_seed(seed),
    )
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    settings = config(vocab_size, special)
    (out_dir / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": [special["<|return|>"], special["<|endoftext|>"], special["<|call|>"]],
        "pad_token_id": special["<|endoftext|>"],
    }
    (out_dir / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return out_dir


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write a tiny random gpt-oss.")
    parser.add_argument("out_dir", nargs="?", type=Path, help=f"default: {NAME} in the model cache")
    parser.add_argument(
        "--tokenizer", default=TOKENIZER, help="directory or model in the cache to take it from"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    out_dir = arguments.out_dir or sinkflex_home() / "models" / NAME
    try:
        tokenizer_dir = model_dir(arguments.tokenizer)
        make(out_dir, tokenizer_dir=tokenizer_dir, seed=arguments.seed)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
