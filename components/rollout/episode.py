"""The state of one episode: its ledger, and what is recorded beside it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from components.chat.base import Rendered, Renderer
from components.envs.base import Env, Message, Reward, UserError
from components.rollout.types import Ledger, Rollout, RolloutSpec, SampleResult, Status

_STATUS_OF_REASON: Mapping[str, Status] = {
    "user_stop": "completed",
    "agent_stop": "completed",
    "max_steps": "truncated_max_steps",
    "too_many_errors": "truncated_errors",
    "user_error": "error_user",
    "infrastructure_error": "error_infra",
}


STATS = (
    "turns",
    "tool_calls",
    "tool_errors",
    "parse_errors",
    "cut_turns",
    "refused",
    "env_steps",
    "env_time_s",
    "prompt_tokens",
    "sampled_tokens",
)
"""Counters of every rollout. ``refused`` counts cut turns and parse errors too."""


class LimitsError(ValueError):
    """The limits leave no room for a single turn: a mistake in the configuration."""


class TaskRefused(ValueError):
    """The environment does not have a task: a mistake in the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an episode may use."""

    max_turns: int
    """Sampled turns, refused ones included."""
    max_turn_tokens: int
    """Tokens of one sampled turn."""
    max_tokens: int
    """Tokens of the whole rollout, prompt included: the context the policy was given."""
    max_refused: int
    """Refused turns that are allowed; one more ends the episode."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_turn_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise LimitsError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_refused < 0:
            raise LimitsError(f"max_refused={self.max_refused}: must be 0 or more")


class EnvError(Exception):
    """The environment raised; carries the traceback as text."""


class Episode:
    """The state of one episode: the ledger and all that is recorded beside it."""

    def __init__(self, env: Env, renderer: Renderer, spec: RolloutSpec, limits: Limits) -> None:
        self.env = env
        self.renderer = renderer
        self.spec = spec
        self.limits = limits
        self.ledger = Ledger()
        self.turns: list[tuple[int, int]] = []
        self.messages: list[dict[str, Any]] = []
        self.shared_len = 0
        self.info: Mapping[str, Any] = {}
        self._tool_names: dict[str, str] = {}
        self.stats: dict[str, float] = dict.fromkeys(STATS, 0)

    def start(self) -> Status | None:
        """Reset the environment and render the prompt; the status if it is over already."""
        options = {"task_id": self.spec.task_id, "domain": self.spec.domain}
        _, info = self._timed(self.env.reset, seed=self.spec.env_seed, options=options)
        system = self.renderer.render_system(info["system_prompt"], info["tools"])
        self.shared_len = len(system.ids)
        self._append(system)
        self._record(info["messages"])
        messages = self._with_tool_names(info["messages"])
        self._append(self.renderer.render_observation(messages, after_turn=False))
        self.stats["prompt_tokens"] = len(self.ledger)
        if "trajectory" in info:
            return self._end(info, terminated=True)
        needed = len(self.ledger) + self.limits.max_turn_tokens
        if needed > self.limits.max_tokens:
            raise LimitsError(
                f"max_tokens={self.limits.max_tokens} is too small for task {self.spec.task_id!r} "
                f"of {self.spec.domain!r}: its prompt has {len(self.ledger)} tokens and one turn "
                f"may take max_turn_tokens={self.limits.max_turn_tokens}, together {needed}"
            )
        return None

    def take_turn(self, result: SampleResult) -> Status | None:
        """Append a sampled turn, act on it, append what comes back; the status if it is over."""
        start, closed = len(self.ledger), result.finish_reason == "stop"
        assert result.ids, "an engine samples at least one token"
        self.ledger.append_sampled(
            result.ids, result.logprobs, policy_version=result.policy_version
        )
        assert len(self.ledger) <= self.limits.max_tokens, "the engine sampled more than was asked"
        self.turns.append((start, len(self.ledger)))
        self.stats["turns"] += 1
        self.stats["sampled_tokens"] += len(result.ids)
        if not closed:
            self.stats["cut_turns"] += 1
            text = f"Your turn was cut after {len(result.ids)} tokens. Write a shorter one."
            return self._refuse(result, [_error_reply(text)], closed=False)
        parsed = self.renderer.parse(result.ids)
        if parsed.message is None:
            self.stats["parse_errors"] += 1
            return self._refuse(result, [_error_reply(parsed.error)], closed=True)
        return self._step(self._with_call_ids(parsed.message), result)

    def _step(self, message: Message, result: SampleResult) -> Status | None:
        """Deliver a message to the environment."""
        _, _, terminated, truncated, info = self._timed(self.env.step, message)
        if info.get("refused"):
            return self._refuse(result, info["messages"], closed=True, message=message)
        self.stats["env_steps"] += 1
        self.stats["tool_calls"] += len(message.tool_calls)
        self.stats["tool_errors"] += sum(
            reply.role == "tool" and reply.error for reply in info["messages"]
        )
        self._record([message], text=self.renderer.decode(result.ids))
        if terminated or truncated:
            self._record(info["messages"])
            return self._end(info, terminated=terminated)
        return self._observe(info["messages"], closed=True)

    def _refuse(
        self,
        result: SampleResult,
        replies: Sequence[Message],
        *,
        closed: bool,
        message: Message | None = None,
    ) -> Status | None:
        """Tell the model why its turn was not delivered; only this ledger knows."""
        self.stats["refused"] += 1
        text = self.renderer.decode(result.ids)
        shown = message or Message(role="assistant", content=text)
        self._record([shown], text=text, refused=True)
        if len(self.ledger) >= self.limits.max_tokens:
            return "truncated_tokens"
        if self.stats["refused"] > self.limits.max_refused:
            self._record(replies, refused=True, dropped=True)
            return "truncated_refused"
        return self._observe(replies, closed=closed, refused=True)

    def _observe(
        self, messages: Sequence[Message], *, closed: bool, refused: bool = False
    ) -> Status | None:
        """Append an observation, or drop it whole when it leaves no room for another turn."""
        messages = self._with_tool_names(messages)
        rendered = self.renderer.render_observation(messages, after_turn=True, closed=closed)
        if len(self.ledger) + len(rendered.ids) >= self.limits.max_tokens:
            self._record(messages, refused=refused, dropped=True)
            return "truncated_tokens"
        self._record(messages, refused=refused)
        self._append(rendered)
        return None

    def _end(self, info: Mapping[str, Any], *, terminated: bool) -> Status:
        self.info = info
        trajectory = info.get("trajectory")
        reason = trajectory.termination_reason if trajectory is not None else ""
        # A benchmark with words of its own: Gymnasium's flags say which kind of end it was.
        return _STATUS_OF_REASON.get(reason, "completed" if terminated else "truncated_max_steps")

    def finish(self, status: Status, *, error: str = "") -> Rollout:
        """The finished rollout; a reward only where the status allows one."""
        reward: Reward | None = self.info.get("reward")
        if status == "completed" and reward is None:
            status, error = "error_infra", "the environment ended without info['reward']"
        if status.startswith("error_"):
            value, breakdown = None, {}
            if not error:
                error = f"the benchmark ended it: {self.info['trajectory'].termination_reason}"
        elif reward is None:  # one of our own limits: the benchmark was never asked
            value, breakdown = 0.0, {"official": 0.0, "strict": 0.0}
        else:
            value, breakdown = float(reward.value), dict(reward.breakdown)
        return Rollout(
            spec=self.spec,
            tokens=self.ledger.freeze(),
            status=status,
            reward=value,
            reward_breakdown=breakdown,
            messages=tuple(self.messages),
            turns=tuple(self.turns),
            stats=self.stats,
            error=error,
        )

    def _timed(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        except (UserError, TimeoutError):
            raise
        except Exception as error:
            raise EnvError(traceback.format_exc()) from error
        finally:
            self.stats["env_time_s"] += time.perf_counter() - begin

    def _append(self, rendered: Rendered) -> None:
        self.ledger.append_rendered(rendered.ids, rendered.authors)

    def _with_call_ids(self, message: Message) -> Message:
        turn = len(self.turns) - 1
        calls = tuple(
            replace(call, id=call.id or f"call_{turn}_{i}")
            for i, call in enumerate(message.tool_calls)
        )
        message = replace(message, tool_calls=calls)
        self._with_tool_names([message])
        return message

    def _with_tool_names(self, messages: Sequence[Message]) -> list[Message]:
        """Tool messages with the name of the tool; calls are remembered for later ones."""
        named = []
        for message in messages:
            self._tool_names |= {call.id: call.name for call in message.tool_calls}
            name = message.tool_name or self._tool_names.get(message.tool_call_id, "")
            named.append(replace(message, tool_name=name) if message.role == "tool" else message)
        return named

    def _record(
        self,
        messages: Sequence[Message],
        *,
        text: str | None = None,
        refused: bool = False,
        dropped: bool = False,
    ) -> None:
        for message in messages:
            record = message_record(message)
            if text is not None:  # a sampled turn: which one, and its text as sampled
                record |= {"turn": len(self.turns) - 1, "text": text}
            if refused:
                record["refused"] = True
            if dropped:
                record["dropped"] = True
            self.messages.append(record)


def failed_rollout(spec: RolloutSpec, status: Status, error: str) -> Rollout:
    """The rollout of an episode that was lost with its worker: nothing of it is left."""
    return Rollout(
        spec=spec,
        tokens=Ledger().freeze(),
        status=status,
        reward=None,
        stats=dict.fromkeys(STATS, 0),
        error=error,
    )


def _error_reply(text: str) -> Message:
    return Message(role="tool", content=f"Error: {text}", error=True)


def message_record(message: Message) -> dict[str, Any]:
    """A message as a JSON-able mapping, without its empty fields."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments), "id": call.id}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        record["tool_call_id"] = message.tool_call_id
    if message.error:
        record["error"] = True
    return record
