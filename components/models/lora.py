"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on torchtune's LoRALinear."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params

log = logging.getLogger(__name__)

ADAPTABLE = ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3")
# What Hugging Face and PEFT call the modules that torchtune names otherwise.
FOREIGN_NAMES = {"o_proj": "output_proj", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class AdapterLinear(LoRALinear):
    """torchtune's LoRALinear whose adapter may be float32 while the base is bfloat16.

    bfloat16 has 8 bits of precision: an update of 1e-5 on a weight of 0.01 would round to nothing.
    So the adapter's master weights are float32 and are cast to the input's dtype for each product.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W' + b + (alpha / rank) x A' B'``, without the last term while disabled.

        Args:
            x: [..., in_dim].

        Returns:
            [..., out_dim] in x's dtype.
        """
        assert isinstance(self.weight, Tensor)
        assert self.bias is None or isinstance(self.bias, Tensor)
        out = F.linear(x, self.weight, self.bias)
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


def check_lora(
    lora_modules: Sequence[str],
    *,
    lora_rank: int,
    lora_alpha: float,
    names: Collection[str] = ADAPTABLE,
) -> None:
    """Refuse settings of adapters that would train nothing.

    Args:
        lora_modules: names to adapt.
        lora_rank: at least 1.
        lora_alpha: above 0.
        names: names that exist.

    Raises:
        ValueError: naming the setting.
    """
    check_lora_modules(lora_modules, names=names)
    if lora_rank < 1:
        raise ValueError(f"lora_rank must be at least 1, not {lora_rank}")
    if lora_alpha <= 0:
        raise ValueError(
            f"lora_alpha must be above 0, not {lora_alpha}: the adapters would do nothing"
        )


def add_adapters(model: nn.Module, lora_modules: Sequence[str], *, rank: int, alpha: float) -> None:
    """Replace linears by adapted ones, in place; their weights are still to be loaded.

    Args:
        model: with its parameters on the meta device.
        lora_modules: names of the linears.
        rank: of the adapters.
        alpha: the adapters' output is scaled by alpha / rank.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in lora_modules and isinstance(child, nn.Linear):
                adapted = AdapterLinear(
                    child.in_features,
                    child.out_features,
                    rank=rank,
                    alpha=alpha,
                    use_bias=child.bias is not None,
                )
                setattr(module, name, adapted.to(child.weight.dtype))


def start_adapters(model: nn.Module, *, lora_dtype: torch.dtype, train_sinks: bool = True) -> None:
    """Initialise the adapters of a loaded model and freeze all but them and learned sinks.

    Args:
        model: its adapters may be on the meta device; they are put on the CPU.
        lora_dtype: of the adapters' weights.
        train_sinks: False freezes the sinks, too.
    """
    adapted = adapters(model)
    for module in adapted.values():
        for part in (module.lora_a, module.lora_b):
            part.to_empty(device="cpu").to(lora_dtype)
        module.initialize_parameters()
    trained = get_adapter_params(model)
    sinks = {name: p for name, p in model.named_parameters() if name.endswith(".attn.sinks")}
    sinks = sinks if train_sinks else {}
    set_trainable_params(model, trained | sinks)
    log.info(
        "LoRA: %d adapters of rank %d on %s, %.2f M trained parameters",
        len(adapted),
        next(iter(adapted.values())).rank,
        ", ".join(sorted({name.rpartition(".")[2] for name in adapted})),
        sum(p.numel() for p in (trained | sinks).values()) / 1e6,
    )


def adapters(model: nn.Module) -> dict[str, Any]:
    """The model's adapted linears (and maps of experts) by name.

    Each has ``weight``, ``lora_a``, ``lora_b``, ``rank``, ``alpha``, ``disabled`` and
    ``initialize_parameters()``, as torchtune's LoRALinear. Known by their ``adapter_params``, which
    is how torchtune's own functions find them.
    """
    return {name: m for name, m in model.named_modules() if hasattr(m, "adapter_params")}


@torch.no_grad()
def merged_weight(weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> Tensor:
    """Fold an adapter into its base weight, in float32.

    Args:
        weight: [out, in], the base; not changed. Of experts [E, in, out].
        a: [rank, in]; of experts [E, in, rank].
        b: [out, rank]; of experts [E, rank, out].
        scale: alpha / rank.

    Returns:
        float32, in the shape of `weight`.
    """
    if weight.dim() == 3:
        return torch.baddbmm(weight.float(), a.float(), b.float(), alpha=scale)
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)
