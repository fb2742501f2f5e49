"""Names and layouts of weights: Hugging Face's and torchtune's, by the model's type.

torchtune's own conversions do the work. Sinks have no place in them: they keep the name that
gpt-oss gave them, ``model.layers.*.self_attn.sinks``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.models.phi3._convert_weights import phi3_hf_to_tune, phi3_tune_to_hf
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf

from components.models.decoder import ModelConfig

State = dict[str, Tensor]


def _llama_sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "dim": config.embed_dim,
        "head_dim": config.head_dim,
    }


def _llama_from_hf(state: State, config: ModelConfig) -> State:
    return hf_to_tune(state, **_llama_sizes(config))


def _llama_to_hf(state: State, config: ModelConfig) -> State:
    return tune_to_hf(state, **_llama_sizes(config))


def _qwen2_from_hf(state: State, config: ModelConfig) -> State:
    return qwen2_hf_to_tune(state, tie_word_embeddings=config.tie_word_embeddings)


def _qwen2_to_hf(state: State, config: ModelConfig) -> State:
    return qwen2_tune_to_hf(state, tie_word_embeddings=config.tie_word_embeddings)


def _phi3_from_hf(state: State, config: ModelConfig) -> State:
    return phi3_hf_to_tune(
        state,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        dim=config.embed_dim,
    )


def _phi3_to_hf(state: State, config: ModelConfig) -> State:
    return phi3_tune_to_hf(state)


def _gpt_oss_from_hf(state: State, config: ModelConfig) -> State:
    from components.models.gpt_oss import conversion  # its package loads weights with this module

    return conversion.from_hf(state, config)


def _gpt_oss_to_hf(state: State, config: ModelConfig) -> State:
    from components.models.gpt_oss import conversion

    return conversion.to_hf(state, config)


_Convert = Callable[[State, ModelConfig], State]
CONVERSIONS: Mapping[str, tuple[_Convert, _Convert]] = {
    "llama": (_llama_from_hf, _llama_to_hf),
    "mistral": (_llama_from_hf, _llama_to_hf),
    "qwen2": (_qwen2_from_hf, _qwen2_to_hf),
    "phi3": (_phi3_from_hf, _phi3_to_hf),
    "gpt_oss": (_gpt_oss_from_hf, _gpt_oss_to_hf),
}
"""Model type -> (from Hugging Face, to Hugging Face)."""

HAVE_SINKS = ("gpt_oss",)
"""Types whose checkpoints have sinks, in the dtype of the other weights."""

_HF_SINKS = re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks")
_TUNE_SINKS = re.compile(r"layers\.(\d+)\.attn\.sinks")


def from_hf(state: Mapping[str, Tensor], config: ModelConfig) -> State:
    """Tensors under the model's names, q and k laid out for its rotary embedding.

    Args:
        state: under Hugging Face's names; complete.
        config: of the model.
    """
    convert, _ = CONVERSIONS[config.model_type]
    plain = {name: t for name, t in state.items() if not _HF_SINKS.fullmatch(name)}
    return convert(plain, config) | _renamed(state, _HF_SINKS, r"layers.\1.attn.sinks")


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> State:
    """The reverse of :func:`from_hf`, bit for bit.

    Args:
        state: under the model's names, adapters merged.
        config: of the model.
    """
    _, convert = CONVERSIONS[config.model_type]
    plain = {name: t for name, t in state.items() if not _TUNE_SINKS.fullmatch(name)}
    sinks = _renamed(state, _TUNE_SINKS, r"model.layers.\1.self_attn.sinks")
    return convert(plain, config) | sinks


def is_hf_sink(name: str) -> bool:
    """Whether a tensor of a Hugging Face directory holds sinks."""
    return _HF_SINKS.fullmatch(name) is not None


def _renamed(state: Mapping[str, Tensor], pattern: re.Pattern[str], name: str) -> State:
    return {pattern.sub(name, key): t for key, t in state.items() if pattern.fullmatch(key)}
