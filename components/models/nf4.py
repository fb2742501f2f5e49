"""Frozen base weights in four bits: NF4 (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

torchao's NF4Tensor takes the place of the weight of a linear, so the linear (adapted or not) stays
what it is: ``F.linear`` decodes the whole matrix for one product, and again for the product of the
backward. Blocks of 64 numbers share a scale of 8 bits, blocks of scales a float32: 4.13 bits each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn

BLOCK = 64
"""Numbers that share a scale."""
MAX_SCALE_BLOCK = 256
"""Scales that share a float32."""
Pack = Callable[[str, Tensor], Tensor]


def pack_linears(names: Collection[str]) -> Pack:
    """What ``load_hf`` stores in the place of a loaded weight: NF4 for the named linears.

    Args:
        names: of the linears, e.g. q_proj.

    Returns:
        (name of a parameter, value) -> the value, or as NF4.

    Raises:
        ValueError (the result does): as in :func:`to_nf4`.
    """

    def pack(name: str, value: Tensor) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        if attribute != "weight" or owner.rpartition(".")[2] not in names:
            return value
        return to_nf4(value, name=name)

    return pack


def quantize_base(model: nn.Module, names: Collection[str]) -> None:
    """Freeze the named linears of any model and put their weights into NF4, in place.

    For models that are not loaded by ``load_hf``: torchtune's own, before or after
    ``with_sink_attention``. Adapters on the linears stay as they are, and alone can be trained.

    Args:
        model: loaded; of torchtune's linears and LoRALinears those in NF4 already are left alone.
        names: of the linears, e.g. q_proj.

    Raises:
        ValueError: names that match nothing, or as in :func:`to_nf4`.
    """
    found = set()
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        weight = getattr(module, "weight", None)
        if name not in names or not isinstance(weight, Tensor):
            continue
        found.add(name)
        if not is_nf4(weight):
            packed = to_nf4(weight.detach(), name=f"{path}.weight")
            module.weight = nn.Parameter(packed, requires_grad=False)
    missing = [name for name in names if name not in found]
    if missing or not names:
        raise ValueError(f"quantize_base: no linear is named {', '.join(missing) or '(no names)'}")


def to_nf4(weight: Tensor, *, name: str) -> Tensor:
    """A matrix as NF4.

    Args:
        weight: ``[out, in]``, on a device.
        name: for the error.

    Returns:
        torchao's NF4Tensor; its dtype is the weight's.

    Raises:
        ValueError: if it is no matrix, or no whole number of blocks of 64.
    """
    from torchao.dtypes.nf4tensor import to_nf4 as quantize

    if weight.dim() != 2 or weight.numel() % BLOCK:
        raise ValueError(
            f"quantize_base: {name} {list(weight.shape)} cannot be NF4: a matrix of a multiple of "
            f"{BLOCK} numbers is wanted"
        )
    num_blocks = weight.numel() // BLOCK
    # torchao wants a whole number of blocks of scales, too; 256 does not divide SmolLM2's.
    scale_block = next(n for n in range(MAX_SCALE_BLOCK, 0, -1) if num_blocks % n == 0)
    return quantize(weight, block_size=BLOCK, scaler_block_size=scale_block)


def is_nf4(tensor: Tensor) -> bool:
    """Whether it is stored as NF4."""
    return hasattr(tensor, "quantized_scalers")


def decoded(tensor: Tensor) -> Tensor:
    """The numbers that an NF4 weight stands for, in its dtype; any other tensor as it is."""
    return tensor.get_original_weight() if is_nf4(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def stored_bytes(tensor: Tensor) -> int:
    """Memory of a tensor; of NF4 its parts, as ``nbytes`` says what it would be decoded."""
    if not is_nf4(tensor):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(getattr(tensor, name).nbytes for name in names)
