"""SmolLM2 (arXiv:2502.02737), a Llama with plain RoPE: all of it trainable, or adapters only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torchtune.modules import TransformerSelfAttentionLayer

from components.attention.rope import RotaryEmbedding
from components.attention.sink_attention import SinkAttention
from components.models.decoder import ModelConfig, PolicyModel
from components.models.hf_config import check_settings, model_config, read_raw, rope_type
from components.models.layers import FeedForward, RMSNorm
from components.models.lora import ADAPTABLE, AdapterLinear, check_lora, start_adapters
from components.models.nf4 import pack_linears
from components.models.paths import model_dir as find_model_dir
from components.models.weights import load_hf


def smollm2(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    backend: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """Load a SmolLM2, or another Llama with plain RoPE and no biases.

    Args:
        model_dir: a Hugging Face directory, or a name in the model cache.
        dtype: of all weights.
        backend: of the attention: auto, folded, flex or reference.
        checkpoint_activations: compute each layer again in the backward pass.
        offload_activations: move what the layers keep for the backward pass to host memory
            meanwhile; CUDA only.

    Returns:
        The model, all of it trainable.

    Raises:
        FileNotFoundError: if the directory is missing.
        ValueError: if it holds another architecture, or weights that do not fit.
    """
    directory = find_model_dir(model_dir)
    model = _build(
        read_config(directory),
        dtype=dtype,
        backend=backend,
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
    )
    load_hf(model, directory)
    return model


def lora_smollm2(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    lora_rank: int,
    lora_alpha: float,
    lora_modules: Sequence[str],
    lora_dtype: torch.dtype = torch.float32,
    quantize_base: bool = False,
    backend: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """Load a SmolLM2 with its weights frozen and low-rank adapters to train.

    ``torchtune.modules.peft.disable_adapter(model)`` gives the base model for a while; a fresh
    adapter (B = 0) changes nothing.

    Args:
        model_dir: a Hugging Face directory, or a name in the model cache.
        dtype: of the frozen weights, and of the products.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters' output is scaled by lora_alpha / lora_rank.
        lora_modules: which linears of every layer, among q_proj, k_proj, v_proj, output_proj, w1
            (gate), w2 (down), w3 (up).
        lora_dtype: of the adapters' weights; float32 keeps small updates.
        quantize_base: hold the frozen linears of the layers in NF4, 4.13 bits per weight.
        backend: of the attention: auto, folded, flex or reference.
        checkpoint_activations: compute each layer again in the backward pass.
        offload_activations: move what the layers keep for the backward pass to host memory
            meanwhile; CUDA only.

    Returns:
        The model; only the adapters require gradients.

    Raises:
        FileNotFoundError: if the directory is missing.
        ValueError: if a name in `lora_modules` matches nothing, the rank or alpha is not positive,
            or the directory does not fit.
    """
    check_lora(lora_modules, lora_rank=lora_rank, lora_alpha=lora_alpha)
    directory = find_model_dir(model_dir)
    model = _build(
        read_config(directory),
        dtype=dtype,
        backend=backend,
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
        lora_modules=lora_modules,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
    )
    load_hf(model, directory, pack=pack_linears(ADAPTABLE) if quantize_base else None)
    start_adapters(model, lora_dtype=lora_dtype)
    return model


def read_config(directory: Path) -> ModelConfig:
    """Read config.json of a Llama with plain RoPE.

    Raises:
        ValueError: naming the setting this builder does not support.
    """
    raw = read_raw(directory)
    check_settings(
        directory,
        "smollm2",
        {
            "model_type": (raw.get("model_type"), "llama"),
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "attention_bias": (bool(raw.get("attention_bias")), False),
            "mlp_bias": (bool(raw.get("mlp_bias")), False),
            "rope_type": (rope_type(raw), "default"),
        },
    )
    return model_config(raw)


def _build(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    backend: str,
    checkpoint_activations: bool,
    offload_activations: bool,
    lora_modules: Sequence[str] = (),
    lora_rank: int = 0,
    lora_alpha: float = 0.0,
) -> PolicyModel:
    """Build the model with its parameters on the meta device: loading fills them in once."""
    rope = RotaryEmbedding(
        config.head_dim, max_positions=config.max_positions, base=config.rope_base
    )

    def linear(name: str, in_dim: int, out_dim: int) -> nn.Module:
        if name in lora_modules:
            return AdapterLinear(in_dim, out_dim, rank=lora_rank, alpha=lora_alpha)
        return nn.Linear(in_dim, out_dim, bias=False)

    def layer(number: int) -> nn.Module:
        width, head_dim = config.embed_dim, config.head_dim
        query_dim, key_dim = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention = SinkAttention(
            layer=number,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            q_proj=linear("q_proj", width, query_dim),
            k_proj=linear("k_proj", width, key_dim),
            v_proj=linear("v_proj", width, key_dim),
            output_proj=linear("output_proj", query_dim, width),
            pos_embeddings=rope,
            backend=backend,
        )
        mlp = FeedForward(
            gate_proj=linear("w1", width, config.ffn_dim),
            down_proj=linear("w2", config.ffn_dim, width),
            up_proj=linear("w3", width, config.ffn_dim),
        )
        return TransformerSelfAttentionLayer(
            attention,  # pyright: ignore[reportArgumentType] (it takes MultiHeadAttention's place)
            mlp,
            sa_norm=RMSNorm(width, eps=config.norm_eps),
            mlp_norm=RMSNorm(width, eps=config.norm_eps),
        )

    with torch.device("meta"):
        model = PolicyModel(
            config,
            tok_embeddings=nn.Embedding(config.vocab_size, config.embed_dim),
            layers=[layer(number) for number in range(config.num_layers)],
            norm=RMSNorm(config.embed_dim, eps=config.norm_eps),
            output=None
            if config.tie_word_embeddings
            else nn.Linear(config.embed_dim, config.vocab_size, bias=False),
            checkpoint_activations=checkpoint_activations,
            offload_activations=offload_activations,
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model
