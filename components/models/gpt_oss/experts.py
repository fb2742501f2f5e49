"""Linear maps of many experts, with or without low-rank adapters.

Suffixes: ``S`` rows sorted by expert, ``E`` experts, ``R`` rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from components.models.gpt_oss.grouped import METHODS, Groups, grouped_product
from components.models.gpt_oss.packed import FROZEN, PackedExpertLinear
from components.models.gpt_oss.swiglu import clamped_swiglu


class ExpertLinear(nn.Module):
    """A linear map with bias per expert, stored as Hugging Face stores gpt-oss's.

    Args:
        num_experts: E.
        in_dim: width of the rows.
        out_dim: width of the result.
        method: of the products: auto, grouped or loop.

    Raises:
        ValueError: an unknown method.
    """

    def __init__(self, num_experts: int, in_dim: int, out_dim: int, *, method: str) -> None:
        super().__init__()
        if method not in METHODS:
            allowed = ", ".join((*METHODS, *FROZEN))
            raise ValueError(f"experts must be one of {allowed}, not {method!r}")
        self.num_experts, self.in_dim, self.out_dim = num_experts, in_dim, out_dim
        self.method = method
        self.weight = nn.Parameter(torch.empty(num_experts, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(num_experts, out_dim))

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Map ``[S, in_dim]``, sorted by expert, to ``[S, out_dim]``."""
        out = grouped_product(rows, self.weight, groups, method=self.method)
        return out.add_(self.bias[groups.expert])


class Stack(nn.Module):
    """One matrix per expert ``[E, in, out]``."""

    def __init__(self, num_experts: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, in_dim, out_dim))


class AdapterExpertLinear(ExpertLinear):
    """An ExpertLinear with an adapter for every expert (Hu et al. 2021, arXiv:2106.09685).

    Has what torchtune asks of an adapter: ``adapter_params``, ``disabled``. As in AdapterLinear the
    adapter may be float32 while the base is bfloat16.

    Args:
        base: the map to adapt; its parameters are taken over.
        rank: R.
        alpha: the adapters' output is scaled by alpha / rank.
    """

    def __init__(self, base: ExpertLinear, *, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.in_dim, self.out_dim = base.num_experts, base.in_dim, base.out_dim
        self.method = base.method
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.alpha = rank, alpha
        self.disabled = False
        with self.weight.device:
            self.lora_a = Stack(base.num_experts, base.in_dim, rank)
            self.lora_b = Stack(base.num_experts, rank, base.out_dim)

    def initialize_parameters(self) -> None:
        """A as torchtune's adapters have it, B zero: the adapter changes nothing yet."""
        bound = self.in_dim**-0.5  # kaiming_uniform with a = sqrt(5)
        nn.init.uniform_(self.lora_a.weight, -bound, bound)
        nn.init.zeros_(self.lora_b.weight)

    def adapter_params(self) -> list[str]:
        """Names of the adapter's parameters."""
        return ["lora_a.weight", "lora_b.weight"]

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Map ``[S, in_dim]``, sorted by expert, to ``[S, out_dim]``."""
        out = super().forward(rows, groups)
        if self.disabled:
            return out
        a, b = (part.weight.to(rows.dtype) for part in (self.lora_a, self.lora_b))
        low = grouped_product(rows, a, groups, method=self.method) * (self.alpha / self.rank)
        return out + grouped_product(low, b, groups, method=self.method)


AnyLinear = ExpertLinear | PackedExpertLinear


class Experts(nn.Module):
    """The experts of a layer.

    Args:
        gate_up_proj: D -> 2 F, gate in the even columns and up in the odd ones.
        down_proj: F -> D.
        limit: of the clamped SwiGLU.
        alpha: of the clamped SwiGLU.
    """

    def __init__(
        self, *, gate_up_proj: AnyLinear, down_proj: AnyLinear, limit: float, alpha: float
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.limit, self.alpha = limit, alpha

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Map ``[S, D]``, sorted by expert, to ``[S, D]``."""
        gate_up = self.gate_up_proj(rows, groups)
        hidden = clamped_swiglu(gate_up, limit=self.limit, alpha=self.alpha)
        return self.down_proj(hidden, groups)


def add_expert_adapters(model: nn.Module, names: Sequence[str], *, rank: int, alpha: float) -> None:
    """Replace maps of experts by adapted ones, in place.

    Args:
        model: holds :class:`ExpertLinear` modules.
        names: gate_up_proj, down_proj; others are passed over.
        rank: of the adapters.
        alpha: the adapters' output is scaled by alpha / rank.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, ExpertLinear):
                setattr(module, name, AdapterExpertLinear(child, rank=rank, alpha=alpha))
