"""States of the random generators that a process has, as JSON.

Every draw of ours is a function of the run's seed and of the rollout's name, so nothing here
decides what we sample. What a user adds (dropout, a renderer that shuffles) may draw from the
global generators, and a resumed run must go on where they stood.
"""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """Of Python, PyTorch, this process's CUDA device, and NumPy if anything imported it."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [name, keys.tolist(), position, has_gauss, gauss]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back. One that was not saved stays as it is."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, gauss = state["numpy"]
        keys = numpy.array(keys, dtype=numpy.uint32)
        numpy.random.set_state((name, keys, position, has_gauss, gauss))


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
