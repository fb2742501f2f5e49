"""What a run's directory has to say about its rollouts: settings and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.models.paths import model_dir


def rollouts_file(run: Path) -> Path:
    """``rollouts.jsonl`` of a run, or the file itself.

    Raises:
        FileNotFoundError: there is none.
    """
    path = run / "rollouts.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; RUN is an output_dir or a rollouts.jsonl")
    return path


def read_config(folder: Path) -> dict[str, Any] | None:
    """``config.yaml`` of a run; None where there is none."""
    import yaml

    path = folder / "config.yaml"
    if not path.is_file():
        return None
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def find_tokenizer(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """The tokenizer of a run: of its newest checkpoint, or of the model that it started from."""
    steps = [path for path in folder.glob("step_*/tokenizer.json") if _number(path) is not None]
    if steps:
        return max(steps, key=lambda path: _number(path) or 0)
    if not config.get("model_dir"):
        return None
    try:
        path = model_dir(config["model_dir"]) / "tokenizer.json"
    except FileNotFoundError:  # the model was moved since: tokens are shown by their ids
        return None
    return path if path.is_file() else None


def _number(path: Path) -> int | None:
    text = path.parent.name.removeprefix("step_")
    return int(text) if text.isdigit() else None


def decoder(path: Path) -> Callable[[list[int]], str]:
    """Text of some ids, special tokens shown."""
    from components.chat.tokenizer import load_tokenizer

    return load_tokenizer(path).decode
