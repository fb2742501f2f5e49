"""What a model computes in, and fp32 master weights for one that computes in bf16.

A bf16 weight has 8 bits of precision: an update of 1e-5 to a weight of 0.02 rounds away. The
optimizer therefore works on fp32 copies, gradients are added up in fp32, and the model's own
parameters are refreshed after each step. With fp32 parameters (and under FSDP2, which keeps fp32
shards and casts for compute) nothing is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from components.cpu import multiplies_bf16

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def settle_dtype(cfg: Any) -> torch.dtype:
    """What the model of a config computes in.

    ``auto`` is bf16 on CUDA and on a CPU with matrix products in bf16, else fp32, and then a line
    says so. It is replaced in the config: the run's directory tells what was computed, and a run
    that is resumed on another machine names the change.

    Args:
        cfg: of a recipe, with ``dtype`` (``auto``, ``bf16``, ``fp32``) and ``device``.
    """
    on_cuda = cfg.device == "cuda" or (cfg.device == "auto" and torch.cuda.is_available())
    fast = on_cuda or multiplies_bf16()
    chosen = cfg.dtype
    if chosen == "auto":
        cfg.dtype = "bf16" if fast else "fp32"
    if chosen != "fp32" and not fast:
        advice = "" if chosen == "auto" else "; fp32 or auto is many times faster"
        logger.warning("dtype: %s: this CPU has no products in bf16%s", cfg.dtype, advice)
    return DTYPES[cfg.dtype]


class MasterWeights:
    """What the optimizer sees of a model: one fp32 tensor per trainable parameter."""

    def __init__(self, model: nn.Module) -> None:
        """Take the trainable parameters of ``model``.

        Raises:
            ValueError: if no parameter of the model is trainable.
        """
        self._pairs: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            master = param
            if param.dtype != torch.float32:
                master = nn.Parameter(param.detach().to(torch.float32))
                param.register_post_accumulate_grad_hook(self._move_gradient(master))
            self._pairs.append((name, param, master))
        if not self._pairs:
            raise ValueError("the model has no trainable parameter")

    @staticmethod
    def _move_gradient(master: nn.Parameter):
        def hook(param: Tensor) -> None:
            assert param.grad is not None
            if master.grad is None:
                master.grad = param.grad.to(torch.float32)
            else:
                master.grad += param.grad
            param.grad = None

        return hook

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names of the model and the fp32 tensors that the optimizer updates."""
        for name, _, master in self._pairs:
            yield name, master

    def parameters(self) -> list[nn.Parameter]:
        """The fp32 tensors that the optimizer updates."""
        return [master for _, _, master in self._pairs]

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model after an optimizer step or a load."""
        for _, param, master in self._pairs:
            if param is not master:
                param.copy_(master)
