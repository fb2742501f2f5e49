"""The batches of rollouts that the steps train on: played when due, or ahead of time.

With ``max_staleness`` 0 a batch is played when its step begins, by the current weights. With k >= 1
a thread plays the next batches while the trainer works. Batch n, trained by step n, is begun with
weights of version w (steps they have had) only if n - 1 - w <= k. The engine takes new weights
between batches only, so all tokens of a batch have one version. With k = 1 every batch after the
first is one step old, whoever is quick: a run can be repeated. With more, who is quick decides.

The thread makes no collectives: with several ranks each has its own, which plays that rank's share
of the tasks in the common order, and the trainers agree before they wait. What is in flight when a
run ends is dropped. The state of the loader that a checkpoint holds is the one after the batch of
the last finished step, so a resumed run draws those tasks again: none is lost, none trained twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

import torch

from components.envs.base import Task
from components.rollout.types import Rollout
from components.training.batch import Batch, BatchSettings, batch_settings_from
from components.training.metrics import Timer
from components.training.parallelize import World, own_stream
from components.training.refill import play_groups
from components.training.stop import StopRequested, StopSignal
from components.training.update_checks import refills_ahead

__all__ = ["Apart", "Batch", "BatchSettings", "Batches", "batch_settings_from"]

logger = logging.getLogger(__name__)

POLL_S = 0.1

Apart = Callable[[], AbstractContextManager[Callable[[], None]]]
"""A context for work in the thread. It yields what is to be called at safe points, which raises to
end the work. In the trainer's thread it is ``StopSignal.apart``, which is collective."""


class Batches:
    """Gives each step its batch. Its methods are called on every rank, by one thread.

    Args:
        loader: of tasks, the same on every rank; yields lists.
        play: ``play(tasks, first_group, group_size=..., phase=..., temperature=..., apart=...)``
            gives this rank's rollouts of these tasks. ``apart`` is None in the trainer's thread;
            in the other one there must be no collective.
        sync: gives the engine the current weights, and returns metrics. Collective. It is called
            only while nothing is sampled.
        settings: how many, how old.
        step: number of finished steps; the engine has those weights.
        stop: ends the work.
        world: this process among its peers.

    Raises:
        ValueError: refills with several ranks and ``max_staleness`` above 0.
    """

    def __init__(
        self,
        loader: Any,
        *,
        play: Callable[..., list[Rollout]],
        sync: Callable[[], Mapping[str, float] | None],
        settings: BatchSettings,
        step: int,
        stop: StopSignal,
        world: World,
    ) -> None:
        self._max_staleness = settings.max_staleness
        problem = refills_ahead(
            settings.max_refills, ranks=world.size, max_staleness=self._max_staleness
        )
        if problem is not None:
            raise ValueError(problem)
        tasks: Iterator[Task] = chain.from_iterable(loader)
        self.loader_state: dict[str, Any] = loader.state_dict()
        """Once the tasks of the last finished step were drawn."""
        self._tasks, self._loader = tasks, loader
        self._play, self._sync, self._settings = play, sync, settings
        self._stop, self._world = stop, world
        self._step = self._engine_version = step
        self._taken: Batch | None = None
        self._sync_metrics: dict[str, float] = {}
        # What follows is shared with the thread, under the lock of ``_changed``.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._held = True
        """No batch is begun."""
        self._next = step + 1
        self._order: int | None = None
        """Number of the batch that is being played, or is about to be."""
        self._done: dict[int, Batch] = {}
        self._error: BaseException | None = None

    def take(self, timer: Timer) -> Batch:
        """The batch of the next step. Collective.

        Args:
            timer: of the step: the wait is its ``rollout``, and a sync on the way its ``sync``.

        Raises:
            StopRequested: on all ranks, if one was asked to stop.
            Exception: what playing it raised.
        """
        number = self._step + 1
        if self._max_staleness == 0:
            with timer("rollout"):
                self._taken = self._batch(number, apart=None)
            return self._taken
        if not self._can_go_on(number):
            self.settle(timer)
        with timer("rollout"), self._stop.apart(self._world) as check, self._changed:
            self._held = False
            self._give_order()
            self._start()
            self._wait(lambda: number in self._done, check)
            self._taken = self._done.pop(number)
        assert self._taken is not None
        assert self._step - self._taken.policy_version <= self._max_staleness
        return self._taken

    @property
    def versions(self) -> tuple[int, int]:
        """Of the policy that sampled the batch that was taken, and of the one that trains on it."""
        assert self._taken is not None
        return self._taken.policy_version, self._step

    def finish(self, step: int, timer: Timer) -> dict[str, float]:
        """The weights are now those after ``step``, which has trained the batch taken. Collective.

        Returns:
            Metrics of the engine's last sync: with ``max_staleness`` 0 it has the new weights when
            this returns, otherwise it gets them when it has finished the batch under way.
        """
        assert self._taken is not None
        self._step, self.loader_state, self._taken = step, self._taken.loader_state, None
        if self._max_staleness == 0:
            with timer("sync"):
                self._renew()
        found, self._sync_metrics = self._sync_metrics, {}
        return found

    def settle(self, timer: Timer | None = None) -> None:
        """Until the next ``take`` nothing is sampled, and the engine has the current weights: what
        an evaluation needs, and a checkpoint that is written from the engine's copy. Collective.

        Raises:
            StopRequested: on all ranks, if one was asked to stop.
            Exception: what playing a batch raised.
        """
        timer = timer or Timer()
        if self._max_staleness > 0 and not self._closed:
            with timer("rollout"), self._stop.apart(self._world) as check, self._changed:
                self._held = True
                self._wait(lambda: self._order is None and self._error is None, check)
        if self._engine_version != self._step:
            with timer("sync"):
                self._renew()

    def close(self) -> None:
        """Stop the thread at its next safe point and wait for it; what is in flight is dropped."""
        with self._changed:
            self._closed, thread, self._thread = True, self._thread, None
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None and not isinstance(error, StopRequested):
            logger.error("the batch in flight had failed: %r", error)

    # ---- in the trainer's thread -------------------------------------------------------------

    def _renew(self) -> None:
        self._sync_metrics = dict(self._sync() or {})
        if self._world.device.type == "cuda" and self._max_staleness > 0:
            torch.cuda.synchronize(self._world.device)  # the thread has another stream
        self._engine_version = self._step

    def _can_go_on(self, number: int) -> bool:
        """Whether the batch is there and the next is being played, on every rank: then nobody has
        to wait, and the engine gets its weights another time. Collective, but for k = 1."""
        if self._max_staleness == 1:
            return False  # the next batch may not begin before the sync
        with self._changed:
            here = number in self._done and self._order is not None and self._error is None
        return self._world.max([float(not here)])[0] == 0.0

    def _wait(self, condition: Callable[[], bool], check: Callable[[], None]) -> None:
        """Wait with the lock held until it is so; an error of the thread is raised."""
        while not condition():
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._changed.wait(POLL_S)
            check()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()

    # ---- in either ---------------------------------------------------------------------------

    def _give_order(self) -> None:
        """Have the next batch played if it is allowed. With the lock held."""
        fresh = self._next - 1 - self._engine_version <= self._max_staleness
        wanted = fresh and self._next <= self._settings.num_steps
        if wanted and self._order is None and not self._held:
            self._order = self._next
            self._next += 1
            self._changed.notify_all()

    def _batch(self, number: int, *, apart: Apart | None) -> Batch:
        start, settings = time.perf_counter(), self._settings
        rollouts, metrics = play_groups(
            lambda num: list(islice(self._tasks, num)),
            partial(
                self._play,
                group_size=settings.group_size,
                phase=f"train/{number}",
                temperature=settings.temperature,
                apart=apart,
            ),
            num_groups=settings.num_groups,
            max_refills=settings.max_refills,
            world=self._world,
        )
        return Batch(
            rollouts=rollouts,
            metrics=metrics,
            policy_version=self._engine_version,
            loader_state=self._loader.state_dict(),
            seconds=time.perf_counter() - start,
        )

    # ---- in the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with own_stream(self._world.device):
                while (number := self._await_order()) is not None:
                    batch = self._batch(number, apart=lambda: nullcontext(self._check))
                    with self._changed:
                        self._done[number], self._order = batch, None
                        self._give_order()
                        self._changed.notify_all()
        except BaseException as error:  # raised where the batch is waited for
            with self._changed:
                self._error, self._order = error, None
                self._changed.notify_all()

    def _await_order(self) -> int | None:
        """Number of the batch to play; None: there is to be no other."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._order is not None)
            return None if self._closed else self._order

    def _check(self) -> None:
        self._stop.check()
        if self._closed:
            raise StopRequested
