"""What an engine refuses before it computes anything."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch

from components.policy.cache import RolloutCache
from components.policy.spans import KvSizes
from components.rollout.types import SampleRequest


def check_device(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> None:
    """Check that there are kernels for a model.

    Args:
        device: where it is.
        dtype: of its activations.
        head_dim: of its attention.

    Raises:
        ValueError: naming what is allowed.
    """
    allowed = {
        "cpu": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
        "cuda": (torch.bfloat16, torch.float16),
    }
    if device.type not in allowed:
        raise ValueError(f"the local engine runs on cpu and cuda, not on {device.type}")
    if dtype not in allowed[device.type]:
        raise ValueError(
            f"dtype = {dtype}: on {device.type} the local engine computes in "
            f"{' or '.join(str(d) for d in allowed[device.type])}, for its attention "
            "kernel takes no other; set dtype: bf16, or device: cpu"
        )
    if device.type == "cuda" and (head_dim > 256 or head_dim % 8):
        raise ValueError(
            f"head_dim = {head_dim}: on cuda the local engine takes multiples of 8 up to 256"
        )


def check_settings(
    *,
    counts: Mapping[str, int],
    max_positions: int,
    top_p: float,
    top_k: int | None,
    max_kv_gib: float | None,
    sizes: KvSizes,
) -> None:
    """Check the settings of an engine.

    Args:
        counts: ``max_tokens`` and others that must be positive.
        max_positions: the model's context.
        top_p: of the sampling.
        top_k: of the sampling.
        max_kv_gib: limit of keys and values.
        sizes: of keys and values.

    Raises:
        ValueError: naming the setting and what is allowed.
    """
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if counts["max_tokens"] > max_positions:
        raise ValueError(
            f"max_tokens = {counts['max_tokens']}, but the model's context is "
            f"{max_positions} tokens"
        )
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p = {top_p}: must be above 0 and at most 1 (1 keeps every token)")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k}: must be at least 1, or null to keep every token")
    if max_kv_gib is None:
        return
    least = sizes.rollout(counts["max_tokens"]) / 2**30
    if not max_kv_gib >= least:
        raise ValueError(
            f"max_kv_gib = {max_kv_gib}: one rollout of max_tokens = {counts['max_tokens']} needs "
            f"{least:.3g} GiB of keys and values; allow that much, or null for no limit"
        )


def check_finite(logits: torch.Tensor, names: Sequence[str], *, policy_version: int) -> None:
    """Refuse to sample from logits that are not numbers.

    Args:
        logits: ``[B, V]``.
        names: the rollout of each row.
        policy_version: of the weights.

    Raises:
        FloatingPointError: naming the rollouts.
    """
    finite = logits.sum(-1).isfinite().tolist()
    if not all(finite):
        bad = [name for name, ok in zip(names, finite, strict=True) if not ok]
        raise FloatingPointError(
            f"logits are not finite for rollout {', '.join(bad)} "
            f"under policy version {policy_version}"
        )


def check_requests(
    requests: Sequence[SampleRequest],
    caches: Mapping[str, RolloutCache],
    *,
    max_tokens: int,
    vocab_size: int,
    pending: Collection[str] = (),
) -> None:
    """Check requests that enter a call.

    Args:
        requests: they enter together.
        caches: what is kept, by rollout.
        max_tokens: longest context, sampled tokens included.
        vocab_size: ids are below it.
        pending: rollouts with a turn in the call that has not ended.

    Raises:
        ValueError: naming the rollout, the setting and what is allowed.
    """
    seen = set(pending)
    for request in requests:
        if request.rollout_id in seen:
            raise ValueError(
                f"rollout {request.rollout_id}: two requests at once; send one turn at a time"
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
