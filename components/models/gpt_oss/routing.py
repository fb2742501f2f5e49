"""The router's part in the difference between sampling and training.

Routing is discrete: where two router logits nearly tie, the rounding of another kernel or batch can
send a token to another expert, and its log-probability jumps. Here the choices of two passes over
the same tokens are compared.

Suffixes: ``T`` tokens, ``k`` experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from components.models.gpt_oss.moe import MixtureOfExperts


class Routing:
    """The choices that a model made while it was recorded."""

    def __init__(self, layers: Sequence[MixtureOfExperts]) -> None:
        self._forwards: list[list[Tensor]] = [[] for _ in layers]

    def layers(self) -> list[Tensor]:
        """Of each layer ``[T, k]``, the experts of all tokens so far, in rising order."""
        return [torch.cat(forwards) for forwards in self._forwards]


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Record which experts each token of the forwards in this context goes to.

    Args:
        model: holds :class:`MixtureOfExperts` modules; without activation checkpointing, or under
            ``no_grad``, where no forward runs twice.

    Raises:
        ValueError: if it holds none.
    """
    layers = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no mixture of experts: nothing is routed")
    routing = Routing(layers)
    try:
        for layer, forwards in zip(layers, routing._forwards, strict=True):
            layer.record = forwards
        yield routing
    finally:
        for layer in layers:
            layer.record = None


def routing_mismatch(generator: Routing, trainer: Routing) -> dict[str, float]:
    """How much of the routing differs between two passes over the same tokens.

    Args:
        generator: of the sampling engine.
        trainer: of the training pass; the same tokens in the same order.

    Returns:
        mismatch/route_frac, the share of (token, layer) pairs whose set of experts differs;
        mismatch/route_token_frac, the share of tokens for which any layer does.

    Raises:
        ValueError: if the shapes differ.
    """
    ours, theirs = torch.stack(trainer.layers()), torch.stack(generator.layers())
    if ours.shape != theirs.shape:
        raise ValueError(
            f"trainer and generator routed {list(ours.shape)} and {list(theirs.shape)} (layers, "
            "tokens, experts): both must have seen the same tokens"
        )
    differs = (ours != theirs.to(ours.device)).any(dim=-1)  # [layers, T]
    return {
        "mismatch/route_frac": float(differs.double().mean()),
        "mismatch/route_token_frac": float(differs.any(dim=0).double().mean()),
    }
