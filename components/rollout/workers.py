"""A pool of worker processes that play episodes against one policy engine.

Each worker plays one rollout at a time. A turn that has been sampled goes to its worker at once and
the worker's next request joins the engine's batch, whatever the others do; a rollout that has ended
frees its worker for the next spec. All that is in logical time (``components/rollout/stream.py``):
which requests share a batch depends on the specs and the tokens alone, never on who was quick;
except with an engine that is not ``clocked``, which waits for nobody.

Workers come from a forkserver that has imported ``preload`` and never torch: forking a process in
which torch or gloo threads run is unsafe, and spawning imports tau2 anew each time (4-20 s).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from components.chat.base import Renderer
from components.envs.base import Env
from components.policy.engine import PolicyEngine
from components.rollout.agent_loop import Limits, prompt_tokens
from components.rollout.slot import Failure, Slot, WorkerRefused
from components.rollout.stream import Stream
from components.rollout.types import Rollout, RolloutSpec

__all__ = ["Failure", "WorkerPool", "WorkerRefused", "worker_pool"]


class WorkerPool:
    """Worker processes with an environment and a renderer each.

    Args:
        make_env: makes a worker's environment; picklable, from an importable module.
        make_renderer: makes a worker's renderer; likewise.
        limits: of every episode.
        temperature: of the sampling, where ``run`` is given no other.
        num_workers: how many rollouts are live at once.
        env_timeout_s: seconds a worker may take to answer (a reset, or one step with its user and,
            at the end, its scoring). One that takes longer is killed and replaced; its rollout
            becomes ``error_deadline`` and the others go on.
        start_timeout_s: seconds a new worker may take to import and build its environment.
        preload: what the forkserver prepares once for all workers, see ``rollout/preload.py``.
        worker_memory_mib: most MiB of address space that a worker may add to what it has when it
            starts (Linux). Allocations beyond fail; a worker that comes within a tenth of it ends
            and is replaced, and its rollout becomes ``error_infra``. No limit if None.
        reply_delay: steps of the engine from the end of a turn until its worker's answer is waited
            for. 0: at once, and the others wait with it. Where environments are slow, some steps
            let the engine go on meanwhile, and the answer enters then, early as it may have come.
            Of no effect with an engine that is not ``clocked``.

    Raises:
        ValueError: a setting out of range, or a callable that lives in ``__main__``.
    """

    def __init__(
        self,
        *,
        make_env: Callable[[], Env],
        make_renderer: Callable[[], Renderer],
        limits: Limits,
        temperature: float,
        num_workers: int,
        env_timeout_s: float,
        start_timeout_s: float = 300.0,
        preload: tuple[str, ...] = (),
        worker_memory_mib: int | None = None,
        reply_delay: int = 0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: must be at least 1")
        for name, value in (("env_timeout_s", env_timeout_s), ("start_timeout_s", start_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name}={value}: must be above 0")
        if worker_memory_mib is not None and worker_memory_mib < 1:
            raise ValueError(f"worker_memory_mib={worker_memory_mib}: must be at least 1, or None")
        if reply_delay < 0:
            raise ValueError(f"reply_delay={reply_delay}: must be 0 or more")
        _check_temperature(temperature)
        pickled = pickle.dumps((make_env, make_renderer, limits, worker_memory_mib))
        if b"__main__" in pickled:
            raise ValueError("make_env, make_renderer: not importable, they live in __main__")
        self.env_timeout_s = env_timeout_s
        self.reply_delay = reply_delay
        self.limits = limits
        self.temperature = temperature
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["components.rollout.worker", "components.rollout.preload"])
        self._slots = [
            Slot(context, pickled, preload=preload, start_timeout_s=start_timeout_s)
            for _ in range(num_workers)
        ]
        for slot in self._slots:
            slot.start()

    def run(
        self,
        specs: Sequence[RolloutSpec],
        engine: PolicyEngine,
        *,
        temperature: float | None = None,
        on_done: Callable[[Rollout], object] | None = None,
        on_round: Callable[[], None] | None = None,
    ) -> list[Rollout]:
        """Play one episode for each spec.

        Args:
            specs: orders; their ``rollout_id`` must differ.
            engine: samples the turns; told to release each rollout that has ended.
            temperature: of the sampling; the pool's own if None.
            on_done: called with each finished rollout, in a deterministic order if the engine is
                ``clocked``.
            on_round: called before anything is sampled and after each step of the engine; what it
                raises ends the run.

        Returns:
            One rollout for each spec, in the order of ``specs``.

        Raises:
            ValueError: duplicate ids.
            WorkerRefused: a mistake in the configuration that a worker found.
        """
        ids = [spec.rollout_id for spec in specs]
        if len(set(ids)) != len(ids):
            raise ValueError("specs: every rollout_id must be unique within a run")
        temperature = self.temperature if temperature is None else temperature
        _check_temperature(temperature)
        orders = [("episode", spec, temperature) for spec in specs]
        with self._busy():
            try:
                return Stream(
                    orders,
                    self._slots,
                    engine,
                    timeout_s=self.env_timeout_s,
                    reply_delay=self.reply_delay,
                    on_done=on_done or _ignore,
                    on_round=on_round or _ignore,
                ).play()
            except BaseException:
                engine.release(ids)
                raise

    def check_prompts(
        self, specs: Sequence[RolloutSpec], *, on_round: Callable[[], None] | None = None
    ) -> None:
        """Render the prompt of each spec, before anything else is paid for.

        Args:
            specs: orders.
            on_round: see ``run_local``.

        Raises:
            WorkerRefused: a prompt and one full turn exceed ``max_tokens``, or the environment
                does not have the task.
        """
        items = [(spec, self.limits) for spec in specs]
        self.run_local(prompt_tokens, items, on_round=on_round)

    def run_local(
        self,
        fn: Callable[[Env, Renderer, Any], Any],
        items: Iterable[Any],
        *,
        timeout_s: float | None = None,
        on_round: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run ``fn(env, renderer, item)`` in the workers, for work that needs no engine.

        Args:
            fn: picklable, from an importable module.
            items: picklable, one for each call.
            timeout_s: of one call; ``env_timeout_s`` if None.
            on_round: called each time that results have arrived; what it raises ends the work.

        Returns:
            Results in the order of ``items``; a :class:`Failure` where a call raised, ran past its
            time or lost its worker.
        """
        timeout_s = self.env_timeout_s if timeout_s is None else timeout_s
        results: dict[int, Any] = {}
        waiting = deque(enumerate(items))
        total = len(waiting)
        free = deque(self._slots)
        live: dict[int, Slot] = {}
        with self._busy():
            while waiting or live:
                while waiting and free:
                    index, item = waiting.popleft()
                    live[index] = slot = free.popleft()
                    slot.send(("call", fn, item), timeout_s=timeout_s)
                Slot.gather(live.values(), first_only=True)
                (on_round or _ignore)()
                for index in [i for i, slot in live.items() if slot.answered]:
                    results[index] = live[index].take_reply()
                    free.append(live.pop(index))
        return [results[index] for index in range(total)]

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Whatever interrupts the work (Ctrl-C, say) leaves no half-played episode."""
        try:
            yield
        except BaseException:
            for slot in self._slots:
                if not slot.idle:
                    slot.kill()
            raise

    def close(self) -> None:
        """End every worker: idle ones by closing their pipe, the others by a signal."""
        for slot in self._slots:
            slot.hang_up()
        deadline = time.monotonic() + 2.0
        for slot in self._slots:
            slot.kill(grace_s=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_temperature(temperature: float) -> None:
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature}: must be 0 or more")


def _ignore(*_: object) -> None:
    pass


def worker_pool(
    *,
    make_env: Callable[[], Env],
    make_renderer: Callable[[], Renderer],
    max_turns: int,
    max_turn_tokens: int,
    max_tokens: int,
    max_refused: int,
    **settings: Any,
) -> WorkerPool:
    """A pool from the flat settings of a config; ``settings`` are those of :class:`WorkerPool`."""
    limits = Limits(
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        max_tokens=max_tokens,
        max_refused=max_refused,
    )
    settings["preload"] = tuple(settings.get("preload", ()))
    return WorkerPool(make_env=make_env, make_renderer=make_renderer, limits=limits, **settings)
