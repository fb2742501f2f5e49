"""Weights between Hugging Face directories and PolicyModel.

Hugging Face rotates halves of a head in RoPE, torchtune neighbouring pairs, so the rows of q and k
are permuted on the way in (torchtune's hf_to_tune) and back on the way out (tune_to_hf). Permuting
copies bits: a round trip is exact.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from components.disk import flush
from components.models.conversion import HAVE_SINKS, from_hf, is_hf_sink, to_hf
from components.models.decoder import ModelConfig, PolicyModel
from components.models.lora import adapters, merged_weight
from components.models.mxfp4 import BLOCKS, check_scales, decode_pairs
from components.models.nf4 import Pack, decoded, is_nf4


@runtime_checkable
class KeepsOnHost(Protocol):
    """A module with weights that ``state_dict`` does not know of."""

    def host_state(self) -> dict[str, Tensor]:
        """Them by name."""
        ...


_LM_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
# Everything beside the weights that transformers and vLLM read.
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def load_hf(model: PolicyModel, directory: str | Path, *, pack: Pack | None = None) -> None:
    """Fill a model with the weights of a Hugging Face directory, cast to the model's dtypes.

    Adapters are left alone, and so are sinks that the directory knows nothing of. Parameters on the
    meta device are put on the CPU.

    Args:
        model: not sharded.
        directory: with model.safetensors, or shards and model.safetensors.index.json.
        pack: what is stored in the place of a weight that was on the meta device, such as
            ``nf4.pack_linears``; one weight at a time, so that no more than one is held twice.

    Raises:
        FileNotFoundError: if a weight file is missing.
        ValueError: if tensors are missing, foreign or of another shape; the first few are named.
    """
    directory = Path(directory)
    parameters = {k: p for k, p in model.named_parameters() if not _is_adapter(k)}
    found = _read(directory)
    if not any(name.endswith(".blocks") for name in parameters):
        found = decode_pairs(found)
    optional = model.config.model_type not in HAVE_SINKS
    if optional and not any(is_hf_sink(name) for name in found):
        parameters = {k: p for k, p in parameters.items() if not k.endswith(".attn.sinks")}
    wanted = {name: tuple(t.shape) for name, t in _hf_meta(parameters, model.config).items()}
    if (
        _LM_HEAD in found
        and _LM_HEAD not in wanted
        and torch.equal(found[_LM_HEAD], found.get(_EMBEDDINGS, torch.empty(0)))
    ):
        del found[_LM_HEAD]  # some writers store the tied head too
    _check({name: tuple(t.shape) for name, t in found.items()}, wanted, directory)
    converted = from_hf(found, model.config)
    found.clear()  # and pop below: a large model must not be held twice in two dtypes
    with torch.no_grad():
        for name, parameter in parameters.items():
            value = converted.pop(name).to(parameter.dtype)
            if name.endswith(".scales"):
                check_scales(value)
            elif (
                value.is_floating_point() and value.data_ptr() % 16
            ):  # in the file's memory; torch's grouped products may want it
                value = value.clone()
            if parameter.is_meta:
                owner = model.get_submodule(name.rpartition(".")[0])
                value = value.contiguous() if pack is None else pack(name, value.contiguous())
                trained = parameter.requires_grad and not is_nf4(value)
                filled = torch.nn.Parameter(value, trained)
                setattr(owner, name.rpartition(".")[2], filled)
            else:
                parameter.copy_(value)


def save_hf(
    model: PolicyModel,
    directory: str | Path,
    source_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a directory that transformers and vLLM load, adapters merged into their base weights.

    A base in NF4 is decoded first, and the adapters are merged into that: what is written is the
    policy that was trained and sampled, in full precision. Merged into the weights of `source_dir`
    it would be another one, for the adapters were trained to make up for the rounding.

    All is written into ``<directory>.tmp`` first, synced, then renamed. A directory that is
    replaced stands as ``<directory>.old`` for the moment between two renames: give each checkpoint
    a name of its own.

    Args:
        model: its weights, unless `state` holds them; not changed.
        directory: to write; replaced if it is there.
        source_dir: the Hugging Face directory the model came from: config and tokenizer files.
        dtype: of the saved tensors; None keeps the base weights' dtype.
        state: full state dict under the model's names, gathered by the caller if the model is
            sharded.

    Raises:
        ValueError: if `directory` is `source_dir`, or `state` does not fit the model.
    """
    directory, source_dir = Path(directory), Path(source_dir)
    if directory.resolve() == source_dir.resolve():
        raise ValueError(f"cannot save into {directory}: it is the directory the model came from")
    tensors = hf_state(model, dtype=dtype, state=state)
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed run
    temporary.mkdir(parents=True)
    for name in _COPIED:
        if (source_dir / name).is_file():
            shutil.copyfile(source_dir / name, temporary / name)
    config = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))
    saved_dtype = str(tensors[_EMBEDDINGS].dtype).removeprefix("torch.")
    config.pop("dtype", None)
    if not any(name.endswith(BLOCKS) for name in tensors):  # MXFP4 was decoded
        config.pop("quantization_config", None)
    config.update(torch_dtype=saved_dtype, tie_word_embeddings=model.config.tie_word_embeddings)
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)  # safetensors makes it private
    _publish(temporary, directory)


def hf_state(
    model: PolicyModel,
    *,
    dtype: torch.dtype | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names, adapters merged, contiguous, on the CPU.

    Args and errors as in save_hf.
    """
    full = dict(model.state_dict() if state is None else state) | _host_state(model)
    base = {name: decoded(value.detach()) for name, value in full.items() if not _is_adapter(name)}
    for name, module in adapters(model).items():
        a, b = full[f"{name}.lora_a.weight"], full[f"{name}.lora_b.weight"]
        weight = base[f"{name}.weight"]
        merged = merged_weight(weight, a, b, scale=module.alpha / module.rank)
        base[f"{name}.weight"] = merged.to(dtype or weight.dtype)
    moved = {
        k: v.to("cpu", dtype if dtype and v.is_floating_point() else v.dtype)
        for k, v in base.items()
    }
    if model.config.model_type in HAVE_SINKS:  # trained in float32, saved as the rest is
        saved = moved["tok_embeddings.weight"].dtype
        moved |= {k: v.to(saved) for k, v in moved.items() if k.endswith(".attn.sinks")}
    converted = to_hf(moved, model.config)
    return {name: value.contiguous() for name, value in converted.items()}


def _host_state(model: PolicyModel) -> dict[str, Tensor]:
    """Weights that are in host memory and no parameters: streamed experts."""
    return {
        f"{path}.{name}": tensor
        for path, module in model.named_modules()
        if isinstance(module, KeepsOnHost)
        for name, tensor in module.host_state().items()
    }


def _hf_meta(parameters: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's names and shapes of a model's parameters, without data."""
    return to_hf({k: torch.empty_like(p, device="meta") for k, p in parameters.items()}, config)


def _is_adapter(name: str) -> bool:
    return ".lora_a." in name or ".lora_b." in name


def _read(directory: Path) -> dict[str, Tensor]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards: Iterable[str] = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    found: dict[str, Tensor] = {}
    for shard in shards:
        path = directory / shard
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no {shard}: not a whole model directory")
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def _check(found: Mapping[str, Any], wanted: Mapping[str, Any], directory: Path) -> None:
    missing = [name for name in wanted if name not in found]
    foreign = [name for name in found if name not in wanted]
    shapes = [
        f"{name} {list(found[name])}, the model has {list(wanted[name])}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    problems = [
        _summary("missing", missing),
        _summary("not in the model", foreign),
        _summary("of another shape", shapes),
    ]
    if any(problems):
        text = "\n  ".join(filter(None, problems))
        raise ValueError(f"the weights in {directory} do not fit the model:\n  {text}")


def _summary(what: str, names: list[str], *, shown: int = 4) -> str:
    if not names:
        return ""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} {what}: {'; '.join(names[:shown])}{more}"


def _publish(temporary: Path, directory: Path) -> None:
    for path in [*temporary.iterdir(), temporary]:
        flush(path)
    if directory.exists():
        old = directory.with_name(directory.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(directory, old)
        os.replace(temporary, directory)
        shutil.rmtree(old)
    else:
        os.replace(temporary, directory)
    flush(directory.parent)
