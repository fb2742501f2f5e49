"""A discrete-event model of rollouts on servers apart, for ``simulate_scale.py``.

Each rollout goes on by itself (``components/rollout/stream.py``): when its turn has ended its
environment answers, and its next turn goes to its server at once, whatever the others do. A server
takes the new tokens of the requests that wait, then makes one token for each live request per
step; what arrives meanwhile joins at the next step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a recorded rollout."""

    new_tokens: int
    """Tokens that the engine has not seen: the prompt's own part, or the last sampled token and the
    observation."""
    sampled_tokens: int
    env_s: float
    """Seconds of the environment before this turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A recorded rollout."""

    turns: tuple[Turn, ...]
    end_s: float = 0.0
    """Seconds of the environment after the last turn."""
    trained_tokens: float
    """Tokens that its training computes; 0 if its group carried no signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds, measured. Of one server, of one trainer rank, or of the whole step."""

    prefill_token_s: float
    decode_step_s: float
    """One token for every live request."""
    decode_token_s: float = 0.0
    """More for each live request in a step."""
    shared_tokens: int = 0
    """Of the prompt that all rollouts share: computed once by each server for each batch."""
    update_fixed_s: float = 0.0
    update_token_s: float = 0.0
    forward_token_s: float = 0.0
    """More for each token of a batch that is not of the current weights; see ``PolicyUpdate``."""
    sync_s: float = 0.0
    other_s: float = 0.0
    """Of a step, outside of rollouts, update and sync, while rollouts may go on."""


@dataclass(slots=True, kw_only=True)
class _Request:
    prefill: int
    remaining: int
    done: Callable[[], None]


class _Clock:
    """Events in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ties), call))

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass(slots=True, kw_only=True, eq=False)
class _Server:
    clock: _Clock
    costs: Costs
    busy_s: float = 0.0
    num_rollouts: int = 0
    prefilled: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    _waiting: deque[_Request] = field(default_factory=deque)
    _live: list[_Request] = field(default_factory=list)
    _plan: int = 0
    """Number of the event that counts; an arrival makes another plan."""
    _began: float | None = None
    """Of the decode steps under way; None while idle or at new tokens."""
    _idle: bool = True
    _warm: bool = False

    def submit(self, request: _Request) -> None:
        if not self._warm:
            request.prefill += self.costs.shared_tokens
            self._warm = True
        self._waiting.append(request)
        if self._idle:
            self._next()
        elif self._began is not None:  # join after the step that is under way
            elapsed, steps = self.clock.now - self._began, 1
            if elapsed:  # a step that takes no time has taken none
                steps = ceil(elapsed / self._step_s() - 1e-9) or 1
            self._schedule_decode(min(steps, min(r.remaining for r in self._live)), self._began)

    def _step_s(self) -> float:
        return self.costs.decode_step_s + self.costs.decode_token_s * len(self._live)

    def _next(self) -> None:
        self._idle, self._began = False, None
        if self._waiting:
            batch, self._waiting = list(self._waiting), deque()
            seconds = self.costs.prefill_token_s * sum(r.prefill for r in batch)
            self.prefilled += sum(r.prefill for r in batch)
            self._at(self.clock.now + seconds, seconds, lambda: self._advance(batch, 1))
        elif self._live:
            self._schedule_decode(min(r.remaining for r in self._live), self.clock.now)
        else:
            self._idle = True

    def _schedule_decode(self, steps: int, began: float) -> None:
        self._began, live = began, self._live
        seconds = steps * self._step_s()

        def done() -> None:
            self.decode_steps += steps
            self.decode_tokens += steps * len(live)
            self._live = []
            self._advance(live, steps)

        self._at(began + seconds, seconds, done)

    def _at(self, time: float, seconds: float, call: Callable[[], None]) -> None:
        self._plan += 1
        plan = self._plan

        def run() -> None:
            if plan == self._plan:
                self.busy_s += seconds
                call()

        self.clock.at(max(time, self.clock.now), run)

    def _advance(self, requests: Sequence[_Request], tokens: int) -> None:
        finished = []
        for request in requests:
            request.remaining -= tokens
            (finished if request.remaining <= 0 else self._live).append(request)
        self._idle, self._began = True, None
        for request in finished:
            self.clock.at(self.clock.now, request.done)
        self._next()


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A batch that was played."""

    seconds: float
    server_busy_s: float
    """Mean over the servers."""
    env_s: float
    """Seconds in which nothing was sampled for a rank: environments were waited for. Mean over the
    ranks."""
    tail_s: float
    """Seconds in which a rank's last quarter of rollouts was alive, mean over the ranks."""
    prefill_tokens: int
    decode_steps: int
    decode_tokens: int


class _Pool:
    """One rank's rollouts, of which none waits for another."""

    def __init__(
        self,
        clock: _Clock,
        episodes: Sequence[Episode],
        servers: Sequence[_Server],
        *,
        workers: int,
    ) -> None:
        self.clock, self.servers = clock, servers
        self.waiting = deque(episode for episode in episodes if episode.turns)
        self.left = self.num = len(self.waiting)
        self.env_s = self.end = 0.0
        self.quarter: float | None = None
        self.num_sampling = 0
        """Rollouts with a request at a server."""
        self._since = 0.0
        """When a turn has ended last: with none under way, environments alone are waited for."""
        for _ in range(workers):
            self._begin()

    def _begin(self) -> None:
        """A worker takes the next rollout."""
        if not self.waiting:
            return
        episode = self.waiting.popleft()

        def reset() -> None:
            server = min(self.servers, key=lambda s: s.num_rollouts)
            server.num_rollouts += 1
            self._sample(episode, 0, server)

        self.clock.at(self.clock.now + episode.turns[0].env_s, reset)

    def _sample(self, episode: Episode, turn: int, server: _Server) -> None:
        if self.num_sampling == 0:
            self.env_s += self.clock.now - self._since
        self.num_sampling += 1
        now, is_last = episode.turns[turn], turn + 1 == len(episode.turns)

        def sampled() -> None:
            self.num_sampling -= 1
            self._since = self.clock.now
            env_s = episode.end_s if is_last else episode.turns[turn + 1].env_s
            self.clock.at(self.clock.now + env_s, answered)

        def answered() -> None:
            if is_last:
                self._end(server)
            else:
                self._sample(episode, turn + 1, server)

        server.submit(_Request(prefill=now.new_tokens, remaining=now.sampled_tokens, done=sampled))

    def _end(self, server: _Server) -> None:
        server.num_rollouts -= 1
        self.left -= 1
        if self.quarter is None and self.left <= self.num / 4:
            self.quarter = self.clock.now
        self._begin()
        if self.left == 0:
            self.end = self.clock.now
            self.env_s += self.end - self._since


def play_apart(
    episodes: Sequence[Sequence[Episode]], costs: Costs, *, servers: int, workers: int
) -> Played:
    """Play a batch on servers.

    Args:
        episodes: of each rank.
        costs: measured seconds.
        servers: how many; rank r of n has those of number r, r + n... or shares one.
        workers: rollouts alive at once on each rank.
    """
    clock = _Clock()
    everyone = [_Server(clock=clock, costs=costs) for _ in range(servers)]
    ranks = len(episodes)
    pools = [
        _Pool(clock, part, everyone[r::ranks] or [everyone[r % servers]], workers=workers)
        for r, part in enumerate(episodes)
    ]
    clock.run()
    return Played(
        seconds=max(pool.end for pool in pools),
        server_busy_s=sum(s.busy_s for s in everyone) / servers,
        env_s=sum(pool.env_s for pool in pools) / ranks,
        tail_s=sum(pool.end - (pool.quarter or 0.0) for pool in pools) / ranks,
        prefill_tokens=sum(s.prefilled for s in everyone),
        decode_steps=sum(s.decode_steps for s in everyone),
        decode_tokens=sum(s.decode_tokens for s in everyone),
    )
