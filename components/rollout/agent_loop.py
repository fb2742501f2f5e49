"""One episode: render, sample, parse, act, append.

``run_episode`` is a generator, so that it needs neither threads nor an engine of its own: it yields
a ``SampleRequest`` whenever it wants a turn, is sent the ``SampleResult``, and returns the
``Rollout``. Whoever drives it decides how requests are batched.

How an episode ends:

- The environment ends it: the benchmark's reason gives the status, its checker the reward.
- The context is full (``max_tokens``): the observation that does not fit is dropped whole, or the
  turn that was cut stays as sampled; ``truncated_tokens``, reward 0.
- More than ``max_refused`` turns were refused: ``truncated_refused``, reward 0.
- ``max_turns`` turns were sampled: ``truncated_max_steps``, reward 0.
- The environment raised: ``error_deadline`` for a TimeoutError, ``error_user`` for a UserError of
  its user simulator, ``error_infra`` for anything else. No reward: it leaves its group.
- The engine could not sample a turn: ``error_infra``, too.

A turn is refused, in this ledger only and without the environment's knowledge, when it does not
parse, when ``max_turn_tokens`` cut it (half a turn is not an action; the model is told so), or when
the environment says so with ``info["refused"]``. The model reads why in a tool turn and goes on.
"""

from __future__ import annotations

from collections.abc import Generator

from components.chat.base import Renderer
from components.envs.base import Env, UserError
from components.rollout.episode import EnvError, Episode, Limits, LimitsError, TaskRefused
from components.rollout.specs import derive_seed
from components.rollout.types import (
    Rollout,
    RolloutSpec,
    SampleFailure,
    SampleRequest,
    SampleResult,
)

__all__ = ["Limits", "LimitsError", "TaskRefused", "run_episode"]


def prompt_tokens(env: Env, renderer: Renderer, item: tuple[RolloutSpec, Limits]) -> float:
    """Tokens of an episode's prompt, for ``WorkerPool.run_local``.

    Raises:
        LimitsError: the prompt and one full turn exceed ``max_tokens``.
        TaskRefused: the environment answered the task with a ValueError.
    """
    episode = Episode(env, renderer, *item)
    try:
        episode.start()
    except EnvError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        spec = item[0]
        raise TaskRefused(
            f"env: it refuses task {spec.task_id!r} of {spec.domain!r}: {error.__cause__}"
        ) from error
    return episode.stats["prompt_tokens"]


def run_episode(
    env: Env, renderer: Renderer, spec: RolloutSpec, *, limits: Limits, temperature: float
) -> Generator[SampleRequest, SampleResult | SampleFailure, Rollout]:
    """Play one episode.

    Args:
        env: is reset with ``spec.env_seed`` and ``spec.task_id``.
        renderer: the chat format.
        spec: which task, which seeds.
        limits: turns, tokens and refusals that are allowed.
        temperature: of the sampling; stored logprobs are those of the tempered distribution.

    Yields:
        One ``SampleRequest`` for each turn; send its ``SampleResult`` or ``SampleFailure``.

    Returns:
        The finished rollout (``StopIteration.value``).

    Raises:
        LimitsError: the first prompt and one full turn exceed ``limits.max_tokens``.
    """
    episode = Episode(env, renderer, spec, limits)
    try:
        end = episode.start()
        while end is None:
            if len(episode.turns) == limits.max_turns:
                return episode.finish("truncated_max_steps")
            room = limits.max_tokens - len(episode.ledger)
            result = yield SampleRequest(
                rollout_id=spec.rollout_id,
                context=tuple(episode.ledger.ids),
                shared_len=episode.shared_len,
                max_new_tokens=min(limits.max_turn_tokens, room),
                stop_ids=renderer.stop_ids,
                temperature=temperature,
                seed=derive_seed(spec.seed, "turn", len(episode.turns)),
            )
            if isinstance(result, SampleFailure):
                return episode.finish("error_infra", error=result.error)
            end = episode.take_turn(result)
        return episode.finish(end)
    except UserError as error:
        return episode.finish("error_user", error=str(error) or repr(error))
    except TimeoutError as error:
        return episode.finish("error_deadline", error=str(error) or repr(error))
    except EnvError as error:
        return episode.finish("error_infra", error=str(error))
