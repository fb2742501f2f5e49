"""The policy: a causal decoder that owns its forward.

torchtune's TransformerDecoder makes float32 logits for every token and limits the *row* to the
context length. In a packed row it is the positions that must fit, and only the trained tokens need
logits, so the walk over torchtune's layers is written here.

Suffixes: B batch, T packed tokens, M picked rows, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from components.attention.plan import MaskPlan
from components.attention.sink_attention import prepare

Head = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder with grouped-query attention.

    Example: SmolLM2-135M has 30 layers, 9 query and 3 key heads of 64, width 576, FFN 1536.
    """

    num_layers: int
    num_heads: int
    "Query heads."
    num_kv_heads: int
    "Key heads; divides num_heads."
    head_dim: int
    embed_dim: int
    "Width D of the residual stream."
    ffn_dim: int
    vocab_size: int
    max_positions: int
    "The model's context: every token's position in its own rollout is below it."
    rope_base: float
    norm_eps: float
    tie_word_embeddings: bool
    model_type: str = "llama"
    "As config.json calls it: how the weights are named and laid out on disk."

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )


def check_offload(device: torch.device) -> None:
    """Refuse to offload activations from where they would be offloaded to.

    Raises:
        ValueError: a device that is not CUDA.
    """
    if device.type != "cuda":
        raise ValueError(
            f"offload_activations: they are moved from a CUDA device to host memory, and this is "
            f"{device.type}; set it to false, or use checkpoint_activations"
        )


@runtime_checkable
class Reports(Protocol):
    """A module that counts what it does, e.g. the load of its experts."""

    def step_metrics(self) -> dict[str, float]:
        """Metrics since the last call, by name; empty if there was nothing to count."""
        ...


class PolicyModel(nn.Module):
    """Embeddings, layers, norm and head, with the forward that training and sampling share.

    It is the FSDP root: the head's weight is used inside its forward, so tied embeddings are
    gathered when the head needs them. Shard ``layers[i]`` one by one, then the whole.

    Args:
        config: sizes.
        tok_embeddings: [V, D].
        layers: modules called as ``layer(x, mask=..., input_pos=...)``, such as torchtune's
            TransformerSelfAttentionLayer.
        norm: the last norm.
        output: the head, or None to use the embeddings' weight.
        checkpoint_activations: keep each layer's input only and compute the layer again in the
            backward pass.
        offload_activations: move what is kept of the layers to host memory meanwhile, on a stream
            of its own (torchtune's OffloadActivations); CUDA only.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tok_embeddings: nn.Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        output: nn.Linear | None = None,
        checkpoint_activations: bool = False,
        offload_activations: bool = False,
    ) -> None:
        super().__init__()
        assert len(layers) == config.num_layers
        assert (output is None) == config.tie_word_embeddings
        self.config = config
        self.tok_embeddings = tok_embeddings
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.output = output
        self.checkpoint_activations = checkpoint_activations
        self.offload_activations = offload_activations

    @property
    def head_weight(self) -> Tensor:
        """The head's weight [V, D]; under FSDP whole only inside forward."""
        return (self.tok_embeddings if self.output is None else self.output).weight

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Any,
        input_pos: Tensor,
        index: Tensor | None = None,
        head: Head | None = None,
    ) -> Any:
        """Run the decoder and apply the head to the rows that need it.

        Args:
            tokens: [B, T] long, token ids.
            mask: what the attention modules take: a MaskPlan, or an Attend (a KV cache).
            input_pos: [B, T] long, each token's position in its own rollout.
            index: [M] long, rows of the flattened [B * T] that get a head; None means all.
            head: called as ``head(hidden [M, D], weight [V, D])``, for log-probabilities that
                never hold all logits. Without it logits are returned.

        Returns:
            What `head` returns, or logits [M, V] in float32.

        Raises:
            ValueError: if the shapes disagree, or a position is outside the model's context.
        """
        if tokens.shape != input_pos.shape:
            raise ValueError(
                f"input_pos has shape {list(input_pos.shape)}, tokens {list(tokens.shape)}: "
                "every token needs its position"
            )
        if not torch.compiler.is_compiling():
            self._check_positions(input_pos)
            if isinstance(mask, MaskPlan):
                prepare(self, mask, device=tokens.device)  # the layers may be compiled
        hidden = self.tok_embeddings(tokens)
        recompute = self.checkpoint_activations and torch.is_grad_enabled()
        with self._offloading(hidden.device):
            for layer in self.layers:
                if recompute:
                    hidden = checkpoint(
                        layer, hidden, mask=mask, input_pos=input_pos, use_reentrant=False
                    )
                else:
                    hidden = layer(hidden, mask=mask, input_pos=input_pos)
        assert isinstance(hidden, Tensor)
        hidden = hidden.flatten(0, 1)
        if index is not None:
            hidden = hidden[index]
        hidden = self.norm(hidden)  # after picking: the norm works on rows
        if head is not None:
            return head(hidden, self.head_weight)
        return F.linear(hidden, self.head_weight).float()

    def _offloading(self, device: torch.device) -> AbstractContextManager[Any]:
        """Where saved activations go; the head's, which are used at once, stay."""
        if not self.offload_activations or not torch.is_grad_enabled():
            return nullcontext()
        check_offload(device)
        from torchtune.training import OffloadActivations

        # A new one for each forward: it counts on one backward per forward.
        return OffloadActivations()

    def step_metrics(self) -> dict[str, float]:
        """What the layers counted since the last call, to be logged once per step.

        Returns:
            Metric name -> mean over the modules that report it; empty for a dense model.
        """
        found: dict[str, list[float]] = {}
        for module in self.layers.modules():
            if isinstance(module, Reports):
                for name, value in module.step_metrics().items():
                    found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def _check_positions(self, input_pos: Tensor) -> None:
        if input_pos.device.type == "meta" or input_pos.numel() == 0:
            return
        low, high = (int(x) for x in torch.aminmax(input_pos))
        if low < 0 or high >= self.config.max_positions:
            raise ValueError(
                f"token positions run from {low} to {high}, but the model's context is "
                f"{self.config.max_positions} tokens, so they must lie in 0 to "
                f"{self.config.max_positions - 1}; shorten the rollouts"
            )
