"""Weighted sums of reward checkers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from components.envs.base import Reward, RewardChecker, Trajectory
from components.envs.rewards import PARTS, scored_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One term of a sum."""

    checker: RewardChecker
    weight: float

    def __post_init__(self) -> None:
        if not callable(self.checker):
            raise ValueError(f"checker: {self.checker!r} is not a callable (trajectory) -> Reward")
        if not math.isfinite(self.weight) or self.weight == 0:
            raise ValueError(f"weight: {self.weight} must be a finite number other than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """The sum of several checkers' rewards, each times its weight.

    A config names the parts::

        checker:
          _component_: components.envs.weighted.WeightedSum
          parts:
            solved:
              _component_: components.envs.weighted.Part
              weight: 0.7
              checker: {_component_: components.envs.rewards.StrictReward}
            graded:
              _component_: components.envs.weighted.Part
              weight: 0.3
              checker: {_component_: components.envs.rewards.PartialCredit}

    The breakdown holds each part's value under its name. What every tau2 checker computes alike
    (:data:`components.envs.rewards.PARTS`) is in it once, from the first part that has it; whatever
    else a part's breakdown holds is in it as ``<part>_<name>``.
    """

    parts: Mapping[str, Part]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts: a weighted sum needs at least one part")
        for name, part in self.parts.items():
            if not isinstance(part, Part):
                raise ValueError(f"parts.{name}: {part!r} is not a Part(checker=..., weight=...)")
            if not name.isidentifier() or name in PARTS:
                raise ValueError(
                    f"parts: the name {name!r} must be a word, and none of {', '.join(PARTS)}"
                )

    def check_domain(self, domain: str) -> None:
        """Refuse a domain that one of the parts refuses.

        Raises:
            ValueError: from the part.
        """
        for part in self.parts.values():
            check_domain = getattr(part.checker, "check_domain", None)
            if check_domain is not None:
                check_domain(domain)

    def __call__(self, trajectory: Trajectory) -> Reward:
        value = 0.0
        breakdown: dict[str, float] = {}
        with scored_once():
            for name, part in self.parts.items():
                reward = part.checker(trajectory)
                value += part.weight * reward.value
                breakdown[name] = reward.value
                for key, component in reward.breakdown.items():
                    breakdown.setdefault(key if key in PARTS else f"{name}_{key}", component)
        return Reward(value=value, breakdown=breakdown)
