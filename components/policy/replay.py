"""One rollout through the sampling engine's own kernels once more, with its tokens given.

The trainer's log-probabilities of a rollout differ from the generator's by rounding, and in a
mixture of experts by routing. To see the second apart from the first, the generator's choices are
needed for the very tokens that were sampled: here they are made again.

Suffixes: ``L`` tokens of the rollout, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from components.attention.plan import MaskPlan
from components.models.decoder import PolicyModel
from components.models.gpt_oss.routing import record_routing, routing_mismatch
from components.policy.cache import RolloutCache, RowPool
from components.policy.decode import DecodePass
from components.policy.eager import eager_layers
from components.policy.forward import Forward
from components.policy.prefill import pack_rows
from components.policy.spans import spans_of


@torch.no_grad()
def replay(model: PolicyModel, ids: Sequence[int], *, num_prompt: int) -> Tensor:
    """Feed a rollout as ``LocalEngine`` would: the prompt at once, then one token at a time.

    Args:
        model: the engine's.
        ids: the rollout's L ids.
        num_prompt: how many of them are the prompt; the rest was sampled.

    Returns:
        Logits ``[L - num_prompt, V]`` fp32, those that each sampled token was drawn from.

    Raises:
        ValueError: if there is no prompt or nothing after it.
    """
    if not 0 < num_prompt < len(ids):
        raise ValueError(
            f"num_prompt = {num_prompt}: must be from 1 to {len(ids) - 1} for {len(ids)} ids"
        )
    with eager_layers(model):
        return _replay(model, ids, num_prompt)


def _replay(model: PolicyModel, ids: Sequence[int], num_prompt: int) -> Tensor:
    config, device = model.config, next(model.parameters()).device
    forward = Forward(model, num_rows=1, pack_weights="auto")  # as in the engine
    forward.refresh()
    pool = RowPool(spans=spans_of(model), num_kv_heads=config.num_kv_heads)
    cache = RolloutCache(pool=pool, row=pool.acquire(base=0), shared=None, shared_len=0)
    logits = []
    for row in pack_rows([(cache, list(ids[:num_prompt]))], max_length=num_prompt):
        logits.append(forward.prefill(row))
    decode = DecodePass(pool, [cache], device=device)
    for token in ids[num_prompt:-1]:
        decode.begin()
        logits.append(forward.decode(decode, [token]))
        decode.end()
        cache.ids.append(token)
    return torch.cat(logits)


@torch.no_grad()
def routing_gap(
    trainer: PolicyModel, generator: PolicyModel, ids: Sequence[int], *, num_prompt: int
) -> dict[str, float]:
    """Tokens of a rollout whose experts differ between sampling and training.

    Args:
        trainer: the model that is trained; run over the whole rollout at once.
        generator: the model that samples, which may be the same.
        ids: the rollout's ids.
        num_prompt: how many of them are the prompt.

    Returns:
        As ``routing_mismatch``: mismatch/route_frac and mismatch/route_token_frac.

    Raises:
        ValueError: as in :func:`replay`, or for a model without experts.
    """
    with record_routing(generator) as sampled:
        replay(generator, ids, num_prompt=num_prompt)
    device = next(trainer.parameters()).device
    tokens = torch.tensor(ids[:-1], device=device)  # the last one is never fed
    positions = torch.arange(len(tokens), device=device)
    last = positions[-1:]  # of the head only one row is computed
    with record_routing(trainer) as trained:
        plan = MaskPlan.causal(len(tokens))
        trainer(tokens[None], mask=plan, input_pos=positions[None], index=last)
    return routing_mismatch(sampled, trained)
