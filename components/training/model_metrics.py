"""What a model itself has to report of a step: nothing if it is dense, its routing if it is not."""

from __future__ import annotations

from collections.abc import Sequence

from components.models.decoder import PolicyModel, Reports
from components.policy.replay import routing_gap
from components.rl.packing import PackItem
from components.training.parallelize import World

NUM_REPLAYED = 64
"""Sampled tokens of one rollout that are fed through the engine's kernels again, one by one."""


def model_metrics(
    model: PolicyModel, engine_model: PolicyModel, items: Sequence[PackItem], world: World
) -> dict[str, float]:
    """Metrics of the model, to be taken after the backward pass and before the optimizer's step.

    Collective, and for a mixture of experts it costs one pass over a rollout of each rank: the
    first turn of the first item is replayed through the sampling engine's kernels and through the
    trained model, which still have the same weights.

    Args:
        model: that is trained.
        engine_model: that samples, maybe the same.
        items: this rank's rollouts of the step.
        world: this process among its peers.

    Returns:
        Means over the ranks: ``model.step_metrics()``, mismatch/route_frac and
        mismatch/route_token_frac. Empty for a dense model.
    """
    own = model.step_metrics()
    items = [item for item in items if 1 in item.tokens.loss_mask]
    if any(isinstance(module, Reports) for module in model.layers.modules()):
        ids, num_prompt = _first_turn(items)
        gap = routing_gap(model, engine_model, ids, num_prompt=num_prompt)
        own |= gap if items else {}  # the pass itself is collective under FSDP2
    found: dict[str, list[float]] = {}
    for report in world.gather([own]):
        for name, value in report.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def _first_turn(items: Sequence[PackItem]) -> tuple[tuple[int, ...], int]:
    """The prompt and the first sampled tokens of a rollout, and the length of the prompt."""
    if not items:
        return (0, 0), 1
    tokens = min(items, key=lambda item: item.key).tokens
    num_prompt = tokens.loss_mask.index(1)
    end = num_prompt
    while end < min(len(tokens), num_prompt + NUM_REPLAYED) and tokens.loss_mask[end]:
        end += 1
    return tokens.ids[:end], num_prompt
