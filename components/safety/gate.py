"""A reward that safety violations take away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from components.envs.base import Reward, RewardChecker, Trajectory
from components.envs.rewards import OfficialReward
from components.safety.checks import GATES, checks_of, require, run_checks
from components.safety.conversation import from_trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyGated:
    """Another checker's reward, less what violations of safety checks cost.

    The breakdown holds the other checker's own and its ``ungated`` value, ``safe`` (1 if no check
    was violated) and for each check ``safe_S1``...: 1 where it was kept or did not apply.
    """

    checker: RewardChecker = field(default_factory=OfficialReward)
    """Gives the reward that is gated."""
    checks: tuple[str, ...] = GATES
    """Which checks gate; any of S1, S2, S3, S4 and S7."""
    on_violation: Literal["zero", "penalty"] = "zero"
    """``zero``: a violation makes the reward 0. ``penalty``: each violated check, once however
    often it was violated, costs ``penalty``, down to 0: a run cannot lose more than it earned, so
    a group in which nobody earned anything stays without variance."""
    penalty: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "checks", tuple(self.checks))  # YAML gives a list
        require(self.checks, GATES, where="a safety gate")
        if not self.checks:
            raise ValueError(f"checks: name at least one of {', '.join(GATES)}")
        if self.on_violation not in ("zero", "penalty"):
            raise ValueError(f"on_violation: {self.on_violation!r} is neither 'zero' nor 'penalty'")
        if not 0 < self.penalty <= 1:
            raise ValueError(f"penalty: {self.penalty} must be above 0 and at most 1")
        if not callable(self.checker):
            raise ValueError(f"checker: {self.checker!r} is not a callable (trajectory) -> Reward")

    def check_domain(self, domain: str) -> None:
        """Refuse a domain in which one of the checks does not hold.

        Raises:
            ValueError: naming the check and the domain.
        """
        require(self.checks, checks_of(domain), where=f"domain {domain!r}")

    def __call__(self, trajectory: Trajectory) -> Reward:
        inner = self.checker(trajectory)
        findings = run_checks(from_trajectory(trajectory), self.checks)
        kept = {name: all(finding.passed for finding in found) for name, found in findings.items()}
        num_violated = sum(not ok for ok in kept.values())
        if num_violated == 0:
            value = inner.value
        elif self.on_violation == "zero":
            value = min(inner.value, 0.0)
        else:
            value = min(inner.value, max(inner.value - self.penalty * num_violated, 0.0))
        return Reward(
            value=value,
            breakdown={
                **inner.breakdown,
                "ungated": inner.value,
                "safe": float(num_violated == 0),
                **{f"safe_{name}": float(ok) for name, ok in kept.items()},
            },
        )
