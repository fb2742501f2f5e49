"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on torchtune's LoRALinear."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.modules.peft import LoRALinear

ADAPTABLE = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3")
# What Hugging Face and PEFT call the modules that torchtune names otherwise.
FOREIGN_NAMES = {"o_proj": "output_proj", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class AdapterLinear(LoRALinear):
    """torchtune's LoRALinear whose adapter may be float32 while the base is bfloat16.

    bfloat16 has 8 bits of precision: an update of 1e-5 on a weight of 0.01 would round to nothing.
    So the adapter's master weights are float32 and are cast to the input's dtype for each product.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W' + (alpha / rank) x A' B'``, or the first term while disabled.

        Args:
            x: [..., in_dim].

        Returns:
            [..., out_dim] in x's dtype.
        """
        assert isinstance(self.weight, Tensor)
        out = F.linear(x, self.weight)
        if self.disabled:
            return out
        low = F.linear(self.dropout(x), self.lora_a.weight.to(x.dtype))
        # scale the small factor, not the large product
        return out + F.linear(low * (self.alpha / self.rank), self.lora_b.weight.to(x.dtype))


def check_lora_modules(lora_modules: Sequence[str], *, names: Collection[str] = ADAPTABLE) -> None:
    """Refuse names that match no module.

    Args:
        lora_modules: names to adapt.
        names: names that exist.

    Raises:
        ValueError: listing each foreign name with a suggestion, and the names that exist.
    """
    allowed = f"allowed: {', '.join(names)}"
    if isinstance(lora_modules, str) or not lora_modules:
        raise ValueError(f"lora_modules must be a list of names, not {lora_modules!r}; {allowed}")
    complaints = []
    for name in lora_modules:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=1)
        guess = FOREIGN_NAMES.get(name) or (close[0] if close else None)
        hint = f" (did you mean {guess!r}?)" if guess in names else ""
        complaints.append(f"{name!r}{hint}")
    if complaints:
        raise ValueError(f"lora_modules: no module is named {', '.join(complaints)}; {allowed}")


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The model's adapted linears by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


@torch.no_grad()
def merged_weight(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Fold an adapter into its base weight, in float32.

    Args:
        weight: [out, in], the base; not changed.
        a: [rank, in].
        b: [out, rank].
        scale: alpha / rank.

    Returns:
        [out, in] float32.
    """
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
