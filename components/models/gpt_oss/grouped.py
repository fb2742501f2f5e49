"""Products of rows with the weights of the experts that they were sent to.

Suffixes: ``T`` tokens, ``k`` experts per token, ``S`` = T * k rows, ``E`` experts, ``D`` width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger(__name__)

METHODS = ("auto", "grouped", "loop")
_GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_logged: set[tuple[str, torch.dtype, str]] = set()


class Groups(NamedTuple):
    """Rows of a batch, sorted by expert."""

    expert: Tensor
    """[S] long, expert of each sorted row."""
    ends: Tensor
    """[E] int32, one past the last row of each expert."""
    order: Tensor
    """[S] long: the sorted row s is (token, choice) number order[s], tokens first."""
    inverse: Tensor
    """[T, k] long: where each choice of a token went."""
    counts: Tensor
    """[E] long, rows of each expert."""


def group(chosen: Tensor, *, num_experts: int) -> Groups:
    """Sort the choices of all tokens by expert.

    Args:
        chosen: ``[T, k]`` long, the experts of each token.
        num_experts: E.
    """
    flat = chosen.flatten()
    expert, order = flat.sort(stable=True)
    places = torch.arange(len(flat), device=flat.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    # Not bincount: the shape of its result depends on the data, which breaks a compiled graph.
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    return Groups(expert, counts.cumsum(0).to(torch.int32), order, inverse.view_as(chosen), counts)


def method_for(rows: Tensor, weight: Tensor) -> str:
    """What ``auto`` stands for: ``grouped`` where this torch has a kernel for it, else ``loop``.

    Args:
        rows: ``[S, D]``.
        weight: ``[E, D, out]``.
    """
    return "loop" if why_not_grouped(rows, weight) else "grouped"


def why_not_grouped(rows: Tensor, weight: Tensor) -> str:
    """Why grouped products cannot run here, or nothing.

    Args:
        rows: ``[S, D]``.
        weight: ``[E, D, out]``.
    """
    if _GROUPED_MM is None:
        return f"torch {torch.__version__} has none"
    if rows.device.type not in ("cpu", "cuda"):
        return f"torch has none for {rows.device.type}"
    known = (torch.bfloat16,) if rows.device.type == "cuda" else (torch.bfloat16, torch.float32)
    if rows.dtype not in known:
        return f"torch has none for {rows.dtype} on {rows.device.type}"
    if torch.compiler.is_compiling() and rows.dtype != torch.bfloat16:
        return f"compiled code has none for {rows.dtype}"  # its shape function refuses it
    if rows.device.type == "cuda" and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return "the device is older than compute capability 8.0"
    for size in weight.shape[1:]:
        if size * weight.element_size() % 16:
            return f"rows of {size} {weight.dtype} are no multiple of 16 bytes"
    return ""


def grouped_product(rows: Tensor, weight: Tensor, groups: Groups, *, method: str) -> Tensor:
    """Each row times the weight of its expert.

    Args:
        rows: ``[S, D]``, sorted by expert.
        weight: ``[E, D, out]``.
        groups: which rows belong to which expert.
        method: ``grouped``, ``loop`` (over the experts that are used) or ``auto``.

    Returns:
        ``[S, out]``.

    Raises:
        ValueError: an unknown method, or ``grouped`` where it cannot run.
    """
    if method == "auto":
        method = method_for(rows, weight)
        key = (rows.device.type, rows.dtype, method)
        if not torch.compiler.is_compiling() and key not in _logged:
            _logged.add(key)
            why = why_not_grouped(rows, weight)
            log.info("experts on %s in %s: %s (auto)%s", *key, f", {why}" if why else "")
    if method == "grouped":
        why = why_not_grouped(rows, weight)
        if why:
            raise ValueError(f"experts: 'grouped' cannot run here: {why}; use 'loop' or 'auto'")
        assert _GROUPED_MM is not None
        return _GROUPED_MM(rows, weight, offs=groups.ends)
    if method != "loop":
        raise ValueError(f"experts must be one of {', '.join(METHODS)}, not {method!r}")
    return _loop(rows, weight, groups.ends)


def used_experts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Experts that have rows, and their rows."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


# An operator of its own, so that compiled code calls it without looking inside: how many rows an
# expert gets is known only when it runs.
@torch.library.custom_op("sinkflex::expert_loop", mutates_args=())
def _loop(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``[S, D]`` times ``[E, D, out]``, one product for each expert that is used."""
    out = rows.new_empty(len(rows), weight.shape[2])
    for expert, part in used_experts(ends):
        torch.mm(rows[part], weight[expert], out=out[part])
    return out


@_loop.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@torch.library.custom_op("sinkflex::expert_loop_backward", mutates_args=())
def _loop_backward(
    grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, need_rows: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of rows and weight; an empty tensor for one that is not needed."""
    grad_rows = torch.empty_like(rows) if need_rows else rows.new_empty(0)
    grad_weight = torch.zeros_like(weight) if need_weight else weight.new_empty(0)
    for expert, part in used_experts(ends):
        if need_rows:
            torch.mm(grad[part], weight[expert].t(), out=grad_rows[part])
        if need_weight:
            torch.mm(rows[part].t(), grad[part], out=grad_weight[expert])
    return grad_rows, grad_weight


@_loop_backward.register_fake
def _(
    grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor, need_rows: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(rows) if need_rows else rows.new_empty(0),
        torch.empty_like(weight) if need_weight else weight.new_empty(0),
    )


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    need_rows, need_weight, _ = ctx.needs_input_grad
    grads = _loop_backward(grad, *ctx.saved_tensors, need_rows, need_weight)
    return grads[0] if need_rows else None, grads[1] if need_weight else None, None


_loop.register_autograd(_gradients, setup_context=_keep)


class Scatter(torch.autograd.Function):
    """Rows ``[S, D]`` sorted by expert, from tokens ``[T, D]``.

    The backward adds a token's rows in a fixed order; that of an indexing may add them in any.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[torch.div(order, inverse.shape[1], rounding_mode="floor")]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        total = grads[0][inverse[:, 0]].to(wide, copy=True)
        for choice in range(1, inverse.shape[1]):
            total += grads[0][inverse[:, choice]]
        return total.to(grads[0].dtype), None, None


class Gather(torch.autograd.Function):
    """Tokens ``[T, D]``: the sum of their rows ``[S, D]``, each times its weight ``[T, k]``.

    Summed in at least fp32 in the order of a token's choices, so that a token's result does not
    depend on the others, and nothing but the rows is kept.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        total = rows[inverse[:, 0]].to(weights.dtype) * weights[:, :1]
        for choice in range(1, inverse.shape[1]):
            total += rows[inverse[:, choice]].to(weights.dtype) * weights[:, choice, None]
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        grad_rows = grad_weights = None
        if ctx.needs_input_grad[0]:
            token = torch.div(order, inverse.shape[1], rounding_mode="floor")
            factor = weights.flatten()[order].unsqueeze(-1)
            grad_rows = (grads[0][token].to(weights.dtype) * factor).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            grad = grads[0].to(weights.dtype)
            grad_weights = torch.stack(
                [
                    torch.linalg.vecdot(rows[inverse[:, choice]].to(weights.dtype), grad)
                    for choice in range(inverse.shape[1])
                ],
                dim=1,
            )
        return grad_rows, grad_weights, None, None
