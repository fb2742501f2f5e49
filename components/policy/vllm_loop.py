"""Many HTTP requests at once from plain functions, and what ranks agree on."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from components.policy.engine import EngineError, Feed
from components.rollout.types import SampleFailure, SampleRequest, SampleResult

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
LOOK_S = 0.02
"""Between two looks at the environments, where no turn ends before."""


class Loop:
    """An event loop of its own and a client in it, which keeps connections between calls.

    Args:
        api_key_env: the environment variable with the servers' key; None: they want none.

    Raises:
        ValueError: there is no such variable.
    """

    def __init__(self, *, api_key_env: str | None) -> None:
        self._loop = asyncio.new_event_loop()
        self.client = _client(api_key_env)
        weakref.finalize(self, _close, self._loop, self.client)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to its end; what interrupts it (a second Ctrl-C) ends all that it has begun."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
            raise


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first error ends the others."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def stream(
    begin: Callable[
        [Sequence[SampleRequest], set[str]],
        Iterable[Coroutine[Any, Any, SampleResult | SampleFailure]],
    ],
    requests: Sequence[SampleRequest],
    *,
    feed: Feed | None,
) -> list[SampleResult | SampleFailure]:
    """All turns of a call, each begun as soon as its request is there.

    Args:
        begin: checks requests, given the rollouts under way, and makes their turns.
        requests: those that are there at the start.
        feed: gives further ones. It runs here, so no other thread of it does; what comes back
            meanwhile waits in its connection.

    Returns:
        The turns in the order of the requests' numbers; the first error ends all.
    """
    results: dict[int, SampleResult | SampleFailure] = {}
    live: dict[asyncio.Task[SampleResult | SampleFailure], tuple[int, str]] = {}
    num_requests = 0
    try:
        while requests or live:
            turns = begin(requests, {name for _, name in live.values()})
            for request, turn in zip(requests, turns, strict=True):
                live[asyncio.ensure_future(turn)] = (num_requests, request.rollout_id)
                num_requests += 1
            patience = None if feed is None else LOOK_S
            ended, _ = await asyncio.wait(
                live, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            done = {live.pop(task)[0]: task.result() for task in ended}
            results |= done
            requests = () if feed is None else feed(sorted(done.items()))
    except BaseException:
        for task in live:
            task.cancel()
        await asyncio.gather(*live, return_exceptions=True)
        raise
    return [results[number] for number in range(num_requests)]


def pauses() -> Iterator[float]:
    """Seconds before each further attempt, without end."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_S)


def rank_and_size() -> tuple[int, int]:
    """This process among its peers."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. Collective."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def agree(work: Callable[[], T]) -> list[T]:
    """Every rank's result of its own work. Collective: all ranks go on, or none.

    Raises:
        EngineError: what any rank's work raised.
    """
    result, problem = None, ""
    try:
        result = work()
    except EngineError as error:
        if rank_and_size()[1] == 1:
            raise
        problem = str(error)
    everyone = gather((result, problem))
    problems = [problem for _, problem in everyone if problem]
    if problems:
        raise EngineError("; ".join(problems))
    return [result for result, _ in everyone]  # type: ignore[misc]


def _client(api_key_env: str | None) -> httpx.AsyncClient:
    import httpx

    headers = {}
    if api_key_env is not None:
        if not os.environ.get(api_key_env):
            raise ValueError(f"engine.api_key_env: there is no {api_key_env} in the environment")
        headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
    return httpx.AsyncClient(
        headers=headers,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # callers have their own deadlines
        limits=httpx.Limits(max_connections=None),
        trust_env=False,  # no proxy: servers are on this machine or its network
    )


def _close(loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> None:
    if asyncio._get_running_loop() is None:  # called from wherever garbage is collected
        loop.run_until_complete(client.aclose())
        loop.close()
