"""Imported by the forkserver: prepares once what every worker would prepare for itself.

An entry is ``module``, or ``module:function``, or ``module:function:argument,argument``, e.g.
``components.envs.tau2_data:preload:retail``.
"""

from __future__ import annotations

import importlib
import os
import traceback

VARIABLE = "SINKFLEX_PRELOAD"
"""Environment variable with the entries, separated by spaces."""

done: set[str] = set()
"""Entries that this process, or the forkserver that it was forked from, has prepared."""


def prepare(entry: str) -> None:
    """Import a module and call its function."""
    module, *rest = entry.split(":")
    loaded = importlib.import_module(module)
    if rest:
        arguments = rest[1].split(",") if len(rest) > 1 else []
        getattr(loaded, rest[0])(*arguments)
    done.add(entry)


for _entry in os.environ.get(VARIABLE, "").split():
    try:
        prepare(_entry)
    except Exception:
        # A forkserver that raises here would be gone, and the workers with it: they meet the same
        # error themselves and report it.
        traceback.print_exc()
