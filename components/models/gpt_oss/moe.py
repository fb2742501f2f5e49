"""The mixture of experts of a gpt-oss layer, and what it counts of its routing.

Suffixes: ``B`` batch, ``T`` packed tokens, ``D`` width, ``E`` experts, ``k`` experts per token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from components.models.gpt_oss.experts import Experts
from components.models.gpt_oss.grouped import Gather, Scatter, group

NEAR_TIE = 2.0**-7
"""Two router logits this close, relative to the larger, may change places in bfloat16: its spacing
is 2**-7 of a number at most."""


class MixtureOfExperts(nn.Module):
    """Every token goes through k of E experts, weighted by a softmax over those k.

    The router's logits are fp32 whatever the dtype of the model: it decides, and a decision that
    hangs on bfloat16's last bit would differ between sampling and training. There is no auxiliary
    loss: the one named in the released config.json is not used.

    Args:
        router: D -> E, with a bias.
        experts: of this layer.
        num_experts: E.
        experts_per_token: k.
    """

    load: Tensor
    near_ties: Tensor

    def __init__(
        self, *, router: nn.Linear, experts: Experts, num_experts: int, experts_per_token: int
    ) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.record: list[Tensor] | None = None
        """Where each forward puts its choices; None for nowhere. See ``record_routing``."""
        # On the CPU even if the model is built on the meta device: loading fills no buffers.
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device="cpu")
        self.register_buffer("load", counts[:-1].clone(), persistent=False)
        self.register_buffer("near_ties", counts[-1].clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to ``[B, T, D]``."""
        tokens = x.flatten(0, 1)
        weights, chosen, margin = self.route(tokens)
        groups = group(chosen, num_experts=self.num_experts)
        if self.record is not None:
            self.record.append(chosen.sort(dim=-1).values)
        if torch.is_grad_enabled():  # what is trained, not what is sampled or scored
            self.load += groups.counts
            self.near_ties += (margin < NEAR_TIE).sum()
        rows = Scatter.apply(tokens, groups.order, groups.inverse)
        out = self.experts(rows, groups)
        out = Gather.apply(out, weights, groups.order, groups.inverse)
        assert isinstance(out, Tensor)
        return out.view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose each token's experts.

        Args:
            tokens: ``[T, D]``.

        Returns:
            The weights ``[T, k]`` in at least fp32, the experts ``[T, k]`` by falling logit, and
            how far the last chosen logit is above the first rejected one, relative to the larger
            ``[T]`` (infinite where nothing is rejected).
        """
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        weight, bias = (p.to(dtype) for p in (self.router.weight, self.router.bias))
        logits = F.linear(tokens.to(dtype), weight, bias)
        k = self.experts_per_token
        top, chosen = logits.topk(min(k + 1, self.num_experts), dim=-1)
        weights = torch.softmax(top[:, :k], dim=-1)
        with torch.no_grad():
            if k == self.num_experts:
                margin = torch.full_like(top[:, 0], math.inf)
            else:
                last, first = top[:, k - 1], top[:, k]
                margin = (last - first) / torch.maximum(last.abs(), first.abs()).clamp_min(1e-30)
        return weights, chosen[:, :k], margin

    def step_metrics(self) -> dict[str, float]:
        """How evenly the tokens of the training passes since the last call used the experts.

        Returns:
            Empty if there was none, else: moe/load_max_frac, the share of the most used expert
            (1 / E if all are used alike, 1 / k at most); moe/load_entropy, entropy of the shares
            over ln E, 1 if all are used alike; moe/unused_frac, share of the experts that no token
            used; moe/near_tie_frac, share of the tokens whose choice hangs on a difference that
            bfloat16 cannot hold: these may be routed otherwise when sampling.
        """
        load, near_ties = self.load.to("cpu", copy=True), int(self.near_ties)
        self.load.zero_()
        self.near_ties.zero_()
        total = int(load.sum())
        if total == 0:
            return {}
        share = load.double() / total
        entropy = -torch.special.xlogy(share, share).sum()
        return {
            "moe/load_max_frac": float(share.max()),
            "moe/load_entropy": float(entropy) / math.log(max(self.num_experts, 2)),
            "moe/unused_frac": float((load == 0).double().mean()),
            "moe/near_tie_frac": near_ties * self.experts_per_token / total,
        }
