"""Frozen experts that stay in MXFP4: decoded one expert at a time, in the forward and the backward.

Suffixes: ``S`` rows sorted by expert, ``E`` experts, ``G`` blocks of 32 along the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from components.models.gpt_oss.grouped import Groups, used_experts
from components.models.gpt_oss.streaming import ExpertStream
from components.models.mxfp4 import decode

FROZEN = ("packed", "streamed")
"""Values of ``experts`` beside the methods of products: where frozen experts are kept."""
Packed = Callable[[torch.device], tuple[Tensor, Tensor]]


class PackedExpertLinear(nn.Module):
    """A linear map with bias per expert whose weight is a checkpoint's MXFP4, bit for bit.

    Neither the packed weight nor a decoded one is saved for the backward. One decoded expert exists
    at a time: 2 * in_dim * out_dim bytes, and as much again in fp32 models.

    Args:
        num_experts: E.
        in_dim: width of the rows, a multiple of 32.
        out_dim: width of the result.

    Raises:
        ValueError: an in_dim that is not whole blocks.
    """

    def __init__(self, num_experts: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        if in_dim % 32:
            raise ValueError(f"packed experts: MXFP4 has blocks of 32, {in_dim} inputs are not")
        shape = (num_experts, out_dim, in_dim // 32)
        self.blocks = nn.Parameter(torch.empty(*shape, 16, dtype=torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(num_experts, out_dim))
        self._stream: tuple[ExpertStream, int, str] | None = None

    def stream_from(self, stream: ExpertStream, layer: int, name: str) -> None:
        """Take the weight from a stream and keep none.

        Args:
            stream: holds ``<name>.blocks`` and ``<name>.scales`` of every layer.
            layer: which layer this is.
            name: of this map among those of the layer.
        """
        self._stream = stream, layer, name
        del self.blocks, self.scales

    def host_state(self) -> dict[str, Tensor]:
        """What a checkpoint needs beside ``state_dict``: streamed weights, in host memory."""
        if self._stream is None:
            return {}
        stream, layer, name = self._stream
        return {part: stream.host[layer][f"{name}.{part}"] for part in ("blocks", "scales")}

    def packed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Blocks ``[E, out, G, 16]`` and scales ``[E, out, G]``, valid until another layer asks."""
        if self._stream is None:
            return self.blocks, self.scales
        stream, layer, name = self._stream
        tensors = stream.get(layer, device)
        return tensors[f"{name}.blocks"], tensors[f"{name}.scales"]

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Map ``[S, in_dim]``, sorted by expert, to ``[S, out_dim]``."""
        out = _Product.apply(rows, groups.ends, self.packed)
        assert isinstance(out, Tensor)
        return out + self.bias[groups.expert]


class _Product(torch.autograd.Function):
    """Rows ``[S, in]`` times the weights of their experts.

    The weights are asked for again in the backward instead of being saved: of streamed ones the
    buffers hold another layer by then.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, packed: Packed) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.packed = packed
        blocks, scales = packed(rows.device)
        out = rows.new_empty(len(rows), blocks.shape[1])
        for expert, part in used_experts(ends):
            weight = decode(blocks[expert], scales[expert], checked=True).to(rows.dtype)
            torch.mm(rows[part], weight.t(), out=out[part])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        grad = grads[0]
        blocks, scales = ctx.packed(grad.device)
        grad_rows = grad.new_empty(len(grad), blocks.shape[2] * 32)
        for expert, part in used_experts(ends):
            weight = decode(blocks[expert], scales[expert], checked=True).to(grad.dtype)
            torch.mm(grad[part], weight, out=grad_rows[part])
        return grad_rows, None, None


def stream_experts(model: nn.Module) -> ExpertStream:
    """Move the packed experts of all layers of a loaded model to a stream, in place.

    Args:
        model: its weights are on the CPU (those of a checkpoint stay in the file's memory map).

    Returns:
        The stream that all layers share.
    """
    layers: list[dict[str, PackedExpertLinear]] = []
    for module in model.modules():
        found = {
            name: child
            for name, child in module.named_children()
            if isinstance(child, PackedExpertLinear)
        }
        if found:
            layers.append(found)
    stream = ExpertStream(
        [
            {
                f"{name}.{part}": getattr(child, part).detach()
                for name, child in maps.items()
                for part in ("blocks", "scales")
            }
            for maps in layers
        ]
    )
    for layer, maps in enumerate(layers):
        for name, child in maps.items():
            child.stream_from(stream, layer, name)
    return stream
