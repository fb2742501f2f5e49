"""Compiled layers, run as they are written: a cache has another shape at every step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from components.models.decoder import PolicyModel


def eager_layers(model: PolicyModel) -> AbstractContextManager[object]:
    """A context in which the layers of a model are not compiled anew for each shape of a cache.

    The switch is one for all threads. So it is left alone where no layer is compiled: while such
    an engine samples ahead, the trainer's attention on CUDA is compiled, and eager FlexAttention
    would build T x T.
    """
    compiled = any(map(_is_compiled, model.modules()))
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _is_compiled(module: nn.Module) -> bool:
    """By ``module.compile()``, or its ``forward`` by ``torch.compile``."""
    whole = getattr(module, "_compiled_call_impl", None) is not None
    return whole or hasattr(module.forward, "_torchdynamo_orig_callable")
