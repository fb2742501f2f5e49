"""Files that are whole or absent, and what a failing disk says."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path


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


def flush(path: Path) -> None:
    """Wait until a file, or the list of a directory's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Delete a directory if it is there."""
    if path.exists():
        shutil.rmtree(path)


def failed_write(error: Exception) -> tuple[int, str] | None:
    """Number and text of the operating system's error behind an error, if there is one.

    Neither safetensors nor torch.save raises an OSError where a write fails.
    """
    if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
        error = error.__context__
    if isinstance(error, OSError):
        return error.errno or errno.EIO, error.strerror or str(error)
    match = re.search(r"\(os error (\d+)\)", str(error))
    return (int(match[1]), os.strerror(int(match[1]))) if match else None
