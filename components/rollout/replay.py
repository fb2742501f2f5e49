"""Recorded rollouts played again without a policy: the same turns, delivered to the environment.

What an environment answers depends on the task, the seed and the turns alone, so the replay ends
where the recorded episode did, with the same official record; that is checked message by message.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.envs.base import Env, Message, Reward, ToolCall
from components.rollout.episode import message_record
from components.rollout.recorder import read_rollouts
from components.rollout.types import Rollout

_OF_THE_RECORDER = ("turn", "text", "dropped")
"""Keys of a recorded message that the environment knows nothing of."""


class ReplayError(ValueError):
    """The environment did not do what is recorded."""


def read_with_lines(path: Path) -> Iterator[tuple[dict[str, Any], Rollout]]:
    """Each line of a ``rollouts.jsonl`` as it stands there, and the rollout that it holds."""
    with path.open(encoding="utf-8") as file:
        for line, record in zip(file, read_rollouts(path), strict=False):
            yield json.loads(line), record.rollout


def replay(env: Env, rollout: Rollout) -> Mapping[str, Any]:
    """Deliver a rollout's turns again; turns that were refused never reached the environment.

    Args:
        env: made as for the run, but for its checker.
        rollout: recorded; not one that failed (``error_*``).

    Returns:
        ``info`` of the last ``reset`` or ``step``: with ``reward`` and ``trajectory`` where the
        environment ended the episode, without them where a limit of ours did.

    Raises:
        ReplayError: if the environment says or does something else than what is recorded.
    """
    spec = rollout.spec
    waiting = deque(m for m in rollout.messages if not m.get("refused"))
    options = {"task_id": spec.task_id, "domain": spec.domain}
    _, info = env.reset(seed=spec.env_seed, options=options)
    _expect(info["messages"], waiting, spec.rollout_id)
    ended = "trajectory" in info
    while waiting and not ended:
        _, _, terminated, truncated, info = env.step(_turn(waiting.popleft(), spec.rollout_id))
        if info.get("refused"):
            raise ReplayError(f"{spec.rollout_id}: a turn is refused now: {info['refused']}")
        _expect(info["messages"], waiting, spec.rollout_id)
        ended = terminated or truncated
    if waiting:
        raise ReplayError(
            f"{spec.rollout_id}: the episode ends now with {len(waiting)} recorded messages left"
        )
    return info


def rescored(env: Env, rollout: Rollout) -> Reward | None:
    """The reward that the environment's checker gives a recorded rollout.

    As when it was played: None for one that failed (``error_*``), 0 where a limit of ours ended it
    and the checker was never asked.

    Args:
        env: made as for the run, with the checker that is to score.
        rollout: recorded.

    Raises:
        ReplayError: if the replay is not what is recorded, its official reward included.
    """
    if not rollout.valid:
        return None
    info = replay(env, rollout)
    reward: Reward | None = info.get("reward")
    if reward is None:
        return Reward(value=0.0, breakdown={"official": 0.0, "strict": 0.0})
    before, now = rollout.reward_breakdown.get("official"), reward.breakdown.get("official")
    if None not in (before, now) and before != now:
        raise ReplayError(
            f"{rollout.spec.rollout_id}: the official reward was {before} and is {now} now"
        )
    return reward


def _turn(record: Mapping[str, Any], rollout_id: str) -> Message:
    """A recorded assistant turn as a message."""
    if record["role"] != "assistant":
        raise ReplayError(
            f"{rollout_id}: recorded is a message of {record['role']}: {record['content'][:80]!r}, "
            "and the environment waits for a turn of the agent"
        )
    calls = tuple(ToolCall(**call) for call in record.get("tool_calls", ()))
    return Message(role="assistant", content=record["content"], tool_calls=calls)


def _expect(
    messages: tuple[Message, ...], waiting: deque[Mapping[str, Any]], rollout_id: str
) -> None:
    """Take the recorded messages that these must equal."""
    for message in messages:
        found = json.loads(json.dumps(message_record(message)))
        record = dict(waiting.popleft()) if waiting else {}
        recorded = {k: v for k, v in record.items() if k not in _OF_THE_RECORDER}
        if found != recorded:
            raise ReplayError(
                f"{rollout_id}: the replay differs from the record: {found} now, {recorded} there"
            )
