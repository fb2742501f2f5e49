"""A loss that draws: a resumed run must go on where every random generator stood."""

from __future__ import annotations

import random

import numpy as np
import torch

from components.rl.losses import GRPOLoss
from components.rl.totals import LossOutput


class DrawingLoss(GRPOLoss):
    """GRPO with advantages that are scaled by 1 to 1.3, drawn from the three global generators."""

    def __call__(self, *args, advantages: torch.Tensor, **kwargs) -> LossOutput:
        drawn = random.random() + np.random.rand() + torch.rand(()).item()
        return super().__call__(*args, advantages=advantages * (1 + 0.1 * drawn), **kwargs)
