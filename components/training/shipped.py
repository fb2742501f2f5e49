"""The recipes and configs that come with SinkFlex-RL, found by name.

In a checkout they lie in ``recipes/`` and ``configs/`` beside ``components/``; a wheel carries
them inside the package, because a top-level package ``recipes`` belongs to torchtune.
"""

from __future__ import annotations

import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def root() -> Path:
    """The directory that holds ``recipes/`` and ``configs/``."""
    inside = _PACKAGE / "_shipped"
    return inside if inside.is_dir() else _PACKAGE.parent


def recipes() -> dict[str, Path]:
    """Name to file of each recipe, e.g. ``grpo_agentic``."""
    files = sorted((root() / "recipes").glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def configs() -> dict[str, Path]:
    """Name to file of each config, e.g. ``retail`` or ``gpt_oss/20b_retail``."""
    folder = root() / "configs"
    return {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for file in sorted(folder.rglob("*.yaml"))
    }


def recipe_of(config: Path) -> str | None:
    """The config's top-level ``recipe:``, read without parsing the YAML."""
    found = re.search(r"^recipe:[ \t]*[\"']?([^\s\"'#]+)", config.read_text("utf-8"), re.MULTILINE)
    return found and found[1]
