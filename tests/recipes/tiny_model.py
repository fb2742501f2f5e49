"""A random Llama with SmolLM2's tokenizer that ends its turns like a chat model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 2, 1, 32, 128, 49152
NUM_LAYERS, CONTEXT, END = 2, 2048, 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
END_FACTOR = 3.7
"""How far the row of <|im_end|> reaches along the direction that all embeddings share: about one
token in ten then ends its turn."""


def write(
    directory: Path, tokenizer_from: Path, *, context: int = CONTEXT, end_factor: float = END_FACTOR
) -> Path:
    """Write the directory; always the same weights, for a context of that many tokens.

    ``end_factor``: see ``END_FACTOR``; another one is needed for another temperature.
    """
    directory.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, directory / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": END,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": context,
        "mlp_bias": False,
        "num_attention_heads": NUM_HEADS,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": NUM_KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_tensors(end_factor), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors(end_factor: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.05) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    shared = torch.nn.functional.normalize(torch.randn(HIDDEN, generator=generator), dim=0)
    embeddings = normal(VOCAB, HIDDEN) + shared
    embeddings[END] = shared * end_factor
    tensors = {"model.embed_tokens.weight": embeddings, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(NUM_LAYERS):
        shapes = {
            "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    return tensors
