"""torch.compile, one graph for all layers.

Only the layers are compiled, each layer's ``forward`` and not the module: hooks (FSDP2's gathering
of weights, gradient accumulation in fp32) stay outside the graph, and all layers, having the same
code, share one. Lengths are symbols from the start (``dynamic=True``), so other rows do not mean
other graphs. The embedding and the chunked head stay eager.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch

from components.models.decoder import PolicyModel

logger = logging.getLogger(__name__)

Compile = Literal["auto"] | bool


def compile_layers(model: PolicyModel, *, compile: Compile, device: torch.device) -> bool:
    """Compile the layers of a model, in place.

    Args:
        model: not yet sharded.
        compile: True, False, or ``"auto"``: on CUDA if its compiler (Triton) is there, not on a
            CPU, where the eager layers are as fast (``tools/bench_compile.py`` measures it). What
            auto chose is logged.
        device: where the model will run.

    Returns:
        Whether the layers are compiled.

    Raises:
        ValueError: ``compile=True`` where no compiler is, naming what is missing.
    """
    if compile is False:
        return False
    missing = _missing_compiler(device)
    if compile == "auto":
        chosen = device.type == "cuda" and missing is None
        why = "" if chosen or missing is None else f" ({missing})"
        logger.info("compile on %s: %s (auto)%s", device.type, str(chosen).lower(), why)
        if not chosen:
            return False
    elif missing is not None:
        raise ValueError(f"compile: true, but {missing}; set compile: false")
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    return True


def _missing_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks on a device, as a phrase; None if nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, which makes the kernels for CUDA, is not there"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found (g++ or clang++ on the path, or the variable CXX)"
    return None
