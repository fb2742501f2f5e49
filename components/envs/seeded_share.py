"""A reward for models that know nothing: it has variance where every real reward is 0."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from components.envs.base import Reward, Trajectory
from components.envs.rewards import score


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededShare:
    """The share of the characters in the agent's text that lie in a random set.

    It says nothing about the task. A random model scores 0 on every real reward, so all groups lack
    variance and nothing is trained; this number differs between any two rollouts that say different
    things, depends on sampled tokens alone, and can be learned. It exists to send a random model
    through the whole of training. The official reward stands beside it, as with any checker.

    White space is not counted, nor is what the agent did not say itself: text before the user's
    first message, and tool calls. Without any text the share is 0.
    """

    seed: int = 0
    """Picks the set."""
    size: float = 0.5
    """Share of all characters that are in the set, above 0 and below 1."""

    def __post_init__(self) -> None:
        if not 0 < self.size < 1:
            raise ValueError(f"size={self.size}: must be above 0 and below 1")

    def __call__(self, trajectory: Trajectory) -> Reward:
        parts = score(trajectory)
        share = self.share(self._said(trajectory))
        return Reward(value=share, breakdown={**parts, "seeded_share": share})

    def share(self, text: str) -> float:
        """The share of a text's characters that lie in the set."""
        characters = "".join(text.split())
        if not characters:
            return 0.0
        return sum(map(self._contains, characters)) / len(characters)

    def _contains(self, character: str) -> bool:
        # A hash, not random.Random: the same in every process, whatever was asked before.
        digest = hashlib.sha256(f"{self.seed}/{character}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < self.size * 2**32

    @staticmethod
    def _said(trajectory: Trajectory) -> str:
        roles = [message.role for message in trajectory.messages]
        first = roles.index("user") if "user" in roles else 0
        return "".join(m.content for m in trajectory.messages[first:] if m.role == "assistant")
