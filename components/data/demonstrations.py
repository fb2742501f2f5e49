"""Demonstrations: rollouts whose turns a demonstrator wrote instead of a policy.

They come out of the same episode loop, the same environment and the same ledger as rollouts, so
supervised learning trains on exactly what reinforcement learning will see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from components.chat.base import Renderer
from components.envs.base import Env, Message, ToolSpec
from components.rollout.agent_loop import Limits, run_episode
from components.rollout.types import Rollout, RolloutSpec, SampleResult, Tokens
from components.safety.checks import GATES, checks_of, run_checks
from components.safety.conversation import from_records

UNLIMITED = Limits(max_turns=200, max_turn_tokens=4096, max_tokens=1_000_000, max_refused=0)
"""What a demonstration may use; its length is judged afterwards."""


class Oracle(Protocol):
    """Who writes the turns."""

    def act(self, messages: tuple[Message, ...], tools: Sequence[ToolSpec]) -> Message:
        """The next turn, after everything the agent has seen and said."""
        ...


class _WatchedEnv:
    """Passes everything on to an environment and keeps the messages that the agent saw and said."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.messages: list[Message] = []
        self.tools: tuple[ToolSpec, ...] = ()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.messages, self.tools = list(info["messages"]), tuple(info["tools"])
        return observation, info

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        turn = Message(role="assistant", content=action) if isinstance(action, str) else action
        self.messages += [turn, *result[-1]["messages"]]
        return result

    def close(self) -> None:
        self.env.close()


def demonstrate(env: Env, oracle: Oracle, renderer: Renderer, spec: RolloutSpec) -> Rollout:
    """Play one episode with a demonstrator.

    Args:
        env: is reset with ``spec.env_seed`` and ``spec.task_id``.
        oracle: fresh, for this episode.
        renderer: the chat format.
        spec: which task, which seeds.

    Returns:
        The rollout. Its turns are what a policy would have sampled, with log-probability 0 and
        policy version 0.
    """
    watched = _WatchedEnv(env)
    episode = run_episode(watched, renderer, spec, limits=UNLIMITED, temperature=1.0)
    try:
        next(episode)
        while True:
            turn = oracle.act(tuple(watched.messages), watched.tools)
            ids = renderer.render_assistant(turn)
            episode.send(
                SampleResult(
                    ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop", policy_version=0
                )
            )
    except StopIteration as end:
        return end.value


def cut_to(rollout: Rollout, max_tokens: int) -> Rollout | None:
    """Keep the whole turns that fit; None when not even the first does.

    A cut demonstration ends with the stop id of its last whole turn: supervised learning then
    never sees half a turn, nor tokens past the context of the model. ``stats["cut"]`` is 1.
    """
    if len(rollout.tokens) <= max_tokens:
        return rollout
    turns = tuple(turn for turn in rollout.turns if turn[1] <= max_tokens)
    if not turns:
        return None
    end = turns[-1][1]
    tokens = rollout.tokens
    kept = Tokens(
        ids=tokens.ids[:end],
        authors=tokens.authors[:end],
        loss_mask=tokens.loss_mask[:end],
        generator_logprobs=tokens.generator_logprobs[:end],
        policy_versions=tokens.policy_versions[:end],
    )
    kept.check()
    stats = {**rollout.stats, "cut": 1, "turns": len(turns), "sampled_tokens": sum(kept.loss_mask)}
    return replace(rollout, tokens=kept, turns=turns, stats=stats)


def broken_rules(rollout: Rollout) -> list[str]:
    """Those of S1 to S4 and S7 that hold in the rollout's domain and that it breaks."""
    spec = rollout.spec
    names = [name for name in GATES if name in checks_of(spec.domain)]
    if not names:  # a domain of its own, of which tau2-bench knows no facts
        return []
    conversation = from_records(rollout.messages, domain=spec.domain, task_id=spec.task_id)
    findings = run_checks(conversation, names)
    return [name for name, found in findings.items() if not all(f.passed for f in found)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """What came of a list of orders."""

    rollouts: tuple[Rollout, ...]
    """In the order of their specs, dropped ones left out."""
    dropped: Mapping[str, tuple[str, ...]]
    """Why not kept -> rollout ids: ``reward``, ``safety``, ``too_long``, ``error``."""
    num_cut: int


def collect(
    specs: Iterable[RolloutSpec],
    *,
    play: Callable[[RolloutSpec], Rollout],
    max_tokens: int,
    cut: bool = False,
    mapper: Callable[..., Iterable[Rollout]] = map,
) -> Demonstrations:
    """Play demonstrations and keep those that earned the full official reward and broke no rule.

    The rules are the safety checks S1 to S4 and S7, as far as they hold in the domain: what breaks
    one is not what a policy should learn from, whatever the benchmark says.

    Args:
        specs: what to play.
        play: plays one, or looks up one that was played; picklable if ``mapper`` needs it to be.
        max_tokens: longest demonstration.
        cut: cut longer ones after the last whole turn that fits, instead of dropping them.
        mapper: ``map``, or the ``map`` of a process pool.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens: {max_tokens} must be at least 1")
    kept: list[Rollout] = []
    dropped: dict[str, list[str]] = {"reward": [], "safety": [], "too_long": [], "error": []}
    num_cut = 0
    for rollout in mapper(play, specs):
        whole: Rollout | None = rollout
        if not rollout.valid:
            dropped["error"].append(rollout.spec.rollout_id)
            continue
        if rollout.reward_breakdown.get("official") != 1.0:
            dropped["reward"].append(rollout.spec.rollout_id)
            continue
        if broken_rules(rollout):
            dropped["safety"].append(rollout.spec.rollout_id)
            continue
        if len(rollout.tokens) > max_tokens:
            whole = cut_to(rollout, max_tokens) if cut else None
            num_cut += whole is not None
        if whole is None:
            dropped["too_long"].append(rollout.spec.rollout_id)
        else:
            kept.append(whole)
    return Demonstrations(
        rollouts=tuple(kept),
        dropped={why: tuple(ids) for why, ids in dropped.items()},
        num_cut=num_cut,
    )
