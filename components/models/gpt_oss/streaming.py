"""Frozen experts in host memory, of which two layers at a time are on the device.

While a layer computes, the next one (the one before it in a backward pass) is copied on a CUDA
stream of its own. A pass costs one copy of every layer; activation checkpointing adds none, as a
layer's forward and backward then follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class _Slot:
    """Device buffers for one layer."""

    layer: int | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None
    "On CUDA: the copy into the buffers is done."


class ExpertStream:
    """Weights of all layers on the host, and two layers' buffers on the device.

    On a CPU "the device" is memory of the same kind: copies are made all the same, so that bytes
    and results can be tested there.

    Args:
        host: of each layer its tensors by name, of the same names and shapes in every layer.

    Raises:
        ValueError: layers that differ, or none.
    """

    def __init__(self, host: Sequence[Mapping[str, Tensor]]) -> None:
        shapes = [{n: (t.shape, t.dtype) for n, t in layer.items()} for layer in host]
        if not shapes or any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"streamed experts: {len(shapes)} layers whose tensors are not all alike"
            )
        self.host = [dict(layer) for layer in host]
        self.num_copies = 0
        """Layers copied so far."""
        self._slots = (_Slot(), _Slot())
        self._current = -1  # the layer that was asked for last
        self._copy_stream: torch.cuda.Stream | None = None
        self._pinned: set[int] = set()

    def layer_bytes(self) -> int:
        """Memory of one layer."""
        return sum(tensor.nbytes for tensor in self.host[0].values())

    def device_bytes(self) -> int:
        """Memory of the buffers: at most two layers, whatever was asked for."""
        return sum(t.nbytes for slot in self._slots for t in slot.tensors.values())

    def get(self, layer: int, device: torch.device) -> Mapping[str, Tensor]:
        """A layer's tensors on the device, and a start on copying its neighbour's.

        The caller has launched all work on the layer that it asked for before: its buffers are
        written to from now on. What is returned holds until another layer is asked for.

        Args:
            layer: from 0.
            device: the same in every call.
        """
        slot = self._slot_of(layer)
        if slot is None:
            slot = self._other_than(self._current)
            self._fill(slot, layer, device)
        if slot.ready is not None:
            torch.cuda.current_stream(device).wait_event(slot.ready)
        if layer != self._current:
            following = layer + 1 if layer > self._current else layer - 1
            self._current = layer
            if 0 <= following < len(self.host) and self._slot_of(following) is None:
                self._fill(self._other_than(layer), following, device)
        return slot.tensors

    def _slot_of(self, layer: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == layer), None)

    def _other_than(self, layer: int) -> _Slot:
        first, second = self._slots
        return second if first.layer == layer else first

    def _fill(self, slot: _Slot, layer: int, device: torch.device) -> None:
        """Copy a layer into a slot; on CUDA this returns before it is done."""
        if not slot.tensors:
            slot.tensors = {
                name: torch.empty_like(tensor, device=device)
                for name, tensor in self.host[layer].items()
            }
        slot.layer = layer
        self.num_copies += 1
        if device.type != "cuda":
            self._copy(slot, layer)
            return
        self._pin(layer)
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)
        # What was launched before this reads the slot's old layer; the layer that is computed next
        # is not launched yet, so the copy runs beside it.
        self._copy_stream.wait_event(torch.cuda.current_stream(device).record_event())
        with torch.cuda.stream(self._copy_stream):
            self._copy(slot, layer)
            slot.ready = torch.cuda.Event()
            slot.ready.record(self._copy_stream)

    def _copy(self, slot: _Slot, layer: int) -> None:
        for name, tensor in self.host[layer].items():
            slot.tensors[name].copy_(tensor, non_blocking=True)

    def _pin(self, layer: int) -> None:
        """Into page-locked memory, once: the device reads nothing else without waiting."""
        if layer not in self._pinned:
            self.host[layer] = {n: t.pin_memory() for n, t in self.host[layer].items()}
            self._pinned.add(layer)
