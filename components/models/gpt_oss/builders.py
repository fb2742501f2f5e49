"""gpt-oss (OpenAI 2025, arXiv:2508.10925) from a Hugging Face directory, bf16 or MXFP4.

    model:
      _component_: components.models.gpt_oss.lora_gpt_oss_20b
      lora_rank: 16
      lora_alpha: 32
      lora_modules: [q_proj, k_proj, v_proj, output_proj]

``gpt_oss`` and ``lora_gpt_oss`` build what config.json says; those with a size refuse another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from components.models.decoder import PolicyModel
from components.models.gpt_oss.build import build
from components.models.gpt_oss.config import (
    GPT_OSS_20B,
    GPT_OSS_120B,
    GptOssConfig,
    check_sizes,
    read_config,
)
from components.models.gpt_oss.experts import add_expert_adapters
from components.models.gpt_oss.packed import FROZEN, stream_experts
from components.models.hf_config import read_raw
from components.models.lora import add_adapters, check_lora, start_adapters
from components.models.nf4 import pack_linears
from components.models.paths import model_dir as find_model_dir
from components.models.weights import load_hf

ADAPTABLE = ("q_proj", "k_proj", "v_proj", "output_proj", "gate_up_proj", "down_proj")
"""What adapters can be put on: the linears of the attention, the two maps of every expert."""
LINEARS = ADAPTABLE[:4]
"""What ``quantize_base`` holds in NF4, which is for matrices: not the stacks of experts."""


def gpt_oss(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    backend: str = "auto",
    experts: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """Load a gpt-oss of any size.

    Args:
        model_dir: a Hugging Face directory, or a name in the model cache. MXFP4 weights are decoded
            to bfloat16, which holds them exactly.
        dtype: of all weights but the sinks, which are float32.
        backend: of the attention: auto, folded, flex or reference.
        experts: how the products of the experts run: grouped (one kernel call), loop (over the
            experts that are used) or auto (grouped where torch has a kernel; logged).
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
    if experts in FROZEN:
        raise ValueError(
            f"experts: {experts!r} are frozen, and gpt_oss trains all weights; use lora_gpt_oss"
        )
    model = build(
        read_config(directory),
        dtype=dtype,
        backend=backend,
        experts=experts,
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
    )
    load_hf(model, directory)
    return model


def lora_gpt_oss(
    model_dir: str | Path,
    *,
    dtype: torch.dtype,
    lora_rank: int,
    lora_alpha: float,
    lora_modules: Sequence[str],
    lora_dtype: torch.dtype = torch.float32,
    quantize_base: bool = False,
    train_sinks: bool = False,
    backend: str = "auto",
    experts: str = "auto",
    checkpoint_activations: bool = False,
    offload_activations: bool = False,
) -> PolicyModel:
    """Load a gpt-oss of any size with its weights frozen and low-rank adapters to train.

    Args:
        model_dir: as in :func:`gpt_oss`.
        dtype: of the frozen weights, and of the products.
        lora_rank: rank of the adapters.
        lora_alpha: the adapters' output is scaled by lora_alpha / lora_rank.
        lora_modules: what is adapted in every layer, among q_proj, k_proj, v_proj, output_proj, and
            of every expert gate_up_proj and down_proj.
        lora_dtype: of the adapters' weights; float32 keeps small updates.
        quantize_base: hold the linears of the attention in NF4, 4.13 bits per weight; of the
            experts see `experts`.
        train_sinks: train the attention's sink logits too.
        backend: as in :func:`gpt_oss`.
        experts: as in :func:`gpt_oss`; or, of an MXFP4 directory, packed: kept in its four bits and
            decoded one expert at a time; or streamed: packed in host memory, two layers at a time
            on the device. Neither can be adapted: there would be nothing to merge adapters into.
        checkpoint_activations: as in :func:`gpt_oss`.
        offload_activations: as in :func:`gpt_oss`.

    Returns:
        The model; only the adapters (and sinks) require gradients.

    Raises:
        FileNotFoundError: if the directory is missing.
        ValueError: if a name in `lora_modules` matches nothing, the rank or alpha is not positive,
            or the directory does not fit.
    """
    check_lora(lora_modules, lora_rank=lora_rank, lora_alpha=lora_alpha, names=ADAPTABLE)
    directory = find_model_dir(model_dir)
    if experts in FROZEN:
        _check_frozen(directory, experts, lora_modules)
    model = build(
        read_config(directory),
        dtype=dtype,
        backend=backend,
        experts=experts,
        checkpoint_activations=checkpoint_activations,
        offload_activations=offload_activations,
    )
    add_adapters(model, lora_modules, rank=lora_rank, alpha=lora_alpha)
    add_expert_adapters(model, lora_modules, rank=lora_rank, alpha=lora_alpha)
    load_hf(model, directory, pack=pack_linears(LINEARS) if quantize_base else None)
    if experts == "streamed":
        stream_experts(model)
    start_adapters(model, lora_dtype=lora_dtype, train_sinks=train_sinks)
    return model


def _check_frozen(directory: Path, experts: str, lora_modules: Sequence[str]) -> None:
    adapted = [name for name in lora_modules if name not in LINEARS]
    if adapted:
        raise ValueError(
            f"lora_modules: {', '.join(adapted)} cannot be adapted with experts: {experts!r}, "
            f"whose MXFP4 weights take no merged adapter; allowed: {', '.join(LINEARS)}"
        )
    if not read_raw(directory).get("quantization_config"):
        raise ValueError(
            f"experts: {experts!r} needs MXFP4 weights, and {directory} has plain ones; use auto"
        )


def _of_size(
    builder: Callable[..., PolicyModel], wanted: GptOssConfig, *, name: str, doc: str
) -> Callable[..., PolicyModel]:
    """A builder with the same arguments that refuses a directory of another size."""

    @functools.wraps(builder)
    def build_size(model_dir: str | Path, **settings: Any) -> PolicyModel:
        _check_size(model_dir, wanted, builder=name)
        return builder(model_dir, **settings)

    build_size.__name__ = build_size.__qualname__ = name
    build_size.__doc__ = doc
    return build_size


gpt_oss_20b = _of_size(
    gpt_oss,
    GPT_OSS_20B,
    name="gpt_oss_20b",
    doc="Load a gpt-oss-20b (20.9 B parameters, 3.6 B used per token); see :func:`gpt_oss`.",
)
gpt_oss_120b = _of_size(
    gpt_oss,
    GPT_OSS_120B,
    name="gpt_oss_120b",
    doc="Load a gpt-oss-120b (116.8 B parameters, 5.1 B used per token); see :func:`gpt_oss`.",
)
lora_gpt_oss_20b = _of_size(
    lora_gpt_oss,
    GPT_OSS_20B,
    name="lora_gpt_oss_20b",
    doc="Load a frozen gpt-oss-20b with adapters to train; see :func:`lora_gpt_oss`.",
)
lora_gpt_oss_120b = _of_size(
    lora_gpt_oss,
    GPT_OSS_120B,
    name="lora_gpt_oss_120b",
    doc="Load a frozen gpt-oss-120b with adapters to train; see :func:`lora_gpt_oss`.",
)


def _check_size(model_dir: str | Path, wanted: GptOssConfig, *, builder: str) -> None:
    directory = find_model_dir(model_dir)
    check_sizes(read_config(directory), wanted, builder=builder, where=directory)
