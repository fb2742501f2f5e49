"""A Hugging Face directory of a tiny Llama, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 24,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 50,
}


def tensors(*, tie: bool = True) -> dict[str, Tensor]:
    """Random weights under Hugging Face's names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    state = {"model.embed_tokens.weight": random(50, 24), "model.norm.weight": 1 + random(24)}
    for i in range(2):
        block = f"model.layers.{i}"
        state |= {
            f"{block}.self_attn.q_proj.weight": random(32, 24),
            f"{block}.self_attn.k_proj.weight": random(16, 24),
            f"{block}.self_attn.v_proj.weight": random(16, 24),
            f"{block}.self_attn.o_proj.weight": random(24, 32),
            f"{block}.mlp.gate_proj.weight": random(40, 24),
            f"{block}.mlp.up_proj.weight": random(40, 24),
            f"{block}.mlp.down_proj.weight": random(24, 40),
            f"{block}.input_layernorm.weight": 1 + random(24),
            f"{block}.post_attention_layernorm.weight": 1 + random(24),
        }
    if not tie:
        state["lm_head.weight"] = random(50, 24)
    return state


def write(directory: Path, *, tie: bool = True, state: dict[str, Tensor] | None = None) -> Path:
    """Write the directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"tie_word_embeddings": tie}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    save_file(tensors(tie=tie) if state is None else state, directory / "model.safetensors")
    return directory


def write_narrow(directory: Path, **settings: Any) -> Path:
    """The same with heads of width / number, as torchtune's builders make them, and settings."""
    state = tensors()
    for name in state:
        if "q_proj" in name:
            state[name] = state[name][:24].contiguous()
        elif "k_proj" in name or "v_proj" in name:
            state[name] = state[name][:12].contiguous()
        elif "o_proj" in name:
            state[name] = state[name][:, :24].contiguous()
    write(directory, state=state)
    config = CONFIG | {"head_dim": 6} | settings
    (directory / "config.json").write_text(json.dumps(config))
    return directory
