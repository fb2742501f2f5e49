"""Where model directories live: one cache, found from any working directory."""

from __future__ import annotations

import os
from pathlib import Path


def sinkflex_home() -> Path:
    """The cache folder: ``$SINKFLEX_HOME``, or ``~/.cache/sinkflex``."""
    return Path(os.environ.get("SINKFLEX_HOME") or "~/.cache/sinkflex").expanduser()


def model_dir(name_or_path: str | Path) -> Path:
    """Find the Hugging Face directory of a model.

    Args:
        name_or_path: a directory, or the name of a model in the cache: ``smollm2-135m-instruct``
            means ``${SINKFLEX_HOME:-~/.cache/sinkflex}/models/smollm2-135m-instruct``. A bare name
            that is also a directory here means the directory.

    Returns:
        The directory, absolute.

    Raises:
        FileNotFoundError: if there is no such directory, or no config.json in it; the message says
            where it was looked for and which command makes the bundled model.
    """
    given = Path(name_or_path).expanduser()
    cached = sinkflex_home() / "models" / given
    is_name = not given.is_absolute() and len(given.parts) == 1 and given.parts != ("..",)
    for candidate in (given, cached) if is_name else (given,):
        if (candidate / "config.json").is_file():
            return candidate.resolve()
    for candidate in (given, cached) if is_name else (given,):
        if candidate.is_dir() and candidate != Path():
            raise FileNotFoundError(
                f"model {str(name_or_path)!r}: {candidate.resolve()} has no config.json; "
                "a model is a Hugging Face directory"
            )
    where = str(cached) if is_name else str(given.absolute())
    raise FileNotFoundError(
        f"model {str(name_or_path)!r} not found: there is no {where}. "
        "`python tools/get_model.py` makes smollm2-135m-instruct in the model cache "
        "(${SINKFLEX_HOME:-~/.cache/sinkflex}/models); "
        "another model is named by the path of its Hugging Face directory."
    )
