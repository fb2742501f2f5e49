"""Log-probabilities of a packed row's trained tokens, from a model that applies the head itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from components.attention.plan import MaskPlan
from components.rl.logprobs import chunked_logprobs
from components.rl.packing import PackedBatch


def packed_logprobs(
    model: Callable[..., Any],
    batch: PackedBatch,
    *,
    plan: MaskPlan,
    temperature: float,
    chunk_size: int,
    compute_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run one row through the model.

    Args:
        model: called as ``model(tokens [1, T], mask=, input_pos=, index=, head=)``, like
            ``PolicyModel``.
        batch: the row.
        plan: ``MaskPlan.from_tree(batch.tree)``, built once and shared by all layers and passes.
        temperature: of the sampling; logits are divided by it.
        chunk_size: trained tokens whose logits exist at a time.
        compute_entropy: also return the entropy of each distribution.
        entropy_grad: the entropy carries a gradient.

    Returns:
        Log-probabilities [M] and entropies [M] (or None), fp32.
    """
    head = partial(
        chunked_logprobs,
        targets=batch.targets,
        temperature=temperature,
        chunk_size=chunk_size,
        compute_entropy=compute_entropy,
        entropy_grad=entropy_grad,
    )
    return model(
        batch.tokens[None],
        mask=plan,
        input_pos=batch.position[None],
        index=batch.index,
        head=head,
    )
