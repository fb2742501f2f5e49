"""Optimizers by ``_component_``: what a config may name, and learning rates of any kind.

torchao's optimizers with states of 8, 4 or fp8 bits work on our fp32 master weights like any other.
They are compiled at their first step, and hold the learning rate as a tensor.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
from torch import Tensor

from components.training.component import COMPONENT
from components.training.schema import Component

_LOW_BIT = ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")


class OptimizerComponent(Component):
    """A component that is called with the parameters; what cannot work here is refused early."""

    def __init__(self) -> None:
        super().__init__(positional=1)

    def _check_inside(self, value: Any, path: str, problems: list[str]) -> Any:
        value = super()._check_inside(value, path, problems)
        problems += optimizer_problems(str(value.get(COMPONENT)), path)
        return value


def optimizer_problems(target: str, path: str) -> list[str]:
    """Why an optimizer cannot be used here, before anything is built.

    Args:
        target: dotted path of the optimizer.
        path: of the setting, for the messages.
    """
    package, _, name = target.rpartition(".")
    if package.partition(".")[0] != "torchao":
        return []
    where = f"{path}.{COMPONENT} = {target!r}"
    if name == "CPUOffloadOptimizer":
        return [
            f"{where}: it keeps copies of the weights itself, as this recipe's fp32 master weights "
            "already are; use torchao.optim.AdamW8bit to make its states smaller"
        ]
    if name not in _LOW_BIT:
        return []
    problems = []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        problems.append(
            f"{where}: its states cannot be gathered from several ranks for a checkpoint; run on "
            "one rank, or use torch.optim.AdamW, whose states FSDP2 shards"
        )
    compiler = os.environ.get("CXX", "g++")
    if not torch.cuda.is_available() and shutil.which(compiler) is None:
        problems.append(
            f"{where}: torchao compiles it at its first step, and there is no C++ compiler "
            f"({compiler!r}; the variable CXX names another); use torch.optim.AdamW"
        )
    return problems


def set_learning_rate(group: dict[str, Any], rate: float) -> None:
    """Change the learning rate of a parameter group.

    Args:
        group: of any optimizer; in torchao's the rate is a tensor, which compiled code reads.
        rate: the new one.
    """
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
