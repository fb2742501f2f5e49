"""The reference policy of the KL term: a frozen snapshot of the trainable weights.

One mechanism serves full fine-tuning, LoRA and FSDP2: the snapshot is taken of the trainable
parameters as they are when GRPO starts (after a warm start, so a warm-started adapter is the
reference, not the bare base model), and swapped in while the reference log-probabilities are
computed. KL at the first step is therefore exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ReferencePolicy:
    """Snapshot of the trainable parameters of a model (of this rank's shards under FSDP2).

    Args:
        model: the policy as it is now.
        offload: keep the snapshot, and the policy's own weights while the snapshot is swapped in,
            in the host's memory.
        reset_every: make the policy the reference again after every so many steps; None: never.
    """

    def __init__(
        self, model: nn.Module, *, offload: bool = False, reset_every: int | None = None
    ) -> None:
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._offload, self._reset_every = offload, reset_every
        self._weights = self._copy()

    def _copy(self) -> dict[str, Tensor]:
        device = "cpu" if self._offload else None
        return {n: p.detach().to(device, copy=True) for n, p in self._params.items()}

    def reset_if_due(self, step: int) -> None:
        """Take the snapshot again if this step ends a period.

        Args:
            step: number of finished steps.
        """
        if self._reset_every is not None and step % self._reset_every == 0:
            self._weights = self._copy()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within this context the model is the reference policy, and keeps no gradient.

        Enter it before the forward whose gradient is wanted: weights must not change between a
        forward and its backward.
        """
        current = self._copy()
        with torch.no_grad():
            try:
                self._write(self._weights)
                yield
            finally:
                self._write(current)

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            param.detach().copy_(weights[name])

    def tensors(self) -> dict[str, Tensor]:
        """The snapshot itself, by name (this rank's shards): to be saved, or read into."""
        return dict(self._weights)


def reference_policy(
    model: nn.Module, *, beta: float, offload: bool, reset_every: int | None
) -> ReferencePolicy | None:
    """The reference of a loss with a KL term of weight ``beta``; None without one."""
    if beta == 0:
        return None
    return ReferencePolicy(model, offload=offload, reset_every=reset_every)


class PastPolicies:
    """Snapshots of the policies that batches still to be trained were sampled with.

    Args:
        model: the policy.
        max_staleness: most steps between the weights that sample a batch and its training: so many
            snapshots beside the newest; with 0 none is taken.
        offload: see ``ReferencePolicy``.
    """

    def __init__(self, model: nn.Module, *, max_staleness: int, offload: bool) -> None:
        self._model, self._max_staleness, self._offload = model, max_staleness, offload
        self._kept: dict[int, ReferencePolicy] = {}

    def keep(self, version: int) -> None:
        """The engine samples with the weights that the model has now.

        Args:
            version: of these weights: number of finished steps.
        """
        if self._max_staleness == 0:
            return
        oldest = version - self._max_staleness
        self._kept = {v: policy for v, policy in self._kept.items() if v >= oldest}
        self._kept[version] = ReferencePolicy(self._model, offload=self._offload)

    def of(self, version: int, *, now: int) -> ReferencePolicy | None:
        """The policy of a version; None if the model is that policy, or none is kept.

        Args:
            version: that sampled a batch.
            now: of the model.
        """
        return None if version == now or self._max_staleness == 0 else self._kept[version]
