"""Configs: load, override, check deeply, and build what they name.

A recipe declares its schema and decorates its main function::

    @config.parse(SCHEMA)
    def recipe_main(cfg: DictConfig) -> None: ...

    if __name__ == "__main__":
        sys.exit(recipe_main())

Overrides are ``key=value`` (split at the first ``=``; the value is YAML) and ``~key`` to delete.
``${other.key}`` and ``${oc.env:NAME,default}`` work in values, e.g.
``output_dir: ${oc.env:SINKFLEX_RUNS,runs}/retail``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from components.training import component, shipped
from components.training.component import ConfigError, did_you_mean
from components.training.overrides import apply_override
from components.training.schema import (
    REQUIRED,
    Anything,
    Bool,
    Component,
    Field,
    Float,
    Int,
    ListOf,
    MapOf,
    OneOf,
    Schema,
    Section,
    Str,
    as_field,
    describe,
)

__all__ = [
    "REQUIRED",
    "Anything",
    "Bool",
    "Component",
    "ConfigError",
    "Field",
    "Float",
    "Int",
    "ListOf",
    "MapOf",
    "OneOf",
    "Schema",
    "Section",
    "Str",
    "as_dict",
    "as_partial",
    "config_errors",
    "instantiate",
    "load_config",
    "parse",
    "validate",
]

Check = Callable[[DictConfig], Iterable[str]]


def load_config(path_or_name: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config and apply overrides in order; interpolations stay unresolved.

    Args:
        path_or_name: A YAML file, or the name of a shipped config such as ``retail``.
        overrides: ``key.path=value`` or ``~key.path``. A plain string for a component replaces
            its ``_component_`` and keeps the other keys, as in torchtune.

    Raises:
        ConfigError: No such file, not YAML, not a mapping, or a malformed override.
    """
    path = find_config(path_or_name)
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    plain = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(plain, dict)
    for override in overrides:
        apply_override(plain, override)
    return OmegaConf.create(plain)


def find_config(path_or_name: str | Path) -> Path:
    """The file of a config given by path or by the name of a shipped one.

    Raises:
        ConfigError: There is none.
    """
    name, path = str(path_or_name), Path(path_or_name)
    known = shipped.configs()
    if path.suffix not in {".yaml", ".yml"} and name in known:
        return known[name]
    if path.is_file():
        return path
    raise ConfigError(
        f"config {name!r} is neither a file nor a shipped config"
        f"{did_you_mean(name, list(known))} (`tune ls` lists the shipped ones)"
    )


def validate(cfg: DictConfig, schema: Schema, *, check: Check | None = None) -> DictConfig:
    """The config with defaults filled in and interpolations resolved, checked against a schema.

    Args:
        cfg: What ``load_config`` returned.
        schema: Dict of fields; see ``components.training.schema``. The key ``recipe`` is always
            allowed: it names the recipe that ``tune validate`` checks the config for.
        check: Further problems of the whole config, e.g. of two keys that contradict each other;
            asked only when the schema is satisfied.

    Raises:
        ConfigError: With every problem, one a line, each naming its full key path.
    """
    section = as_field(schema)
    assert isinstance(section, Section)
    if "recipe" not in section.fields:
        section = Section({"recipe": Str(default=None), **section.fields})
    plain = OmegaConf.to_container(cfg, resolve=False)
    problems: list[str] = []
    resolved = _resolve(OmegaConf.create(section.fill(plain)), "", problems)
    if not problems:  # an unresolved value would be reported twice
        resolved = section.check(resolved, "", problems)
    if not problems:
        checked = OmegaConf.create(_escape(resolved))
        OmegaConf.set_struct(checked, True)
        problems += check(checked) if check else []
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in the config:", *problems]))
    return checked


def _resolve(node: Any, path: str, problems: list[str]) -> Any:
    """Plain containers with interpolations resolved; what fails goes to ``problems``."""
    if not isinstance(node, (DictConfig, ListConfig)):
        return node
    keys: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
    found = {}
    for key in keys:
        where = f"{path}.{key}".lstrip(".") if isinstance(node, DictConfig) else f"{path}[{key}]"
        try:
            found[key] = _resolve(node[key], where, problems)
        except OmegaConfBaseException as error:
            problems.append(f"{where}: {str(error).splitlines()[0]}")
    return found if isinstance(node, DictConfig) else list(found.values())


def _escape(value: Any) -> Any:
    """Keep a resolved string that contains ``${`` from being read as an interpolation again."""
    if isinstance(value, Mapping):
        return {key: _escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escape(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def parse(
    schema: Schema, *, check: Check | None = None
) -> Callable[[Callable[[DictConfig], Any]], Callable[..., Any]]:
    """Decorate a recipe's main: reads ``--config`` and overrides, checks, then calls it.

    The decorated function takes an optional list of arguments (default: the command line), and
    has ``validate(cfg)``, which ``tune validate`` uses. A ConfigError, also one raised by the
    recipe itself, is printed without a traceback, and the exit code is 2.

    Args:
        schema: Dict of fields; see ``components.training.schema``.
        check: As in ``validate``.
    """

    def decorate(main: Callable[[DictConfig], Any]) -> Callable[..., Any]:
        @functools.wraps(main)
        def wrapper(argv: Sequence[str] | None = None) -> Any:
            parser = argparse.ArgumentParser(
                description=main.__doc__,
                epilog="keys:\n" + describe(as_field(schema)),
                formatter_class=argparse.RawDescriptionHelpFormatter,
                usage="%(prog)s --config CONFIG [key=value ...] [~key ...]",
                allow_abbrev=False,
            )
            parser.add_argument("--config", required=True, help="path or name of a config")
            args, overrides = parser.parse_known_args(argv)
            if os.getcwd() not in sys.path:  # components of the user's own
                sys.path.insert(0, os.getcwd())
            try:
                cfg = validate(load_config(args.config, overrides), schema, check=check)
                return main(cfg)
            except ConfigError as error:
                if os.environ.get("SINKFLEX_TRACEBACK"):
                    raise
                where = " (SINKFLEX_TRACEBACK=1 shows where)" if error.__cause__ else ""
                print(f"{parser.prog}: {args.config}: {error}{where}", file=sys.stderr)
                raise SystemExit(2) from None
            except KeyboardInterrupt:
                print(f"{parser.prog}: interrupted", file=sys.stderr)
                raise SystemExit(130) from None

        wrapper.validate = functools.partial(validate, schema=schema, check=check)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def instantiate(node: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the component of a config node; None stays None.

    Components get plain Python containers, never config objects; components inside the node are
    built first. Keyword arguments win over the node's.

    Raises:
        ConfigError: The node names no component.
    """
    return None if node is None else component.build(_plain(node), *args, **kwargs)


def as_partial(node: Any, **kwargs: Any) -> functools.partial[Any]:
    """A picklable callable that builds the component later, e.g. in a worker process.

    Nothing is built before the call, components inside the node included.

    Raises:
        ConfigError: The node names no component.
    """
    return component.partial(_plain(node), **kwargs)


def as_dict(node: Any, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """A section of the config as plain keyword arguments, some keys left out."""
    plain = _plain(node)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in without}


@contextlib.contextmanager
def config_errors(*kinds: type[Exception]) -> Iterator[None]:
    """What components refuse while a recipe is set up is a mistake in its config.

    Args:
        kinds: the exceptions that mean so; ValueError and FileNotFoundError if none is given.
    """
    kinds = kinds or (ValueError, FileNotFoundError)
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise ConfigError(str(error)) from error


def _plain(node: Any) -> Any:
    if isinstance(node, (DictConfig, ListConfig)):
        return OmegaConf.to_container(node, resolve=True)
    return node
