"""Tensors of all ranks in safetensors files, through torch.distributed.checkpoint.

Every rank writes what it holds and reads what it will hold: nothing is gathered, and another number
of ranks may read. DCP's usual files begin with a pickle, which a directory from a stranger must not
have; its Hugging Face storage puts the same shards, and where each belongs, into safetensors alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = "dist.ProcessGroup | None"
"""All ranks, on a backend for CPUs; None for a process on its own."""
Shapes: TypeAlias = dict[str, tuple[torch.Size, torch.dtype]]
"""Whole shape and dtype by name."""

_BYTES_PER_FILE = 2**31
"""DCP makes a file in memory before it writes it."""


def write_shards(tensors: Mapping[str, Tensor], folder: Path, *, group: Group) -> None:
    """Write and flush this rank's parts. Collective.

    Args:
        tensors: the same names on all ranks; DTensors, or tensors that are equal on all of them.
        folder: exists, and is the same for all ranks.
        group: all ranks.

    Raises:
        Exception: of the first rank that failed, on every rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files(tensors), save_distributed=True
    )
    _expect_to_be_alone()
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _first(error) from error


def read_shards(targets: Mapping[str, Tensor], folder: Path, *, group: Group) -> None:
    """Fill tensors in place with what was saved under their names. Collective.

    Args:
        targets: as in :func:`write_shards`, of any layout.
        folder: where it was written.
        group: all ranks.

    Raises:
        Exception: of the first rank that failed, on every rank.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    _expect_to_be_alone()
    try:
        load(dict(targets), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _first(error) from error


def saved_shapes(folder: Path) -> Shapes:
    """What :func:`write_shards` wrote into a folder."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    saved = {}
    for name, entry in entries.items():
        assert isinstance(entry, TensorStorageMetadata)  # the storage knows nothing else
        saved[name] = (entry.size, entry.properties.dtype)
    return saved


def load_shards(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, whole, on the CPU; by one process alone."""
    tensors = {n: torch.empty(shape, dtype=d) for n, (shape, d) in saved_shapes(folder).items()}
    read_shards(tensors, folder, group=None)
    return tensors


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of the file of each tensor, the same on all ranks."""
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if size and size + num_bytes > _BYTES_PER_FILE:
            number, size = number + 1, 0
        numbers[name] = number
        size += num_bytes
    return numbers


def _expect_to_be_alone() -> None:
    """DCP warns that it works without a process group, which is what was asked for."""
    message = r"torch\.distributed is disabled, unavailable or uninitialized"
    warnings.filterwarnings("ignore", message=message)


def _first(error: BaseException) -> BaseException:
    """What went wrong on the first rank that failed."""
    failures = getattr(error, "failures")  # noqa: B009 (DCP's class, imported where it is used)
    return failures[min(failures)][0]
