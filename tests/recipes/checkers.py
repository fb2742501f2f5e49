"""Reward checkers for tests: importable in the workers."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from components.envs.base import Reward, Trajectory
from components.envs.tool_game import FinalState


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHash:
    """A reward of 0 to 1 that is a function of what was said and of nothing else."""

    levels: int = 4

    def __call__(self, trajectory: Trajectory) -> Reward:
        said = "\n".join(f"{m.role}: {m.content}" for m in trajectory.messages)
        number = hashlib.sha256(said.encode()).digest()[0] % self.levels
        value = number / max(self.levels - 1, 1)
        # official 1: demonstrations are kept
        return Reward(value=value, breakdown={"official": 1.0, "strict": value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same reward for everything: no group has variance."""

    value: float = 0.0

    def __call__(self, trajectory: Trajectory) -> Reward:
        return Reward(value=self.value, breakdown={"official": self.value, "strict": self.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualOnRank:
    """``TextHash``, but what one rank plays has equal rewards.

    Workers inherit the variable ``RANK`` that the launcher sets.
    """

    rank: int
    levels: int = 4

    def __call__(self, trajectory: Trajectory) -> Reward:
        if int(os.environ["RANK"]) == self.rank:
            return Constant(value=0.0)(trajectory)  # as that of a rollout that is cut
        return TextHash(levels=self.levels)(trajectory)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashBesideState:
    """Value of ``TextHash``, breakdown of ``FinalState`` by which demonstrations are kept."""

    def __call__(self, trajectory: Trajectory) -> Reward:
        return Reward(
            value=TextHash()(trajectory).value, breakdown=FinalState()(trajectory).breakdown
        )
