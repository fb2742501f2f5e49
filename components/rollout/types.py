"""The types that travel from the rollout workers to the trainer.

Suffixes: ``L`` tokens of one rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

Status = Literal[
    "completed",
    "truncated_max_steps",
    "truncated_errors",
    "truncated_refused",
    "truncated_tokens",
    "error_infra",
    "error_user",
    "error_deadline",
]

FinishReason = Literal["stop", "length"]


class Author(IntEnum):
    """Who wrote a token."""

    TEMPLATE = 0
    SYSTEM = 1
    USER = 2
    TOOL = 3
    ASSISTANT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """An order for one rollout."""

    rollout_id: str
    """Unique within a run, e.g. ``"train/3/retail/42/1"``."""
    task_id: str
    domain: str
    group: int
    """Index of the task in the step's batch."""
    member: int
    """Index of the rollout inside its group."""
    seed: int
    """Seeds the sampling and the environment's reset."""
    env_seed: int
    """Seeds the environment: in training the same for a whole group, whose members have to start
    from the same state; in an evaluation each trial's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """What a rollout asks of the policy engine: the next turn."""

    rollout_id: str
    context: tuple[int, ...]
    """All ids so far; what was sent before for this rollout is a prefix of it."""
    shared_len: int
    """How many leading ids (the system turn) other rollouts share."""
    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    seed: int
    """Seed of this turn's draws; does not depend on other rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """A sampled turn."""

    ids: tuple[int, ...]
    """Sampled ids, the stop id included when there is one."""
    logprobs: tuple[float, ...]
    """Log-probability of each id under the distribution that it was drawn from."""
    finish_reason: FinishReason
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Stands in the place of a turn that an engine could not sample: its rollout is lost."""

    error: str
    """Becomes the error of the rollout, whose status is ``error_infra``."""


class Ledger:
    """The tokens of one rollout, each stored once when it came into being. Append only."""

    __slots__ = ("authors", "generator_logprobs", "ids", "loss_mask", "policy_versions")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.authors: list[int] = []
        self.loss_mask: list[int] = []
        self.generator_logprobs: list[float] = []
        self.policy_versions: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def append_rendered(self, ids: Sequence[int], authors: Sequence[int]) -> None:
        """Append template, system, user or tool text: never trained."""
        if len(ids) != len(authors):
            raise ValueError(f"ids and authors differ in length: {len(ids)} and {len(authors)}")
        self.ids += ids
        self.authors += authors
        self.loss_mask += [0] * len(ids)
        self.generator_logprobs += [0.0] * len(ids)
        self.policy_versions += [-1] * len(ids)

    def append_sampled(
        self, ids: Sequence[int], logprobs: Sequence[float], *, policy_version: int
    ) -> None:
        """Append what the policy sampled, as it was sampled: trained."""
        if len(ids) != len(logprobs):
            raise ValueError(f"ids and logprobs differ in length: {len(ids)} and {len(logprobs)}")
        self.ids += ids
        self.authors += [int(Author.ASSISTANT)] * len(ids)
        self.loss_mask += [1] * len(ids)
        self.generator_logprobs += logprobs
        self.policy_versions += [policy_version] * len(ids)

    def freeze(self) -> Tokens:
        """The finished ledger, checked."""
        tokens = Tokens(
            ids=tuple(self.ids),
            authors=tuple(self.authors),
            loss_mask=tuple(self.loss_mask),
            generator_logprobs=tuple(self.generator_logprobs),
            policy_versions=tuple(self.policy_versions),
        )
        tokens.check()
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The ledger of a finished rollout: parallel columns of length L."""

    ids: tuple[int, ...]
    authors: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 only where the policy sampled the token."""
    generator_logprobs: tuple[float, ...]
    """0.0 where loss_mask is 0."""
    policy_versions: tuple[int, ...]
    """-1 where loss_mask is 0."""

    def __len__(self) -> int:
        return len(self.ids)

    def check(self) -> None:
        """Raise ValueError where the ledger contradicts itself."""
        length = len(self.ids)
        for name in ("authors", "loss_mask", "generator_logprobs", "policy_versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(f"ledger column {name} has {len(getattr(self, name))} of {length}")
        for i, (author, mask, logprob) in enumerate(
            zip(self.authors, self.loss_mask, self.generator_logprobs, strict=True)
        ):
            if (mask == 1) != (author == Author.ASSISTANT):
                raise ValueError(
                    f"ledger token {i}: loss_mask {mask} but author {Author(author).name}"
                )
            if not (math.isfinite(logprob) and logprob <= 0.0):
                raise ValueError(
                    f"ledger token {i}: generator_logprob {logprob} is not finite and <= 0"
                )
        if length and self.loss_mask[0] == 1:
            raise ValueError("ledger token 0 is trained: it has no predecessor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished episode: what the trainer, the recorder and the viewer read."""

    spec: RolloutSpec
    tokens: Tokens
    status: Status
    reward: float | None
    """Training reward; None for error_* statuses, which leave the group."""
    reward_breakdown: Mapping[str, float] = field(default_factory=dict)
    """Every named component, ``official`` and ``strict`` among them."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation as JSON-able mappings, refused turns included."""
    turns: tuple[tuple[int, int], ...] = ()
    """[start, end) of each sampled turn in the ledger."""
    stats: Mapping[str, float] = field(default_factory=dict)
    """Counters: turns, tool_calls, tool_errors, parse_errors, env_steps, env_time_s..."""
    error: str = ""
    """What went wrong, for error_* statuses."""

    @property
    def valid(self) -> bool:
        """Whether the rollout takes part in its group (not an infrastructure failure)."""
        return not self.status.startswith("error_")
