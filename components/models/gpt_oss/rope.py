"""YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071): rotary embedding for a longer context.

Pairs of dimensions that turn often within the original context keep their frequency, those that
turn less than once are slowed down by the factor, those between are mixed. gpt-oss leaves the ends
of the ramp unrounded (``truncate: false``), and scales cos and sin, so that the scores grow by the
square of the magnitude.

Suffixes: ``H`` head dim, ``M`` positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from components.attention.rope import RotaryEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """How a context is stretched; the defaults are gpt-oss's, 4,096 to 131,072 tokens."""

    factor: float = 32.0
    beta_fast: float = 32.0
    "Pairs with more turns than this in the original context keep their frequency."
    beta_slow: float = 1.0
    "Pairs with fewer turns than this get their frequency divided by the factor."
    original_positions: int = 4096
    truncate: bool = False
    "Round the ends of the ramp to whole pairs."

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"YaRN's factor must be at least 1, not {self.factor}")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"YaRN's beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow})"
            )

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: ``0.1 ln(factor) + 1``."""
        return 0.1 * math.log(self.factor) + 1.0

    def ramp(self, head_dim: int, *, base: float) -> tuple[float, float]:
        """The pairs (fractions of one, too) where slowing down begins and where it is complete.

        Args:
            head_dim: H.
            base: base of the wavelengths.
        """
        low, high = (
            head_dim
            * math.log(self.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, head_dim - 1)

    def frequencies(self, head_dim: int, *, base: float, device: torch.device) -> Tensor:
        """Radians per position of each pair ``[H / 2]``, fp32 as in the released models.

        Args:
            head_dim: H.
            base: base of the wavelengths.
            device: of the result.
        """
        pairs = torch.arange(0, head_dim, 2, device=device).float()
        plain = 1.0 / (base ** (pairs / head_dim))
        low, high = self.ramp(head_dim, base=base)
        number = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        slowed = ((number - low) / max(high - low, 1e-3)).clamp(0, 1)
        return plain / self.factor * slowed + plain * (1 - slowed)


class YarnRotaryEmbedding(RotaryEmbedding):
    """Our rotary embedding (interleaved pairs) with YaRN's table.

    Args:
        head_dim: H, even.
        max_positions: positions 0 .. max_positions - 1 can be rotated.
        base: base of the geometric progression of wavelengths.
        yarn: how the context is stretched.

    Raises:
        ValueError: an odd head_dim.
    """

    def __init__(self, head_dim: int, *, max_positions: int, base: float, yarn: Yarn) -> None:
        self.yarn = yarn  # the base class fills the table in its constructor
        super().__init__(head_dim, max_positions=max_positions, base=base)

    def _table(self, device: torch.device) -> Tensor:
        """cos and sin of every angle, times the magnitude ``[M, H / 2, 2]``, fp32."""
        theta = self.yarn.frequencies(self.head_dim, base=self.base, device=device)
        position = torch.arange(self.max_positions, dtype=torch.float32, device=device)
        angle = torch.outer(position, theta)
        return torch.stack([angle.cos(), angle.sin()], dim=-1).mul_(self.yarn.magnitude)
