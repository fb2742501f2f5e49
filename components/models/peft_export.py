"""Adapters alone, in the files that PEFT loads.

PEFT's LoRA is ``x W' + (alpha / r) x A' B'`` with ``lora_A`` [r, in] and ``lora_B`` [out, r], as
ours (https://huggingface.co/docs/peft, ``LoraConfig``). Hugging Face's rotary embedding wants the
rows of q and k in another order, so the rows of their B are permuted, as those of the base weight
are; A is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from components.models.conversion import to_hf
from components.models.decoder import PolicyModel
from components.models.lora import adapters

_PREFIX = "base_model.model."
_SEPARATE = ("llama", "mistral", "qwen2", "gpt_oss")
"""Types whose Hugging Face models have a linear of its own for each of ours."""


def check_adapter_export(model: PolicyModel) -> None:
    """Whether a model's training is in its adapters alone, and PEFT has a place for each.

    Raises:
        ValueError: if it has none, trains more than them, or its type or an adapter has no place.
    """
    found = adapters(model)
    setting = "checkpoints.export: adapter"
    if not found:
        raise ValueError(f"{setting}: the model has no adapters; use full, or a lora_ model")
    if model.config.model_type not in _SEPARATE:
        raise ValueError(
            f"{setting}: Hugging Face's {model.config.model_type} joins linears that are adapted "
            "apart here, so there is no adapter to write; use full, which merges them"
        )
    experts = [name for name, module in found.items() if module.weight.dim() != 2]
    if experts:
        raise ValueError(
            f"{setting}: {experts[0]} adapts every expert, and PEFT's layout for that is not "
            "written; use full, which merges them"
        )
    sinks = [n for n, p in model.named_parameters() if p.requires_grad and n.endswith("sinks")]
    if sinks:
        raise ValueError(
            f"{setting}: {sinks[0]} is trained and is no adapter; use full, or train_sinks: false"
        )


def adapter_state(model: PolicyModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters' weights under PEFT's names, contiguous, on the CPU.

    Args:
        model: says which linears are adapted.
        state: full state dict under the model's names.
    """
    tensors: dict[str, Tensor] = {}
    for name in adapters(model):
        a, b = (state[f"{name}.lora_{part}.weight"].detach() for part in "ab")
        # In its base weight's place, of an input as wide as the rank: that gives the name, and the
        # order of the rows.
        config = replace(model.config, embed_dim=b.shape[1])
        ((theirs, b),) = to_hf({f"{name}.weight": b}, config).items()
        stem = _PREFIX + theirs.removesuffix(".weight")
        tensors[f"{stem}.lora_A.weight"] = a.cpu().contiguous()
        tensors[f"{stem}.lora_B.weight"] = b.cpu().contiguous()
    return tensors


def save_adapter(
    model: PolicyModel,
    directory: Path,
    source_dir: Path,
    *,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        model: with adapters that :func:`check_adapter_export` has no complaint about.
        directory: to make.
        source_dir: the base model's directory, named in the config for PEFT to find.
        state: full state dict under the model's names; None: the model's own.
    """
    tensors = adapter_state(model, model.state_dict() if state is None else state)
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    first = next(iter(adapters(model).values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source_dir),
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    directory.mkdir(parents=True)
    text = json.dumps(config, indent=2) + "\n"
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_model.safetensors").chmod(0o644)  # safetensors makes it private
