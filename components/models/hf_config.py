"""What config.json of a Hugging Face directory says, in our names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.models.decoder import ModelConfig


def read_raw(directory: Path) -> dict[str, Any]:
    """The file as it stands."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary embedding; transformers 4 and 5 keep them in different places."""
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    settings.setdefault("rope_theta", raw.get("rope_theta") or 10_000.0)
    return settings


def rope_type(raw: Mapping[str, Any]) -> str:
    """``default``, ``llama3``, ``yarn``, ..."""
    settings = rope_settings(raw)
    return settings.get("rope_type", settings.get("type", "default"))


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Sizes of a decoder.

    Args:
        raw: config.json of a Llama or a relative of it.
    """
    num_heads = raw["num_attention_heads"]
    return ModelConfig(
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        embed_dim=raw["hidden_size"],
        ffn_dim=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        rope_base=float(rope_settings(raw)["rope_theta"]),
        norm_eps=raw["rms_norm_eps"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        model_type=raw["model_type"],
    )


def model_windows(raw: Mapping[str, Any]) -> list[int | None]:
    """The window of each layer: the largest distance in positions that is still seen.

    Hugging Face counts the query's own key (a ``sliding_window`` of W sees distances 0 to W - 1).

    Args:
        raw: config.json of a Llama or a relative of it.
    """
    num_layers, size = raw["num_hidden_layers"], raw.get("sliding_window")
    if size is None or not raw.get("use_sliding_window", True):
        return [None] * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:  # Qwen2: the first layers see everything
        full = raw.get("max_window_layers", 0) if "use_sliding_window" in raw else 0
        kinds = ["full_attention"] * min(full, num_layers)
        kinds += ["sliding_attention"] * (num_layers - len(kinds))
    return [size - 1 if kind == "sliding_attention" else None for kind in kinds]


def check_settings(directory: Path, builder: str, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse what a builder does not build.

    Args:
        directory: whose config.json it is.
        builder: its name, for the message.
        settings: name -> (value found, value supported).

    Raises:
        ValueError: naming the first setting that differs.
    """
    for setting, (value, supported) in settings.items():
        if value != supported:
            raise ValueError(
                f"{directory / 'config.json'}: {setting} is {value!r}; "
                f"{builder} builds {supported!r} only"
            )
