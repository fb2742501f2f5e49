"""A policy from a Hugging Face directory, built of torchtune's layers with our attention.

config.json says which of torchtune's builders, and every size; nothing is repeated in the YAML:

    model_dir: /data/Qwen2.5-0.5B-Instruct
    model:
      _component_: components.models.from_hf.policy

Types: llama (2, 3, 3.1, 3.2), mistral, qwen2 (Qwen 2 and 2.5), phi3.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.mistral import mistral
from torchtune.models.phi3 import phi3
from torchtune.models.qwen2 import qwen2
from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder

from components.attention.rope import RotaryEmbedding
from components.attention.sink_attention import SinkAttention
from components.models.attach import Windows, with_sink_attention
from components.models.conversion import CONVERSIONS
from components.models.decoder import ModelConfig, PolicyModel
from components.models.hf_config import (
    check_settings,
    model_config,
    model_windows,
    read_raw,
    rope_settings,
    rope_type,
)
from components.models.layers import with_fast_layers
from components.models.lora import ADAPTABLE, add_adapters, check_lora, start_adapters
from components.models.nf4 import pack_linears
from components.models.paths import model_dir as find_model_dir
from components.models.weights import load_hf

_BUILDERS = {"llama": llama2, "mistral": mistral, "qwen2": qwen2, "phi3": phi3}
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""What torchtune's scaled rotary embedding has built in; its factor is free."""


def policy(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    sinks: float | None = None,
    window: Windows = "model",
    prefix: int = 0,
    backend: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """Load a policy, all of it trainable.

    Args:
        model_dir: a Hugging Face directory, or a name in the model cache.
        dtype: of all weights but sinks, which are float32.
        sinks: where learned sink logits start if the directory has none; None for a model without
            sinks. transformers' classes of these models have no sinks: a checkpoint with them
            (``model.layers.*.self_attn.sinks``) is loaded by this builder only.
        window: largest distance in positions that is still seen: one for all layers, one per layer
            (None for all keys), or "model" for what config.json says.
        prefix: positions at the start that no window hides.
        backend: of the attention: auto, folded, flex or reference.
        checkpoint_activations: compute each layer again in the backward pass.
        offload_activations: move what the layers keep for the backward pass to host memory
            meanwhile; CUDA only.

    Returns:
        The model.

    Raises:
        FileNotFoundError: if the directory is missing.
        ValueError: if it holds an architecture or a setting that is not built, or weights that do
            not fit.
    """
    directory = find_model_dir(model_dir)
    model = _build(
        directory,
        dtype=dtype,
        attention={"sinks": sinks, "window": window, "prefix": prefix, "backend": backend},
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
    )
    load_hf(model, directory)
    return model


def lora_policy(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    lora_rank: int,
    lora_alpha: float,
    lora_modules: Sequence[str],
    lora_dtype: torch.dtype = torch.float32,
    quantize_base: bool = False,
    sinks: float | None = None,
    window: Windows = "model",
    prefix: int = 0,
    backend: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """Load a policy with its weights frozen, and low-rank adapters (and sinks) to train.

    Args:
        model_dir: a Hugging Face directory, or a name in the model cache.
        dtype: of the frozen weights, and of the products.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters' output is scaled by lora_alpha / lora_rank.
        lora_modules: which linears of every layer, among q_proj, k_proj, v_proj, output_proj, w1
            (gate), w2 (down), w3 (up).
        lora_dtype: of the adapters' weights; float32 keeps small updates.
        quantize_base: hold the frozen linears of the layers in NF4, 4.13 bits per weight.
        sinks: as in ``policy``; trained too.
        window: as in ``policy``.
        prefix: as in ``policy``.
        backend: of the attention: auto, folded, flex or reference.
        checkpoint_activations: compute each layer again in the backward pass.
        offload_activations: move what the layers keep for the backward pass to host memory
            meanwhile; CUDA only.

    Returns:
        The model; only adapters and sinks require gradients.

    Raises:
        FileNotFoundError: if the directory is missing.
        ValueError: as in ``policy``, or if a name in `lora_modules` matches nothing, or the rank or
            alpha is not positive.
    """
    check_lora(lora_modules, lora_rank=lora_rank, lora_alpha=lora_alpha)
    directory = find_model_dir(model_dir)
    model = _build(
        directory,
        dtype=dtype,
        attention={"sinks": sinks, "window": window, "prefix": prefix, "backend": backend},
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
        lora={"lora_modules": lora_modules, "rank": lora_rank, "alpha": lora_alpha},
    )
    load_hf(model, directory, pack=pack_linears(ADAPTABLE) if quantize_base else None)
    start_adapters(model, lora_dtype=lora_dtype)
    return model


def _build(
    directory: Path,
    *,
    dtype: torch.dtype,
    attention: dict[str, Any],
    checkpoint_activations: bool,
    offload_activations: bool,
    lora: dict[str, Any] | None = None,
) -> PolicyModel:
    """Build the model with its weights on the meta device: loading fills them in once."""
    raw = read_raw(directory)
    config = _read_config(directory, raw)
    with torch.device("meta"):
        decoder = _decoder(config, raw)
        with_fast_layers(decoder)
        for parameter in decoder.parameters():
            parameter.data = parameter.data.to(dtype)
        if lora is not None:
            add_adapters(decoder.layers, **lora)
    _share_rotary(decoder, config)
    if attention["window"] == "model":
        attention = attention | {"window": model_windows(raw)}
    with_sink_attention(decoder, **attention)
    for module in decoder.modules():
        if isinstance(module, SinkAttention) and module.sinks is not None:
            # Not rounded to bfloat16, where a logit of 10 cannot move by less than 0.06.
            module.sinks = nn.Parameter(module.sinks.detach().float())
    # Where the head is tied, the one that the builder made is left behind.
    output = None if config.tie_word_embeddings else decoder.output
    assert output is None or isinstance(output, nn.Linear)
    return PolicyModel(
        config,
        tok_embeddings=decoder.tok_embeddings,
        layers=list(decoder.layers),
        norm=decoder.norm,
        output=output,
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
    )


def _read_config(directory: Path, raw: dict[str, Any]) -> ModelConfig:
    """Sizes, after a check that torchtune's builders build just this model."""
    model_type = raw.get("model_type")
    if model_type not in _BUILDERS:
        close = difflib.get_close_matches(str(model_type), _BUILDERS, n=1)
        hint = f" (the nearest is {close[0]!r}, another architecture)" if close else ""
        raise ValueError(
            f"{directory / 'config.json'}: model_type is {model_type!r}{hint}; "
            f"allowed: {', '.join(_BUILDERS)}"
        )
    assert model_type in CONVERSIONS
    config, rope = model_config(raw), rope_settings(raw)
    scaled = model_type == "llama" and rope_type(raw) == "llama3"
    checks = {
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "head_dim": (config.head_dim, config.embed_dim // config.num_heads),
        # Qwen2 has biases on q, k and v whatever its config says; the others have none.
        "attention_bias": (bool(raw.get("attention_bias")) and model_type != "qwen2", False),
        "mlp_bias": (bool(raw.get("mlp_bias")), False),
        "rope_type": (rope_type(raw), "llama3" if scaled else "default"),
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)),
            1.0,
        ),
        **{
            name: (raw.get(name) or 0.0, 0.0)
            for name in ("attention_dropout", "resid_pdrop", "embd_pdrop")
        },
    }
    if scaled:
        checks |= {name: (rope.get(name), value) for name, value in _LLAMA3.items()}
    check_settings(directory, "from_hf", checks)
    return config


def _decoder(config: ModelConfig, raw: dict[str, Any]) -> TransformerDecoder:
    """torchtune's model of these sizes."""
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "embed_dim": config.embed_dim,
        "intermediate_dim": config.ffn_dim,
        "max_seq_len": config.max_positions,
        "norm_eps": config.norm_eps,
        "rope_base": config.rope_base,
    }
    if rope_type(raw) == "llama3":
        return llama3_1(**sizes, scale_factor=rope_settings(raw)["factor"])
    return _BUILDERS[config.model_type](**sizes)


def _share_rotary(decoder: TransformerDecoder, config: ModelConfig) -> None:
    """One rotary embedding for all layers, off the meta device; ours where the numbers are ours."""
    attentions: list[Any] = [layer.attn for layer in decoder.layers]
    rope = attentions[0].pos_embeddings
    if type(rope) is RotaryPositionalEmbeddings:
        rope = RotaryEmbedding(
            config.head_dim, max_positions=config.max_positions, base=config.rope_base
        )
    else:
        rope.rope_init()  # on the CPU now; its tables are not weights that loading brings
    for attention in attentions:
        attention.pos_embeddings = rope
