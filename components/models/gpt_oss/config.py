"""Sizes and settings of gpt-oss, and what config.json of a Hugging Face directory says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from components.models.decoder import ModelConfig
from components.models.gpt_oss.rope import Yarn
from components.models.hf_config import check_settings, read_raw, rope_settings, rope_type


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(ModelConfig):
    """Sizes of a gpt-oss; what has a default is the same in both released models.

    Example: gpt-oss-20b has 24 layers, 64 query and 8 key heads of 64, width 2880, and in every
    layer 32 experts of width 2880, of which each token uses 4.
    """

    num_experts: int
    "E, experts per layer."
    experts_per_token: int
    "k, experts that each token uses."
    windows: tuple[int | None, ...] | None = None
    """Of each layer the largest distance in positions that is still seen, None for no limit; None
    for gpt-oss's own: 127 (128 keys, the token's own included) on layers 0, 2, ..., the others
    without."""
    yarn: Yarn | None = Yarn()  # noqa: RUF009 (frozen)
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702
    max_positions: int = 131_072
    rope_base: float = 150_000.0
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    model_type: str = "gpt_oss"

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)  # super() does not find its class in one with slots
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) must be from 1 to num_experts "
                f"({self.num_experts})"
            )
        if self.windows is not None and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries, num_layers is {self.num_layers}: "
                "every layer needs one"
            )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of every layer, as `windows` counts it."""
        return self.windows or alternating_windows(self.num_layers, keys=128)


def alternating_windows(num_layers: int, *, keys: int) -> tuple[int | None, ...]:
    """Windows on layers 0, 2, ...

    Args:
        num_layers: how many layers.
        keys: keys that a token sees, its own included: the distance is one less.
    """
    return tuple(None if layer % 2 else keys - 1 for layer in range(num_layers))


GPT_OSS_20B = GptOssConfig(
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    embed_dim=2880,
    ffn_dim=2880,
    num_experts=32,
    experts_per_token=4,
    vocab_size=201_088,
)
GPT_OSS_120B = replace(GPT_OSS_20B, num_layers=36, num_experts=128)


def read_config(directory: Path) -> GptOssConfig:
    """Read config.json of a gpt-oss.

    Raises:
        ValueError: naming the setting that is not built.
    """
    raw = read_raw(directory)
    rope = rope_settings({"rope_theta": 150_000.0, **raw})
    quantization: Mapping[str, Any] = raw.get("quantization_config") or {}
    attention_factor = [rope.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")]
    check_settings(
        directory,
        "gpt_oss",
        {
            "model_type": (raw.get("model_type"), "gpt_oss"),
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "attention_bias": (raw.get("attention_bias", True), True),
            "attention_dropout": (raw.get("attention_dropout") or 0.0, 0.0),
            "output_router_logits": (bool(raw.get("output_router_logits")), False),
            "quant_method": (quantization.get("quant_method", "mxfp4"), "mxfp4"),
            "attention_factor, mscale, mscale_all_dim": (attention_factor, [None] * 3),
            "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
        },
    )
    return GptOssConfig(
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        embed_dim=raw["hidden_size"],
        ffn_dim=raw["intermediate_size"],
        num_experts=raw["num_local_experts"],
        experts_per_token=raw.get("num_experts_per_tok") or raw["experts_per_token"],
        vocab_size=raw["vocab_size"],
        windows=_windows(raw),
        yarn=_yarn(directory, raw),
        swiglu_limit=float(raw.get("swiglu_limit", 7.0)),
        swiglu_alpha=float(raw.get("swiglu_alpha", 1.702)),
        max_positions=raw["max_position_embeddings"],
        rope_base=float(rope["rope_theta"]),
        norm_eps=raw["rms_norm_eps"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
    )


def check_sizes(config: GptOssConfig, wanted: GptOssConfig, *, builder: str, where: Path) -> None:
    """Refuse a directory of another size.

    Args:
        config: what the directory says.
        wanted: what the builder builds.
        builder: its name.
        where: the directory.

    Raises:
        ValueError: naming every setting that differs.
    """
    different = [
        f"{field.name} is {found!r}, not {expected!r}"
        for field in fields(wanted)
        if (field.name != "windows" or config.num_layers == wanted.num_layers)
        and (found := _comparable(config, field.name))
        != (expected := _comparable(wanted, field.name))
    ]
    if different:
        raise ValueError(
            f"{where / 'config.json'} is not what {builder} builds: {'; '.join(different)}. "
            f"Use {builder.rpartition('_')[0]}, which builds any size"
        )


def _comparable(config: GptOssConfig, name: str) -> Any:
    return config.layer_windows if name == "windows" else getattr(config, name)


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers, keys = raw["num_hidden_layers"], raw.get("sliding_window")
    if keys is None:
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        return alternating_windows(num_layers, keys=keys)
    return tuple(keys - 1 if kind == "sliding_attention" else None for kind in kinds)


def _yarn(directory: Path, raw: Mapping[str, Any]) -> Yarn | None:
    kind = rope_type(raw)
    if kind == "default":
        return None
    check_settings(directory, "gpt_oss", {"rope_type": (kind, "yarn")})
    rope = rope_settings(raw)
    return Yarn(
        factor=float(rope["factor"]),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        original_positions=rope["original_max_position_embeddings"],
        truncate=rope.get("truncate", True),  # transformers' default; gpt-oss says false
    )
