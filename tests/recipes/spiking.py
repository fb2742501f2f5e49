"""A loss with an outlier on one rank: what guards of a run on several ranks have to agree on."""

from __future__ import annotations

import os

import torch

from components.rl.losses import GRPOLoss
from components.rl.totals import LossOutput


class SpikingLoss(GRPOLoss):
    """GRPO whose advantages are a thousand times too large in one row of one rank.

    Args:
        on_rank: which; the launcher sets the variable ``RANK``.
        at_row: number of the row, from 1, over the whole run.
        settings: of ``GRPOLoss``.
    """

    def __init__(self, *, on_rank: int, at_row: int, **settings) -> None:
        super().__init__(**settings)
        self._here, self._at_row = int(os.environ["RANK"]) == on_rank, at_row
        self._num_rows = 0

    def __call__(self, *args, advantages: torch.Tensor, **kwargs) -> LossOutput:
        self._num_rows += 1
        spike = self._here and self._num_rows == self._at_row
        return super().__call__(*args, advantages=advantages * (1e3 if spike else 1.0), **kwargs)
