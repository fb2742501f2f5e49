"""A Hugging Face directory of a tiny gpt-oss with every feature, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, EXPERT, HEADS, KV_HEADS, HEAD, EXPERTS, LAYERS, VOCAB = 32, 64, 4, 2, 16, 8, 4, 64
KEYS = 8
"""Keys that the layers with a window see."""

CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": EXPERT,
    "max_position_embeddings": 512,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
    "rope_theta": 1000.0,
    "router_aux_loss_coef": 0.9,
    "sliding_window": KEYS,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}


def tensors(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under Hugging Face's names; sinks and every bias far from zero."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, std: float = 0.3) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    state = {
        "model.embed_tokens.weight": random(VOCAB, WIDTH, std=1.0),
        "model.norm.weight": 1 + random(WIDTH),
        "lm_head.weight": random(VOCAB, WIDTH),
    }
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        for name, out_dim, in_dim in (
            ("self_attn.q_proj", HEADS * HEAD, WIDTH),
            ("self_attn.k_proj", KV_HEADS * HEAD, WIDTH),
            ("self_attn.v_proj", KV_HEADS * HEAD, WIDTH),
            ("self_attn.o_proj", WIDTH, HEADS * HEAD),
            ("mlp.router", EXPERTS, WIDTH),
        ):
            state[f"{block}.{name}.weight"] = random(out_dim, in_dim)
            state[f"{block}.{name}.bias"] = random(out_dim)
        state |= {
            f"{block}.self_attn.sinks": random(HEADS, std=1.0),
            f"{block}.mlp.experts.gate_up_proj": random(EXPERTS, WIDTH, 2 * EXPERT),
            f"{block}.mlp.experts.gate_up_proj_bias": random(EXPERTS, 2 * EXPERT),
            f"{block}.mlp.experts.down_proj": random(EXPERTS, EXPERT, WIDTH),
            f"{block}.mlp.experts.down_proj_bias": random(EXPERTS, WIDTH),
            f"{block}.input_layernorm.weight": 1 + random(WIDTH),
            f"{block}.post_attention_layernorm.weight": 1 + random(WIDTH),
        }
    return state


def packed(state: dict[str, Tensor], *, seed: int = 1) -> dict[str, Tensor]:
    """The same with random MXFP4 blocks and scales in the place of the experts' weights."""
    generator = torch.Generator().manual_seed(seed)

    def bytes_(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    result = {}
    for name, value in state.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            num_experts, in_dim, out_dim = value.shape
            result[f"{name}_blocks"] = bytes_(num_experts, out_dim, in_dim // 32, 16)
            result[f"{name}_scales"] = bytes_(num_experts, out_dim, in_dim // 32, low=121, high=126)
        else:
            result[name] = value
    return result


def write(directory: Path, *, state: dict[str, Tensor] | None = None, **config) -> Path:
    """Write the directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    (directory / "tokenizer.json").write_text("{}")
    save_file(tensors() if state is None else state, directory / "model.safetensors")
    return directory


def write_packed(directory: Path, *, state: dict[str, Tensor] | None = None, **config) -> Path:
    """An MXFP4 directory: bf16 but for the experts' weights, which are others than in ``state``."""
    state = packed(tensors(dtype=torch.bfloat16) if state is None else state)
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    config |= {"quantization_config": quantization, "torch_dtype": "bfloat16"}
    return write(directory, state=state, **config)
