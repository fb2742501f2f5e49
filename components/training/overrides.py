"""Overrides of a config from the command line: ``key.path=value`` and ``~key.path``."""

from __future__ import annotations

from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.training.component import COMPONENT, ConfigError, did_you_mean, is_component


def apply_override(plain: dict[Any, Any], override: str) -> None:
    """Apply one override to a plain config in place.

    Raises:
        ConfigError: The override is malformed, or its path leads through a plain value.
    """
    key, equals, text = override.removeprefix("~").partition("=")
    parts = key.replace("[", ".").replace("]", "").split(".")
    if not all(parts) or override.startswith("-"):
        raise ConfigError(f"override {override!r}: must be key=value or ~key")
    if override.startswith("~"):
        _delete(plain, parts, override)
        return
    if not equals:
        raise ConfigError(f"override {override!r}: must be key=value or ~key")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(value, dict)
        value = None if text == "None" else value["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {override!r}: {text!r} is not valid YAML: {error}") from error
    parent: Any = plain
    for i, part in enumerate(parts[:-1]):
        parent = _child(parent, part, parts[:i], override, create=True)
    last = parts[-1]
    if isinstance(parent, list):
        parent[_index(parent, last, override)] = value
    elif is_component(parent.get(last)) and isinstance(value, str):
        parent[last][COMPONENT] = value
    else:
        parent[last] = value


def _child(parent: Any, part: str, above: list[str], override: str, *, create: bool) -> Any:
    """The container under ``part``, made if it is absent and ``create`` is set."""
    if isinstance(parent, list):
        child = parent[_index(parent, part, override)]
    elif create:
        if parent.get(part) is None:
            parent[part] = {}
        child = parent[part]
    else:
        child = parent.get(part)
    if not isinstance(child, (dict, list)):
        where = ".".join([*above, part])
        raise ConfigError(
            f"override {override!r}: {where!r} is {child!r}, which has no keys"
            + did_you_mean(part, [] if isinstance(parent, list) else [*map(str, parent)])
        )
    return child


def _index(parent: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(parent):
        raise ConfigError(
            f"override {override!r}: {part!r} must be an index below {len(parent)} of the list"
        )
    return int(part)


def _delete(plain: dict[Any, Any], parts: list[str], override: str) -> None:
    parents: list[Any] = [plain]
    for i, part in enumerate(parts[:-1]):
        parents.append(_child(parents[-1], part, parts[:i], override, create=False))
    parent, last = parents[-1], parts[-1]
    if isinstance(parent, list):
        del parent[_index(parent, last, override)]
    elif last not in parent:
        raise ConfigError(
            f"override {override!r}: no such key{did_you_mean(last, map(str, parent))}"
        )
    else:
        del parent[last]
