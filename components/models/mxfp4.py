"""MXFP4 weights (OCP Microscaling Formats 1.0): blocks of 32 four-bit numbers with a shared scale.

A checkpoint holds ``<name>_blocks`` uint8 ``[..., out, in / 32, 16]`` and ``<name>_scales`` uint8
``[..., out, in / 32]``; a byte holds two numbers, the low nibble first, and the value is
``LUT[nibble] * 2 ** (scale - 127)``. Every such number with a scale in bfloat16's range is exact in
bfloat16.

Suffixes: ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LUT = (*_POSITIVE, *(-x for x in _POSITIVE))
"""E2M1: sign, two bits of exponent, one of mantissa."""
BLOCKS, SCALES = "_blocks", "_scales"


def decode(blocks: Tensor, scales: Tensor, *, checked: bool = False) -> Tensor:
    """The numbers of some blocks.

    Args:
        blocks: uint8 ``[..., G, 16]``.
        scales: uint8 ``[..., G]``.
        checked: `check_scales` has passed them: the numbers are not looked at again, for which a
            GPU would have to be waited for.

    Returns:
        bfloat16 ``[..., G * 32]``.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a value that bfloat16 cannot hold.
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"MXFP4 blocks and scales are uint8, not {blocks.dtype}, {scales.dtype}")
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ValueError(
            f"MXFP4 blocks {list(blocks.shape)} and scales {list(scales.shape)} do not fit: "
            "[..., 16] and [...] are wanted"
        )
    both = _pairs(blocks.device).index_select(0, blocks.flatten().int())
    values = both.view(torch.bfloat16).view(*scales.shape, 32)
    values.mul_(_powers(scales.device)[scales.int()].unsqueeze(-1))  # exact: a power of two
    values = values.flatten(-2)
    # 6 * 2 ** 125 is the largest number of any block that is surely in range.
    if (
        not checked
        and scales.numel()
        and int(scales.max()) > 125 + 127
        and not values.isfinite().all()
    ):
        raise ValueError("MXFP4: a scale of 255 (not a number), or a value above bfloat16's range")
    return values


def check_scales(scales: Tensor) -> None:
    """Refuse scales with which a block may not be in bfloat16's range.

    Args:
        scales: uint8 ``[..., G]``.

    Raises:
        ValueError: a scale above 252.
    """
    if scales.numel() and int(scales.max()) > 125 + 127:
        raise ValueError(
            f"MXFP4: a scale of {int(scales.max())} is not a number, or one above bfloat16's "
            "range; packed experts take scales up to 252"
        )


@cache
def _pairs(device: torch.device) -> Tensor:
    """Both numbers of a byte in one look-up ``[256]``: two bfloat16, moved as one int32."""
    pairs = torch.tensor([[LUT[byte & 0x0F], LUT[byte >> 4]] for byte in range(256)], device="cpu")
    return pairs.to(torch.bfloat16).view(torch.int32).flatten().to(device)


@cache
def _powers(device: torch.device) -> Tensor:
    """The factor of each scale ``[256]``; 255 is not a number."""
    powers = 2.0 ** (torch.arange(256, dtype=torch.float64, device="cpu") - 127)
    powers[255] = torch.nan
    return powers.to(torch.bfloat16).to(device)


def decode_transposed(blocks: Tensor, scales: Tensor) -> Tensor:
    """Weights of experts in the layout of the bf16 checkpoints, one expert at a time.

    Args:
        blocks: uint8 ``[E, out, in / 32, 16]``.
        scales: uint8 ``[E, out, in / 32]``.

    Returns:
        bfloat16 ``[E, in, out]``, contiguous.

    Raises:
        ValueError: as in :func:`decode`.
    """
    if blocks.dim() != 4:
        raise ValueError(
            f"MXFP4 blocks of experts must be [E, out, in / 32, 16], got {list(blocks.shape)}"
        )
    num_experts, out_dim, num_groups, _ = blocks.shape
    weight = torch.empty(num_experts, num_groups * 32, out_dim, dtype=torch.bfloat16)
    for expert in range(num_experts):
        weight[expert] = decode(blocks[expert], scales[expert]).t()
    return weight


def decode_pairs(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Decode what is packed; a half of a pair stays, and is a foreign tensor to any model.

    Args:
        state: tensors of a checkpoint by name.

    Returns:
        The same, with ``x`` in the place of ``x_blocks`` and ``x_scales``.

    Raises:
        ValueError: as in :func:`decode`, naming the tensor.
    """
    plain = {}
    for name, tensor in state.items():
        stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
        if stem == name or stem + BLOCKS not in state or stem + SCALES not in state:
            plain[name] = tensor
        elif name.endswith(BLOCKS):
            try:
                plain[stem] = decode_transposed(tensor, state[stem + SCALES])
            except ValueError as error:
                raise ValueError(f"{stem}: {error}") from error
    return plain
