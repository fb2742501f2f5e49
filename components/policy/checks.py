"""What an engine refuses before it computes anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from components.policy.cache import RolloutCache
from components.rollout.types import SampleRequest


def check_requests(
    requests: Sequence[SampleRequest],
    caches: Mapping[str, RolloutCache],
    *,
    max_tokens: int,
    vocab_size: int,
) -> None:
    """Check the requests of one call.

    Args:
        requests: the call.
        caches: what is kept, by rollout.
        max_tokens: longest context, sampled tokens included.
        vocab_size: ids are below it.

    Raises:
        ValueError: naming the rollout, the setting and what is allowed.
    """
    seen: set[str] = set()
    for request in requests:
        if request.rollout_id in seen:
            raise ValueError(
                f"rollout {request.rollout_id}: two requests in one call; send one turn at a time"
            )
        seen.add(request.rollout_id)
        _check_sizes(request, max_tokens)
        kept = 0
        cache = caches.get(request.rollout_id)
        if cache is not None:
            kept = len(cache.ids)
            _check_continues(request, cache)
        new = request.context[kept:]
        if new and not 0 <= min(new) <= max(new) < vocab_size:
            bad = next(i for i in new if not 0 <= i < vocab_size)
            raise ValueError(
                f"rollout {request.rollout_id}: id {bad} is outside the vocabulary "
                f"(0 to {vocab_size - 1})"
            )


def _check_sizes(request: SampleRequest, max_tokens: int) -> None:
    name, length = request.rollout_id, len(request.context)
    if not 1 <= length < max_tokens:
        raise ValueError(
            f"rollout {name}: the context has {length} tokens; it must have at least one and, for "
            f"a token to be sampled, fewer than max_tokens = {max_tokens}"
        )
    if not 0 <= request.shared_len <= length:
        raise ValueError(
            f"rollout {name}: shared_len = {request.shared_len} must be from 0 to the length of "
            f"the context, {length}"
        )
    if request.max_new_tokens < 1:
        raise ValueError(
            f"rollout {name}: max_new_tokens must be at least 1, not {request.max_new_tokens}"
        )
    if not (math.isfinite(request.temperature) and request.temperature >= 0.0):
        raise ValueError(
            f"rollout {name}: temperature must be 0 (greedy) or a positive number, not "
            f"{request.temperature}"
        )


def _check_continues(request: SampleRequest, cache: RolloutCache) -> None:
    """The context continues what was computed before."""
    if request.shared_len != cache.shared_len:
        raise ValueError(
            f"rollout {request.rollout_id}: shared_len = {request.shared_len}, but it was "
            f"{cache.shared_len} before; release the rollout to start it anew"
        )
    kept = cache.ids
    if list(request.context[: len(kept)]) != kept:
        same = zip(request.context, kept, strict=False)
        at = next((i for i, (a, b) in enumerate(same) if a != b), len(request.context))
        raise ValueError(
            f"rollout {request.rollout_id}: the context differs from what was computed before at "
            f"token {at} ({len(kept)} are kept); contexts only grow, release the rollout to start "
            "it anew"
        )
