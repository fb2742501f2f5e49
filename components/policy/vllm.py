"""The policy engine on one or several vLLM servers.

Token ids go out, token ids and log-probabilities of the sampled distribution come back; nothing is
tokenised. After each step the weights go to every server as files, an adapter alone where the model
has one, and a probe proves that the servers use them (``components/policy/probe.py``).

A turn that gets no sound answer is asked for again, on another server if there is one; a server
that was started anew gets its weights back first. What still fails loses its rollout as
``error_infra``. Answers of weights other than the current ones are never used.

NCCL transfer of weights is left out: no machine with both was at hand to prove it on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Coroutine, Iterable, Sequence
from itertools import count
from typing import Any

from components.models.decoder import PolicyModel
from components.models.lora import adapters
from components.policy.engine import EngineError, Feed
from components.policy.probe import ProbeReading, WeightProbe
from components.policy.vllm_checks import check_addresses, check_server, check_turns
from components.policy.vllm_loop import Loop, agree, all_of, gather, pauses, rank_and_size, stream
from components.policy.vllm_server import NoAnswer, NotServed, Unavailable, VLLMServer
from components.policy.vllm_weights import HINTS, WeightFiles, what_to_send
from components.rollout.types import SampleFailure, SampleRequest, SampleResult

_log = logging.getLogger(__name__)

COUNTS = ("engine/retried_turns", "engine/lost_turns", "engine/renewed_servers")
"""Counted from one sync to the next."""


class VLLMEngine:
    """Samples turns from vLLM servers. Implements ``PolicyEngine``.

    With several ranks each server belongs to one of them, which sends it its weights; with fewer
    servers than ranks several ranks share one. A rollout stays on its server, which keeps the keys
    and values of its context.

    Args:
        model: whose weights the servers get: the trainer's, or its unsharded copy.
        max_tokens: longest context of a rollout, sampled tokens included.
        max_batch_size: requests under way at once, over all of this rank's servers.
        addresses: of the servers, ``http://host:port``.
        weights: ``adapter``, ``full``, or ``auto``: the adapter alone if the model has one.
        sync_dir: a folder that this machine and the servers see under the same path; None: a
            temporary one, for servers on this machine.
        timeout_s: for one turn, further attempts included; for a server to come back at a sync.
        retries: further attempts at a turn.
        probe_bound: most mean |server - trainer| of the probe's log-probabilities, in nats.
        api_key_env: the environment variable with the servers' key; None: they want none.
        policy_version: of the weights that the model has now; stamped until the first sync.

    Raises:
        ValueError: a setting out of range; a server that does not answer, lacks something that is
            needed, or serves another model.
    """

    own_weights = True  # the servers have them; the model is read at a sync alone
    clocked = False  # turns end when the servers answer

    def __init__(
        self,
        model: PolicyModel,
        *,
        max_tokens: int,
        max_batch_size: int,
        addresses: Sequence[str],
        weights: str = "auto",
        sync_dir: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 3,
        probe_bound: float = 0.15,
        api_key_env: str | None = None,
        policy_version: int = 0,
    ) -> None:
        settings = {"max_tokens": max_tokens, "max_batch_size": max_batch_size}
        for name, value in settings.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not timeout_s > 0 or retries < 0:
            raise ValueError(
                f"engine.timeout_s = {timeout_s}, engine.retries = {retries}: must be above 0, and "
                "0 or more"
            )
        found = check_addresses(addresses, sync_dir=sync_dir)
        rank, size = rank_and_size()
        self.policy_version = policy_version
        self._vocab_size = model.config.vocab_size
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._retries = retries
        self._leads = rank < len(found)  # who shares a server leaves its weights to its leader
        self._loop = Loop(api_key_env=api_key_env)
        mine = found[rank::size] or [found[rank % len(found)]]
        self._servers = [VLLMServer(address, client=self._loop.client) for address in mine]
        self._places: dict[str, VLLMServer] = {}
        self._room = asyncio.Semaphore(max_batch_size)
        self._counts = dict.fromkeys(COUNTS, 0)
        self._run_name = gather(uuid.uuid4().hex[:8])[0]
        self._num_syncs = 0
        self._label = ""
        kind = what_to_send(model, weights)
        self._lora_rank = None
        if kind == "adapter":
            self._lora_rank = max(module.rank for module in adapters(model).values())
        try:
            agree(lambda: self._loop.wait(all_of(map(self._check, self._servers))))
            self._probe = WeightProbe(model, bound=probe_bound, hint=HINTS[kind])
            name = f"{self._run_name}-{rank}"
            self._files = WeightFiles(model, sync_dir=sync_dir, weights=kind, name=name)
            self.sync(policy_version)
        except EngineError as error:
            raise ValueError(str(error)) from error

    async def _check(self, server: VLLMServer) -> None:
        work = check_server(
            server,
            max_tokens=self._max_tokens,
            vocab_size=self._vocab_size,
            lora_rank=self._lora_rank,
        )
        try:
            await asyncio.wait_for(work, self._timeout_s)
        except asyncio.TimeoutError:
            raise EngineError(
                f"{server.address}: its checks did not end within engine.timeout_s = "
                f"{self._timeout_s:g}"
            ) from None

    # ---- weights -----------------------------------------------------------------------------

    def sync(self, policy_version: int) -> dict[str, float]:
        """Send the model's weights to the servers and prove that they use them. Collective.

        Args:
            policy_version: of the weights that the model has now.

        Returns:
            ``sync/*``: the probe, of the worst server; ``engine/*``: what has happened since the
            last sync, over all ranks.

        Raises:
            EngineError: a server does not serve them; nothing was sampled from it.
        """
        self._num_syncs += 1
        self.policy_version = policy_version
        self._label = f"{self._run_name}-{self._num_syncs}-v{policy_version}"
        counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0)
        parts = agree(self._renew_all)
        readings = [reading for part in parts for reading in part]
        if not self._leads:
            for server in self._servers:
                server.adopt(self._files.weights, self._label)
        everyone = gather(counts)
        return {
            "sync/gap": max(reading.gap_mean for reading in readings),
            "sync/gap_max": max(reading.gap_max for reading in readings),
            "sync/change": min(reading.change for reading in readings),
            "sync/trainer_change": max(reading.trainer_change for reading in readings),
            **{name: float(sum(part[name] for part in everyone)) for name in COUNTS},
        }

    def _renew_all(self) -> list[ProbeReading]:
        self._probe.weights_changed()
        if not self._leads:
            return []
        return self._loop.wait(all_of(self._patiently(server) for server in self._servers))

    async def _patiently(self, server: VLLMServer) -> ProbeReading:
        """Renew a server's weights; one that is being started anew has until ``timeout_s``."""
        deadline = time.monotonic() + self._timeout_s
        for attempt, pause in zip(count(), pauses(), strict=False):
            try:
                return await asyncio.wait_for(self._renew(server), deadline - time.monotonic())
            except asyncio.TimeoutError:
                raise EngineError(
                    f"{server.address} has not taken the weights within engine.timeout_s = "
                    f"{self._timeout_s:g}"
                ) from None
            except Unavailable as error:
                over = attempt >= self._retries and not isinstance(error, NoAnswer)
                # At the first one a server that is not there is a mistake in the configuration.
                if self._num_syncs == 1 or over or time.monotonic() + pause > deadline:
                    raise
                _log.warning("sync: %s; trying again", error)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _renew(self, server: VLLMServer) -> ProbeReading:
        """Load the current weights into a server and prove it."""
        label, server.proved = self._label, False
        await server.load(self._files.write(label), self._files.weights, label)
        served, noise = await server.probe(self._probe.sequences, label=label)
        reading = self._probe.check(server.address, served, noise=noise)
        server.label, server.proved, server.failing = label, True, False
        return reading

    # ---- sampling ----------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[SampleRequest], *, feed: Feed | None = None
    ) -> list[SampleResult | SampleFailure]:
        """Sample one turn for each request, and for each that ``feed`` gives, all at once.

        Args:
            requests: at most one per rollout.
            feed: called when turns have ended, and now and then; see ``PolicyEngine``.

        Returns:
            The turns in the order of the requests' numbers; a failure where none could be had.

        Raises:
            ValueError: a request that is malformed or too long. It has not been sent.
            EngineError: a server refuses a request for good, or cannot be given its weights back.
        """
        return self._loop.wait(stream(self._begin, requests, feed=feed))

    def _begin(
        self, requests: Sequence[SampleRequest], pending: Collection[str]
    ) -> list[Coroutine[Any, Any, SampleResult | SampleFailure]]:
        limits = {"max_tokens": self._max_tokens, "vocab_size": self._vocab_size}
        check_turns(requests, pending=pending, **limits)
        for request in requests:
            self._place(request.rollout_id)  # in order: not in that of the answers
        return [self._turn(request) for request in requests]

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Forget where these rollouts were; ids that are not known are passed over."""
        for rollout_id in rollout_ids:
            server = self._places.pop(rollout_id, None)
            if server is not None:
                server.num_rollouts -= 1

    def _place(self, rollout_id: str) -> VLLMServer:
        """The server of a rollout: where it was, or the one with the fewest rollouts."""
        server = self._places.get(rollout_id)
        if server is None:
            server = min(self._servers, key=lambda s: (s.failing, s.num_rollouts))
            server.num_rollouts += 1
            self._places[rollout_id] = server
        return server

    async def _turn(self, request: SampleRequest) -> SampleResult | SampleFailure:
        """One turn, in as many attempts as it needs and may have."""
        async with self._room:
            deadline = time.monotonic() + self._timeout_s
            problem = ""
            for attempt, pause in zip(range(self._retries + 1), pauses(), strict=False):
                server = self._place(request.rollout_id)
                self._counts["engine/retried_turns"] += attempt == 1
                try:
                    work = self._attempt(server, request)
                    return await asyncio.wait_for(work, deadline - time.monotonic())
                except asyncio.TimeoutError:
                    problem = f"no turn from {server.address} in timeout_s={self._timeout_s:g} s"
                except Unavailable as error:
                    problem = str(error)
                server.failing = True
                self.release([request.rollout_id])  # to another server, if there is one
                if attempt == self._retries or time.monotonic() + pause >= deadline:
                    break
                _log.info("rollout %s: %s; trying again", request.rollout_id, problem)
                await asyncio.sleep(pause)
        self._counts["engine/lost_turns"] += 1
        _log.warning("rollout %s is lost: %s", request.rollout_id, problem)
        return SampleFailure(error=f"the policy engine: {problem}")

    async def _attempt(self, server: VLLMServer, request: SampleRequest) -> SampleResult:
        if server.label != self._label:
            async with server.renewing:
                await self._renew_if_lost(server)
        try:
            result = await server.sample(
                request,
                max_new_tokens=min(request.max_new_tokens, self._max_tokens - len(request.context)),
                label=self._label,
                policy_version=self.policy_version,
            )
        except (NoAnswer, NotServed):
            server.label = ""  # it may have been started anew
            raise
        server.failing = False
        return result

    async def _renew_if_lost(self, server: VLLMServer) -> None:
        if server.proved and await server.weight_version() == self._label:
            server.label = self._label  # it was only out of reach, or has been renewed since
            return
        await self._renew(server)
        self._counts["engine/renewed_servers"] += 1
        _log.warning("%s had lost its weights and has them again", server.address)
