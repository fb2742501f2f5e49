"""How much of a step's gradient is signal, from the gradients of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from components.training.parallelize import World, full_tensor


class GradientNoise:
    """Estimates the squared norm of a step's expected gradient, and the variance about it.

    Two rows of different groups have independent noise, so what their gradients have in common is
    signal: the mean of ``g_r . g_s`` over pairs of rows. For a gradient G that is the sum over rows
    r with n_r rollouts each, n in all, whose expectations are as n_r,

        signal = n^2 (|G|^2 - sum |g_r|^2) / (n^2 - sum n_r^2),     noise = |G|^2 - signal

    are unbiased (the gradient noise scale of McCandlish et al., https://arxiv.org/abs/1812.06162,
    appendix A.1, with parts of different sizes). In one step they are rough, and the signal may
    come out below 0: take means over steps. A row should hold whole groups, for rollouts of one
    group are not independent.

    Args:
        params: whose gradients are added up, row by row, and are empty now.
        world: this process among its peers.
    """

    def __init__(self, params: Sequence[nn.Parameter], world: World) -> None:
        self._params, self._world = params, world
        self._before: dict[int, Tensor] = {}
        self._num, self._num_squared, self._norms_squared = 0.0, 0.0, 0.0

    @torch.no_grad()
    def add(self, num_rollouts: int) -> None:
        """Count the row whose gradient has just been added. Collective.

        Args:
            num_rollouts: in this rank's row.
        """
        own: list[Tensor] = []
        for number, param in enumerate(self._params):
            if param.grad is None:
                continue
            before = self._before.setdefault(number, torch.zeros_like(param.grad))
            own.append(before.neg_().add_(param.grad))
        self._norms_squared += _norm_squared(own)
        for number, before in self._before.items():
            grad = self._params[number].grad
            assert grad is not None
            before.copy_(grad)
        (num,) = self._world.sum([num_rollouts])
        self._num += num
        self._num_squared += num * num

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """``grad/signal`` and ``grad/noise``; nothing where all is in one row. Collective."""
        pairs = self._num * self._num - self._num_squared
        if pairs <= 0.0:
            return {}
        whole = _norm_squared([p.grad for p in self._params if p.grad is not None])
        signal = self._num * self._num * (whole - self._norms_squared) / pairs
        return {"grad/signal": signal, "grad/noise": whole - signal}


def _norm_squared(grads: Sequence[Tensor]) -> float:
    return float(full_tensor(torch.nn.utils.get_total_norm(grads))) ** 2 if grads else 0.0
