"""The policy engine in process: the trainer's own model, with a KV cache.

Nothing is computed twice within a weight version: a shared prefix is computed once for all
rollouts, and each turn of a rollout adds only the tokens that are new. The parameters are the
trainer's, so a sync moves nothing: it drops the caches and stamps the new version.

Suffixes: ``B`` rollouts.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from components.models.decoder import PolicyModel
from components.policy.cache import RolloutCache, RowPool, SharedPrefix
from components.policy.checks import check_requests
from components.policy.decode import DecodePass
from components.policy.prefill import PackedRow, PrefillPass, Segment, pack_rows
from components.policy.sampling import sample, uniforms
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
    prefill_time_s: float = 0.0
    """Shared prefixes and the first token of each turn included."""
    decode_time_s: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
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


class LocalEngine:
    """Samples turns from a model in this process. Implements ``PolicyEngine``.

    The same requests in the same calls give the same tokens, bit for bit. Each request's random
    numbers depend on its seed alone; the rounding of its logits may depend on who else is in the
    batch.

    Args:
        model: shared with the trainer; its weights may change in place between syncs.
        max_tokens: longest context of a rollout, sampled tokens included. A turn is cut there
            (finish reason ``length``).
        max_batch_size: rollouts sampled at once; further requests of a call wait in order.
        prefill_chunk: most tokens in one forward pass of new tokens; bounds the memory of a pass.
        policy_version: stamped until the first sync.

    Raises:
        ValueError: a setting out of range, or more tokens than the model has positions.
    """

    def __init__(
        self,
        model: PolicyModel,
        *,
        max_tokens: int,
        max_batch_size: int,
        prefill_chunk: int = 1024,
        policy_version: int = 0,
    ) -> None:
        settings = {
            "max_tokens": max_tokens,
            "max_batch_size": max_batch_size,
            "prefill_chunk": prefill_chunk,
        }
        for name, value in settings.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if max_tokens > model.config.max_positions:
            raise ValueError(
                f"max_tokens = {max_tokens}, but the model's context is "
                f"{model.config.max_positions} tokens"
            )
        self.policy_version = policy_version
        self.stats = EngineStats()
        self._model = model
        self._max_tokens = max_tokens
        self._max_batch_size = max_batch_size
        self._prefill_chunk = prefill_chunk
        self._reset()

    def _reset(self) -> None:
        config = self._model.config
        self._pool = RowPool(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads)
        self._caches: dict[str, RolloutCache] = {}
        self._shared: dict[tuple[int, ...], SharedPrefix] = {}

    def sync(self, policy_version: int) -> dict[str, float]:
        """The weights have changed: drop every cache and stamp the new version.

        Args:
            policy_version: of the weights that the model has now.

        Returns:
            No metrics: there is nothing to move.
        """
        self._reset()
        self.policy_version = policy_version
        return {}

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Free what is kept for these rollouts; ids that are not known are passed over."""
        for rollout_id in rollout_ids:
            cache = self._caches.pop(rollout_id, None)
            if cache is not None:
                self._pool.release(cache.row)

    def cache_bytes(self) -> int:
        """Memory of all keys and values, shared prefixes included."""
        return self._pool.num_bytes() + sum(s.num_bytes() for s in self._shared.values())

    @torch.no_grad()  # not inference_mode: its tensors may not meet autograd later (RoPE tables)
    def generate(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Sample one turn for each request.

        Args:
            requests: at most one per rollout.

        Returns:
            The turns in the order of the requests.

        Raises:
            ValueError: a request that is malformed, too long, or does not continue what was sent
                before for its rollout. Nothing has been computed then.
            FloatingPointError: logits that are not finite; all caches are dropped.
        """
        check_requests(
            requests,
            self._caches,
            max_tokens=self._max_tokens,
            vocab_size=self._model.config.vocab_size,
        )
        # Compiled layers would be compiled anew for every shape of a cache.
        compiler = "torch._dynamo" in sys.modules
        stance = torch.compiler.set_stance("force_eager") if compiler else nullcontext()
        try:
            with stance:
                return self._serve(requests)
        except BaseException:
            self._reset()  # what was being filled cannot be trusted
            raise

    def _serve(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        waiting = deque(enumerate(requests))
        live: list[_Turn] = []
        done: dict[int, _Turn] = {}
        decode: DecodePass | None = None
        while waiting or live:
            began = time.perf_counter()
            room = min(self._max_batch_size - len(live), len(waiting))
            if room:
                admitted = [self._admit(*waiting.popleft()) for _ in range(room)]
                self._take(self._prefill(admitted), admitted)
                live += admitted
                self.stats.prefill_time_s += time.perf_counter() - began
            else:
                assert decode is not None
                self._take(self._decode(decode, live), live)
                self.stats.decode_time_s += time.perf_counter() - began
            if room or any(turn.finish_reason for turn in live):
                done |= {turn.index: turn for turn in live if turn.finish_reason}
                live = [turn for turn in live if not turn.finish_reason]
                live.sort(key=lambda turn: turn.cache.row)  # neighbours in the pool together
                caches = [turn.cache for turn in live]
                decode = DecodePass(self._pool, caches, device=self._device)
        return [self._result(done[index]) for index in range(len(requests))]

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _result(self, turn: _Turn) -> SampleResult:
        assert turn.finish_reason is not None
        return SampleResult(
            ids=tuple(turn.ids),
            logprobs=tuple(turn.logprobs),
            finish_reason=turn.finish_reason,
            policy_version=self.policy_version,
        )

    def _admit(self, index: int, request: SampleRequest) -> _Turn:
        cache = self._caches.get(request.rollout_id)
        if cache is None:
            # The last token of a context is always the rollout's own: its logits are wanted.
            prefix = request.context[: min(request.shared_len, len(request.context) - 1)]
            shared = self._shared_prefix(prefix) if prefix else None
            cache = RolloutCache(
                pool=self._pool,
                row=self._pool.acquire(),
                shared=shared,
                shared_len=request.shared_len,
                ids=list(prefix),
            )
            self._caches[request.rollout_id] = cache
        limit = min(request.max_new_tokens, self._max_tokens - len(request.context))
        draws = uniforms(request.seed, limit)
        return _Turn(index=index, request=request, cache=cache, draws=draws)

    def _shared_prefix(self, ids: tuple[int, ...]) -> SharedPrefix:
        shared = self._shared.get(ids)
        if shared is not None:
            return shared
        shared = SharedPrefix(ids, num_layers=self._model.config.num_layers)
        for start in range(0, len(ids), self._prefill_chunk):
            new = list(ids[start : start + self._prefill_chunk])
            segment = Segment(0, len(new), shared, start, None)
            positions = list(range(start, start + len(new)))
            self._forward(PackedRow([segment], new, positions, [], []))
        self._shared[ids] = shared
        self.stats.shared_tokens += len(ids)
        return shared

    def _prefill(self, turns: Sequence[_Turn]) -> Tensor:
        """Feed what is new of each context; logits [B, V] after the last token of each."""
        contexts = [(turn.cache, turn.request.context) for turn in turns]
        logits: dict[int, Tensor] = {}
        for row in pack_rows(contexts, max_length=self._prefill_chunk):
            logits |= zip(row.owners, self._forward(row), strict=True)
            self.stats.prefill_tokens += len(row.ids)
        return torch.stack([logits[index] for index in range(len(turns))])

    def _forward(self, row: PackedRow) -> Tensor:
        """Logits [M, V] of the row's ends."""
        tokens, input_pos, index = (
            torch.tensor(x, dtype=torch.long, device=self._device)
            for x in (row.ids, row.positions, row.ends)
        )
        return self._model(
            tokens[None], mask=PrefillPass(row.segments), input_pos=input_pos[None], index=index
        )

    def _decode(self, decode: DecodePass, live: Sequence[_Turn]) -> Tensor:
        """Feed the last sampled token of each turn; logits [B, V] for the next."""
        last = [turn.ids[-1] for turn in live]
        decode.begin()
        logits = self._model(
            torch.tensor(last, device=self._device)[:, None],
            mask=decode,
            input_pos=decode.positions[:, None],
        )
        decode.end()
        for turn in live:
            turn.cache.ids.append(turn.ids[-1])
        self.stats.decode_tokens += len(live)
        self.stats.decode_steps += 1
        return logits

    def _take(self, logits: Tensor, turns: Sequence[_Turn]) -> None:
        """Draw the next token of each turn."""
        finite = logits.sum(-1).isfinite().tolist()
        if not all(finite):
            names = [t.request.rollout_id for t, ok in zip(turns, finite, strict=True) if not ok]
            raise FloatingPointError(
                f"logits are not finite for rollout {', '.join(names)} "
                f"under policy version {self.policy_version}"
            )
        tokens, logprobs = sample(
            logits,
            temperatures=[turn.request.temperature for turn in turns],
            draws=[turn.draws[len(turn.ids)] for turn in turns],
        )
        for turn, token, logprob in zip(turns, tokens, logprobs, strict=True):
            turn.ids.append(token)
            turn.logprobs.append(logprob)
            if token in turn.request.stop_ids:
                turn.finish_reason = "stop"
            elif len(turn.ids) == len(turn.draws):
                turn.finish_reason = "length"
