"""The loss of a step written down once more: each rollout alone, all logits, fp64.

Nothing here knows rows, trees, chunks, ranks or the code under test: the model is transformers'
Llama, the formulas are those of the papers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from components.rl.packing import PackItem
from tests.unit.models import tiny

TEMPERATURE = 0.7
DEFAULTS: Mapping[str, Any] = {
    "loss": "grpo",
    "low": 0.8,
    "high": 1.2,
    "beta": 0.0,
    "kl": "k3",
    "over": "token",
    "divisor": None,
    "ratio": "proximal",
    "level": "token",
    "cap": None,
    "mask_below": None,
    "mask_above": None,
    "bonus": 0.0,
}


def llama(state: Mapping[str, Tensor]) -> torch.nn.Module:
    """transformers' model of the tiny directory, fp64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    unlike = ("architectures", "model_type", "torch_dtype")
    settings = {key: value for key, value in tiny.CONFIG.items() if key not in unlike}
    model = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="eager")).double()
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval()


def tables(model: torch.nn.Module, items: Sequence[PackItem]) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and entropies of the trained tokens of each rollout."""
    found = []
    for item in items:
        ids = torch.tensor(item.tokens.ids)
        logits = model(ids[None]).logits[0]
        table = torch.log_softmax(logits[:-1].double() / TEMPERATURE, -1)
        trained = torch.tensor(item.tokens.loss_mask[1:], dtype=torch.bool)
        picked = table.gather(1, ids[1:, None]).squeeze(1)
        entropy = -(table.exp() * table).sum(-1)
        found.append((picked[trained], entropy[trained]))
    return found


def generators(items: Sequence[PackItem]) -> list[Tensor]:
    """What the trained tokens of each rollout were sampled with."""
    found = []
    for item in items:
        columns = zip(item.tokens.generator_logprobs, item.tokens.loss_mask, strict=True)
        found.append(torch.tensor([x for x, mask in columns if mask], dtype=torch.float64))
    return found


def dense_loss(
    new: Sequence[tuple[Tensor, Tensor]],
    before: Sequence[Tensor],
    reference: Sequence[Tensor],
    items: Sequence[PackItem],
    options: Mapping[str, Any],
) -> Tensor | None:
    """The loss of the step, or None when every token is masked."""
    o = {**DEFAULTS, **options}
    terms = []
    for (logp, entropy), old, ref, generator, item in zip(
        new, before, reference, generators(items), items, strict=True
    ):
        apart = old - generator
        if o["level"] == "sequence":
            apart = apart.sum().expand(len(apart))
        keep = torch.tensor(
            [
                (o["mask_below"] or 0.0) <= math.exp(x) <= (o["mask_above"] or math.inf)
                for x in apart.tolist()
            ]
        )
        if not keep.any():
            continue
        weight = torch.ones(len(apart), dtype=torch.float64)
        if o["cap"] is not None:
            weight = apart.exp().clamp(max=o["cap"])
        base = generator if o["ratio"] == "generator" else old
        policy = -_gain(o, logp[keep], base[keep], item.advantage) * weight[keep]
        kl = _kl(o["kl"], logp[keep] - ref[keep])
        terms.append(policy + o["beta"] * kl - o["bonus"] * entropy[keep])
    if not terms:
        return None
    if o["over"] == "sequence":
        return torch.stack([t.mean() for t in terms]).mean()
    total = torch.stack([t.sum() for t in terms]).sum()
    if o["over"] == "constant":
        return total / (o["divisor"] * len(terms))
    return total / sum(len(t) for t in terms)


def _gain(o: Mapping[str, Any], logp: Tensor, old: Tensor, advantage: float) -> Tensor:
    low, high = o["low"], o["high"]
    if o["loss"] == "cispo":
        return (logp - old).exp().clamp(low, high).detach() * advantage * logp
    ratio = (logp - old).exp()
    if o["loss"] == "gspo":
        ratio = (logp - old).mean().exp().expand(len(logp))
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def _kl(estimator: str, d: Tensor) -> Tensor:
    return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]
