"""The engine's two kinds of model passes: new tokens in a packed row, one token per rollout.

Suffixes: ``B`` rollouts, ``M`` ends of contexts, ``V`` vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from components.models.decode_step import DecodeStep, why_not
from components.models.decoder import PolicyModel
from components.policy.decode import DecodePass
from components.policy.prefill import PackedRow, PrefillPass

logger = logging.getLogger(__name__)

Pack = Literal["auto"] | bool


class Forward:
    """Runs a model whose weights change now and then.

    Args:
        model: the weights' owner.
        num_rows: rows of the usual decode step.
        pack_weights: decode from a copy of the weights that is laid out for it (see DecodeStep), as
            large as what it holds: True, False, or ``"auto"``: where it can be. What auto chose is
            logged.

    Raises:
        ValueError: ``pack_weights = True`` where it cannot be, and why.
    """

    def __init__(self, model: PolicyModel, *, num_rows: int, pack_weights: Pack) -> None:
        if pack_weights not in ("auto", True, False):
            raise ValueError(f"pack_weights must be auto, true or false, not {pack_weights!r}")
        problem = why_not(model) if pack_weights else None
        if problem is not None and pack_weights is True:
            raise ValueError(f"pack_weights: true, but {problem}; set pack_weights: false")
        if problem is not None:
            logger.info("decode weights are not packed (auto): %s", problem)
        self._model, self._num_rows = model, num_rows
        self._packs = bool(pack_weights) and problem is None
        self._step: DecodeStep | None = None

    def drop(self) -> None:
        """The weights have changed: forget their copy."""
        self._step = None

    def refresh(self) -> None:
        """Make the copy of the weights if there is none, or if it is of older ones."""
        if not self._packs or (self._step is not None and not self._step.is_stale()):
            return
        first, self._step = self._step is None, None  # not two copies at a time
        self._step = DecodeStep(self._model, num_rows=self._num_rows)
        if first:
            logger.debug("decode weights: a packed copy of %.1f MB", self._step.num_bytes / 1e6)

    def packed_bytes(self) -> int:
        """Memory of the copy of the weights."""
        return 0 if self._step is None else self._step.num_bytes

    def prefill(self, row: PackedRow) -> Tensor:
        """Logits ``[M, V]`` of the row's ends."""
        tokens, input_pos, index = (
            torch.tensor(x, dtype=torch.long, device=self.device)
            for x in (row.ids, row.positions, row.ends)
        )
        return self._model(
            tokens[None], mask=PrefillPass(row.segments), input_pos=input_pos[None], index=index
        )

    def decode(self, decode: DecodePass, last: Sequence[int]) -> Tensor:
        """Feed one token per rollout.

        Args:
            decode: begun.
            last: the newest token of each row, those of padding included.

        Returns:
            Logits ``[B, V]`` for the next.
        """
        tokens, positions = torch.tensor(last, device=self.device), decode.positions
        if self._step is not None:
            return self._step(tokens, attend=decode, input_pos=positions)
        return self._model(tokens[:, None], mask=decode, input_pos=positions[:, None])

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self._model.parameters()).device
