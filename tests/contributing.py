"""The examples of CONTRIBUTING.md as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def fenced(kind: str, language: str) -> dict[str, str]:
    """The fenced blocks that stand below ``<!-- kind: NAME -->``, by name."""
    pattern = rf"^<!-- {kind}: (\w+) -->\n```{language}\n(.*?)^```$"
    return dict(re.findall(pattern, PAGE, flags=re.MULTILINE | re.DOTALL))


EXAMPLES = fenced("example", "python")
CONFIGS = fenced("config", "yaml")


def write_library(directory: Path) -> None:
    """The files of "From tau2 to your own tools", named as the page says."""
    for name in ("library", "library_more"):
        (directory / f"{name}.py").write_text(EXAMPLES[name], encoding="utf-8")
    (directory / "my").mkdir()
    for name, copied in (("library", "mock"), ("library_eval", "mock_eval")):
        config = edited(yaml.safe_load((ROOT / "configs" / f"{copied}.yaml").read_text()), name)
        path = directory / "my" / f"{copied}.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")


def edited(config: Any, name: str) -> Any:
    """A config with the keys of a block of the page; sections keep their other keys."""
    for key, value in yaml.safe_load(CONFIGS[name]).items():
        if isinstance(value, dict) and "_component_" not in value:
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    return config
