"""Guards of a run: numbers that mean that training has gone wrong, and what is done then.

Each guard has an action. ``stop`` ends the run before the weights change, with the last good
weights saved; ``skip`` leaves this update out and counts it; ``warn`` says it once per step.
All ranks see the same metrics, so all decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal["stop", "skip", "warn"]


class GuardStop(Exception):
    """A guard ends the run; the weights are those before the update that it refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradSpike:
    """A gradient norm above ``factor`` times the median of the last ``window`` updates'."""

    factor: float
    window: int
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyCollapse:
    """A mean entropy of the sampled distributions below ``below`` nats per token."""

    below: float
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchLimit:
    """A KL between engine and trainer (``mismatch/kl``) above ``above`` nats per token."""

    above: float
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatReward:
    """Mean training rewards that lie within ``tolerance`` of each other for ``steps`` steps."""

    steps: int
    action: Literal["stop", "warn"]
    tolerance: float = 0.0


class Guards:
    """Looks at the metrics of each update, before the weights change, and of each step.

    What a guard remembers (norms, rewards, skips in a row) is part of a checkpoint, so a resumed
    run decides as an uninterrupted one.

    Args:
        non_finite: what a loss or gradient that is not finite leads to: ``stop`` or ``skip``.
        grad_spike: None for no such guard; the same for the others.
        entropy_collapse: see the class.
        mismatch: see the class.
        flat_reward: see the class.
        max_skips: updates in a row that may be skipped; one more stops the run.
        say: prints a line.
    """

    def __init__(
        self,
        *,
        non_finite: Literal["stop", "skip"] = "stop",
        grad_spike: GradSpike | None = None,
        entropy_collapse: EntropyCollapse | None = None,
        mismatch: MismatchLimit | None = None,
        flat_reward: FlatReward | None = None,
        max_skips: int = 10,
        say: Callable[[str], None] = print,
    ) -> None:
        self.non_finite: Action = non_finite
        self._grad_spike, self._entropy_collapse = grad_spike, entropy_collapse
        self._mismatch, self._flat_reward = mismatch, flat_reward
        self._max_skips, self._say = max_skips, say
        self._norms: list[float] = []
        self._rewards: list[float] = []
        self._skips_in_a_row = 0

    def allow(self, metrics: Mapping[str, float]) -> bool:
        """Whether the optimizer may take the step that gave these metrics.

        Args:
            metrics: of the update, those of all ranks: ``loss/total``, ``train/grad_norm``,
                ``policy/entropy``, ``mismatch/kl`` and others.

        Raises:
            GuardStop: a guard with the action ``stop`` found something, or too many updates in a
                row were skipped.
        """
        found = self._find(metrics)
        for action, text in found:
            self._say(f"          guard ({action}): {text}")
        if stops := [text for action, text in found if action == "stop"]:
            raise GuardStop("; ".join(stops))
        skip = any(action == "skip" for action, _ in found)
        self._skips_in_a_row = self._skips_in_a_row + 1 if skip else 0
        if self._skips_in_a_row > self._max_skips:
            raise GuardStop(
                f"guards.max_skips = {self._max_skips}: {self._skips_in_a_row} updates in a row "
                f"were to be skipped, the last because {found[-1][1]}"
            )
        if not skip and self._grad_spike is not None:
            self._norms = [*self._norms, metrics["train/grad_norm"]][-self._grad_spike.window :]
        return not skip

    def _find(self, metrics: Mapping[str, float]) -> list[tuple[Action, str]]:
        """What is wrong with an update: the actions and their reasons."""
        found: list[tuple[Action, str]] = []
        wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if wrong:  # the other guards compare numbers
            found.append((self.non_finite, f"not finite: {wrong}"))
            return found
        spike, norm = self._grad_spike, metrics["train/grad_norm"]
        if spike is not None and len(self._norms) == spike.window:
            usual = statistics.median(self._norms)
            if norm > spike.factor * usual:
                text = (
                    f"train/grad_norm = {norm:.3g} is above {spike.factor:g} times {usual:.3g}, "
                    f"the median of {spike.window} updates"
                )
                found.append((spike.action, text))
        low, entropy = self._entropy_collapse, metrics.get("policy/entropy", math.inf)
        if low is not None and entropy < low.below:
            found.append((low.action, f"policy/entropy = {entropy:.3g} is below {low.below:g}"))
        high, kl = self._mismatch, metrics.get("mismatch/kl", 0.0)
        if high is not None and kl > high.above:
            found.append((high.action, f"mismatch/kl = {kl:.3g} is above {high.above:g}"))
        return found

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Look at a finished step.

        Args:
            metrics: with ``reward/mean``, the mean training reward; a step whose rollouts all
                failed has none, and does not count.

        Raises:
            GuardStop: the reward was flat for too long and the action is ``stop``.
        """
        flat = self._flat_reward
        if flat is None or "reward/mean" not in metrics:
            return
        self._rewards = [*self._rewards, metrics["reward/mean"]][-flat.steps :]
        spread = max(self._rewards) - min(self._rewards)
        if len(self._rewards) < flat.steps or spread > flat.tolerance:
            return
        text = f"reward/mean stayed within {spread:.3g} for {flat.steps} steps"
        self._say(f"          guard ({flat.action}): {text}")
        self._rewards = []  # said once per stretch
        if flat.action == "stop":
            raise GuardStop(text)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to decide alike (JSON)."""
        return {
            "norms": self._norms,
            "rewards": self._rewards,
            "skips_in_a_row": self._skips_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._norms, self._rewards = list(state["norms"]), list(state["rewards"])
        self._skips_in_a_row = state["skips_in_a_row"]


def guards_from(settings: Mapping[str, Any], *, say: Callable[[str], None]) -> Guards:
    """The guards that the section ``guards`` of a config describes.

    Args:
        settings: the section.
        say: prints a line.
    """
    kinds = {
        "grad_spike": GradSpike,
        "entropy_collapse": EntropyCollapse,
        "mismatch": MismatchLimit,
        "flat_reward": FlatReward,
    }
    made = {
        name: None if settings[name] is None else kind(**settings[name])
        for name, kind in kinds.items()
    }
    return Guards(
        non_finite=settings["non_finite"], max_skips=settings["max_skips"], say=say, **made
    )
