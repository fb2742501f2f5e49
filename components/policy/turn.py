"""A turn that the local engine samples, and what the engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from components.policy.cache import RolloutCache
from components.rollout.types import FinishReason, SampleRequest, SampleResult


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """What the engine has computed since it was made. Never reset; take differences."""

    shared_tokens: int = 0
    """Tokens of shared prefixes, computed once each."""
    prefill_tokens: int = 0
    """Other tokens that were not sampled, and the last sampled token of earlier turns."""
    decode_tokens: int = 0
    """Tokens fed back one by one."""
    decode_steps: int = 0
    forgotten: int = 0
    """Rollouts whose caches made room for others (``max_kv_gib``): computed anew if they return."""
    prefill_time_s: float = 0.0
    """Shared prefixes and the first token of each turn included."""
    decode_time_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A request being served."""

    index: int
    """Place in the call's requests."""
    request: SampleRequest
    cache: RolloutCache
    draws: list[float]
    """One uniform number per token; its length is the limit of the turn."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def max_length(self) -> int:
        """Tokens of the rollout when the turn ends, at most."""
        return len(self.request.context) + len(self.draws)

    def take(self, token: int, logprob: float) -> None:
        """Append a sampled token; the turn may end with it."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.ids) == len(self.draws):
            self.finish_reason = "length"

    def result(self, *, policy_version: int) -> SampleResult:
        """What the rollout gets of a finished turn."""
        assert self.finish_reason is not None
        return SampleResult(
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            policy_version=policy_version,
        )
