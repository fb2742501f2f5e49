"""The policy engine in process: the trainer's own model, with a KV cache.

Nothing is computed twice within a weight version: a shared prefix is computed once for all
rollouts, and each turn of a rollout adds only the tokens that are new. The parameters are the
trainer's, so a sync moves nothing: it drops the caches and the packed copy of the weights that
decode steps read, and stamps the new version.

Suffixes: ``B`` rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from components.models.decoder import PolicyModel
from components.policy.cache import BLOCK, RolloutCache, SharedPrefix
from components.policy.checks import check_device, check_finite, check_requests, check_settings
from components.policy.decode import DecodePass
from components.policy.eager import eager_layers
from components.policy.engine import Feed
from components.policy.forward import Forward, Pack
from components.policy.prefill import PackedRow, Segment, pack_rows
from components.policy.sampling import sample, uniforms
from components.policy.serve import Call
from components.policy.spans import KvSizes, spans_of
from components.policy.store import CacheStore, shared_part
from components.policy.turn import EngineStats, Turn
from components.rollout.types import SampleRequest, SampleResult


class LocalEngine:
    """Samples turns from a model in this process. Implements ``PolicyEngine``.

    Each request's random numbers depend on its seed alone. With ``deterministic`` so do its tokens,
    on a CPU in fp32: alone or beside others, they are the same, and their log-probabilities are
    within 1e-5. In bf16 the products of rollouts that share a prefix with some of the batch only,
    and those of experts, may round otherwise. On a CPU the same calls give the same tokens in any
    case. A turn that has ended leaves the batch, and what ``feed`` gives for it enters before the
    next decode step if there is room: no turn waits for another to end. When that is depends on the
    sequence of tokens alone, never on the clock.

    Args:
        model: shared with the trainer; its weights may change in place between syncs.
        max_tokens: longest context of a rollout, sampled tokens included. A turn is cut there
            (finish reason ``length``).
        max_batch_size: rollouts sampled at once; further requests of a call wait in order.
        prefill_chunk: most tokens in one forward pass of new tokens; bounds the memory of a pass.
        max_kv_gib: most GiB of keys and values. Requests that do not fit wait for turns of their
            call to end, those of rollouts that are kept go first, and rollouts without a request
            are forgotten and computed anew when they come back. None for no limit.
        top_p: sample among the fewest most probable tokens that together have this probability.
            The log-probabilities are those of the renormalised distribution, which a trainer that
            knows the temperature alone cannot compute: for evaluation.
        top_k: sample among this many most probable tokens; likewise. None for all.
        deterministic: fill every decode step up to ``max_batch_size`` rows and compute the new
            tokens of each rollout in passes of their own: then the shapes of its products do not
            depend on who shares the batch. Costs time while the batch is not full.
        pack_weights: decode from a second copy of the weights, laid out for few rows: ``auto`` (on
            a CPU in fp32 and bf16), True or False. It is made anew when the weights have changed.
        policy_version: stamped until the first sync.

    Raises:
        ValueError: a setting out of range, more tokens than the model has positions, or a model
            that has no kernels where it is (fp32 on CUDA).
    """

    def __init__(
        self,
        model: PolicyModel,
        *,
        max_tokens: int,
        max_batch_size: int,
        prefill_chunk: int = 1024,
        max_kv_gib: float | None = None,
        top_p: float = 1.0,
        top_k: int | None = None,
        deterministic: bool = True,
        pack_weights: Pack = "auto",
        policy_version: int = 0,
    ) -> None:
        config, weight = model.config, model.tok_embeddings.weight
        check_device(weight.device, weight.dtype, head_dim=config.head_dim)
        self._sizes = KvSizes(
            spans=spans_of(model),
            token_bytes=2 * config.num_kv_heads * config.head_dim * weight.element_size(),
            block=BLOCK,
        )
        check_settings(
            counts={
                "max_tokens": max_tokens,
                "max_batch_size": max_batch_size,
                "prefill_chunk": prefill_chunk,
            },
            max_positions=config.max_positions,
            top_p=top_p,
            top_k=top_k,
            max_kv_gib=max_kv_gib,
            sizes=self._sizes,
        )
        self.policy_version = policy_version
        self.stats = EngineStats()
        self._told = 0
        self._model = model
        self._forward = Forward(model, num_rows=max_batch_size, pack_weights=pack_weights)
        self._max_tokens = max_tokens
        self._max_batch_size = max_batch_size
        self._prefill_chunk = prefill_chunk
        self._max_kv_bytes = None if max_kv_gib is None else int(max_kv_gib * 2**30)
        self._truncation = {"top_p": top_p, "top_k": top_k}
        self._deterministic = deterministic
        self._reset()

    def _reset(self) -> None:
        self._store = CacheStore(
            sizes=self._sizes,
            num_kv_heads=self._model.config.num_kv_heads,
            max_bytes=self._max_kv_bytes,
        )

    def sync(self, policy_version: int) -> dict[str, float]:
        """The weights have changed: drop what was made of them and stamp the new version.

        Args:
            policy_version: of the weights that the model has now.

        Returns:
            With ``max_kv_gib``, ``engine/forgotten``: rollouts whose caches have made room for
            others since the last sync, and were computed anew if they came back.
        """
        self._reset()
        self._forward.drop()
        self.policy_version = policy_version
        forgotten, self._told = self.stats.forgotten - self._told, self.stats.forgotten
        return {} if self._max_kv_bytes is None else {"engine/forgotten": float(forgotten)}

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Free what is kept for these rollouts; ids that are not known are passed over."""
        self._store.release(rollout_ids)

    def cache_bytes(self) -> int:
        """Memory of all keys and values, shared prefixes included."""
        return self._store.num_bytes()

    def packed_bytes(self) -> int:
        """Memory of the packed copy of the weights: none before the first turn of a version."""
        return self._forward.packed_bytes()

    @torch.no_grad()  # not inference_mode: its tensors may not meet autograd later (RoPE tables)
    def generate(
        self, requests: Sequence[SampleRequest], *, feed: Feed | None = None
    ) -> list[SampleResult]:
        """Sample one turn for each request, and for each that ``feed`` gives.

        Args:
            requests: at most one per rollout.
            feed: called after each forward pass; see ``PolicyEngine``.

        Returns:
            The turns in the order of the requests' numbers.

        Raises:
            ValueError: a request that is malformed, too long, does not continue what was sent
                before for its rollout, or comes before its rollout's last turn has ended. Where it
                is one of ``requests``, nothing has been computed; otherwise all caches are dropped.
            FloatingPointError: logits that are not finite; all caches are dropped.
        """
        check = partial(
            check_requests,
            caches=self._store.caches,
            max_tokens=self._max_tokens,
            vocab_size=self._model.config.vocab_size,
        )
        call = Call(requests, feed=feed, check=check, policy_version=self.policy_version)
        try:
            with eager_layers(self._model):
                self._forward.refresh()
                self._serve(call)
        except BaseException:
            self._reset()  # what was being filled cannot be trusted
            raise
        return call.results()

    def _serve(self, call: Call) -> None:
        decode: DecodePass | None = None
        while call.waiting or call.live:
            began = time.perf_counter()
            admitted = self._admit_all(call)
            if admitted:
                self._take(self._prefill(admitted), admitted)
                call.live += admitted
                self.stats.prefill_time_s += time.perf_counter() - began
            else:
                assert decode is not None
                self._take(self._decode(decode, call.live), call.live)
                self.stats.decode_time_s += time.perf_counter() - began
            if call.settle() or admitted:
                call.live.sort(key=lambda turn: turn.cache.row)  # neighbours in the pool together
                decode = DecodePass(
                    self._store.pool,
                    [turn.cache for turn in call.live],
                    device=self._forward.device,
                    size=self._max_batch_size if self._deterministic else 0,
                )

    def _admit_all(self, call: Call) -> list[Turn]:
        """Take the next requests into the batch while there is room for them."""
        admitted: list[Turn] = []
        while call.waiting and len(call.live) + len(admitted) < self._max_batch_size:
            index, request = entry = self._store.first(call.waiting)
            room = self._store.make_room(
                request,
                length=len(request.context) + self._limit(request),
                busy={t.request.rollout_id: t.max_length for t in (*call.live, *admitted)},
                waiting={r.rollout_id for number, r in call.waiting if number != index},
            )
            if not room:
                assert call.live or admitted, "one rollout alone fits: the limit was checked"
                break
            call.waiting.remove(entry)
            admitted.append(self._admit(index, request))
        self.stats.forgotten += self._store.take_forgotten()
        return admitted

    def _limit(self, request: SampleRequest) -> int:
        """Most tokens of a turn."""
        return min(request.max_new_tokens, self._max_tokens - len(request.context))

    def _admit(self, index: int, request: SampleRequest) -> Turn:
        cache = self._store.caches.pop(request.rollout_id, None)
        if cache is None:
            prefix = shared_part(request)
            cache = RolloutCache(
                pool=self._store.pool,
                row=self._store.pool.acquire(base=len(prefix)),
                shared=self._shared_prefix(prefix) if prefix else None,
                shared_len=request.shared_len,
                ids=list(prefix),
            )
        self._store.caches[request.rollout_id] = cache  # the last in their order: just used
        draws = uniforms(request.seed, self._limit(request))
        return Turn(index=index, request=request, cache=cache, draws=draws)

    def _shared_prefix(self, ids: tuple[int, ...]) -> SharedPrefix:
        shared = self._store.shared.pop(ids, None)
        if shared is not None:
            self._store.shared[ids] = shared  # the last in their order: just used
            return shared
        shared = SharedPrefix(ids, spans=self._sizes.spans)
        for start in range(0, len(ids), self._prefill_chunk):
            new = list(ids[start : start + self._prefill_chunk])
            segment = Segment(0, len(new), shared, start, None)
            positions = list(range(start, start + len(new)))
            self._forward.prefill(PackedRow([segment], new, positions, [], []))
        self._store.shared[ids] = shared
        self.stats.shared_tokens += len(ids)
        return shared

    def _prefill(self, turns: Sequence[Turn]) -> Tensor:
        """Feed what is new of each context; logits [B, V] after the last token of each."""
        contexts = [(turn.cache, turn.request.context) for turn in turns]
        apart = [[c] for c in contexts] if self._deterministic else [contexts]
        logits: list[Tensor] = []
        for some in apart:
            found: dict[int, Tensor] = {}
            for row in pack_rows(some, max_length=self._prefill_chunk):
                found |= zip(row.owners, self._forward.prefill(row), strict=True)
                self.stats.prefill_tokens += len(row.ids)
            logits += [found[index] for index in range(len(some))]
        return torch.stack(logits)

    def _decode(self, decode: DecodePass, live: Sequence[Turn]) -> Tensor:
        """Feed the last sampled token of each turn; logits [B, V] for the next."""
        decode.begin()
        last = [turn.ids[-1] for turn in live]
        last += [0] * (len(decode.positions) - len(live))  # padding
        logits = self._forward.decode(decode, last)
        decode.end()
        for turn in live:
            turn.cache.ids.append(turn.ids[-1])
        self.stats.decode_tokens += len(live)
        self.stats.decode_steps += 1
        return logits[: len(live)]

    def _take(self, logits: Tensor, turns: Sequence[Turn]) -> None:
        """Draw the next token of each turn."""
        names = [turn.request.rollout_id for turn in turns]
        check_finite(logits, names, policy_version=self.policy_version)
        tokens, logprobs = sample(
            logits,
            temperatures=[turn.request.temperature for turn in turns],
            draws=[turn.draws[len(turn.ids)] for turn in turns],
            **self._truncation,
        )
        for turn, token, logprob in zip(turns, tokens, logprobs, strict=True):
            turn.take(token, logprob)
