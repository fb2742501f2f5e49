"""One worker's place in the pool: starts its process, talks to it, replaces it when it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, Literal

from components.rollout.lifeline import end_group
from components.rollout.worker import MEMORY_EXIT, start_process

_log = logging.getLogger(__name__)

_TICK_S = 1.0
"""Longest wait at a time. One that ends later than it should by more than that means that this
process was stopped (a suspended job, say), and its workers with it: that time is not theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Stands in the place of an answer that a worker could not give."""

    status: Literal["error_infra", "error_deadline"]
    error: str


class WorkerRefused(ValueError):
    """A mistake in the configuration that only a worker could find."""


class Slot:
    """A worker process, or the place of one.

    Args:
        context: multiprocessing's forkserver context.
        pickled: what the worker is made of, see ``worker.serve``.
        preload: entries for the forkserver.
        start_timeout_s: seconds until a new worker must be ready.
    """

    def __init__(
        self,
        context: ForkServerContext,
        pickled: bytes,
        *,
        preload: tuple[str, ...],
        start_timeout_s: float,
    ) -> None:
        self._context = context
        self._pickled = pickled
        self._preload = preload
        self._start_timeout_s = start_timeout_s
        self._process: Any = None
        self._connection: Connection | None = None
        self._ready = False
        self._reply: Any = None
        self._deadline = 0.0
        self._looked = 0.0
        self._timeout_s = 0.0
        self.idle = True
        """No episode or call is under way."""
        self.answered = False
        """An answer waits in ``take_reply``."""

    def start(self) -> None:
        """Start the process; it gets ready while the caller goes on."""
        self._process, self._connection = start_process(self._context, self._pickled, self._preload)
        self._ready = False

    def send(self, order: tuple[Any, ...], *, timeout_s: float) -> None:
        """Send an order, to a new process where the old one is gone.

        Raises:
            WorkerRefused: its configuration is wrong.
            RuntimeError: the worker could not be started.
        """
        if self.idle:
            self._make_ready()
        assert self._connection is not None
        self.idle = False
        self.answered = False
        self._timeout_s = timeout_s
        self._looked = time.monotonic()
        self._deadline = self._looked + timeout_s
        try:
            self._connection.send(order)
        except OSError:
            self._lost()

    def is_ready(self) -> bool:
        """Whether an order can be sent without waiting for a process to start."""
        if not self._is_alive():
            return False
        return self._ready or (self._connection is not None and self._connection.poll(0))

    def revive(self) -> None:
        """Start the next process where an idle worker has died; it gets ready meanwhile.

        One that has never been ready is left to ``send``, which tells why.
        """
        if self._ready and not self._is_alive():
            self.kill()
            self.start()

    def take_reply(self) -> Any:
        """The answer, once: a value, or a :class:`Failure`."""
        assert self.answered
        self.answered = False
        reply, self._reply = self._reply, None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def kill(self, *, grace_s: float = 0.0) -> int | None:
        """End the process at once, or after a while in which it may end itself; its exit code.

        Whatever its tools have started ends with it.
        """
        process, self._process = self._process, None
        self.idle = True
        self.answered = False
        self.hang_up()
        if process is None:
            return None
        if grace_s > 0:
            process.join(grace_s)
        if process.is_alive():
            process.kill()
        process.join(10.0)
        code = process.exitcode
        if code is not None:
            # The forkserver tells the exit code first and closes its end of this pipe then: only
            # after that is nothing of the worker left there.
            wait([process.sentinel], 10.0)
            end_group(process.pid)
            process.close()
        return code

    def hang_up(self) -> None:
        """Close the pipe: an idle worker then ends itself."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def _make_ready(self) -> None:
        if not self._is_alive():
            self.kill()
            self.start()
        if self._ready:
            return
        assert self._connection is not None
        if not self._connection.poll(self._start_timeout_s):
            self.kill()
            raise RuntimeError(
                f"a worker was not ready within start_timeout_s={self._start_timeout_s}"
            )
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            kind, value = "failed", f"it ended with exit code {self.kill()}"
        if kind == "ready":
            self._ready = True
            if value:
                _log.info("the forkserver has not preloaded %s; workers do it", ", ".join(value))
            return
        self.kill()
        if kind == "refused":
            raise WorkerRefused(value)
        raise RuntimeError(f"worker start: {value}")

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            self._lost()
            return
        self.idle = kind != "request"
        self.answered = True
        if kind == "failed":
            self._reply = Failure(status="error_infra", error=value)
        elif kind == "refused":
            self._reply = WorkerRefused(value)
        else:
            self._reply = value

    def _lost(self) -> None:
        code = self._replace()
        why = ": it used up worker_memory_mib" if code == MEMORY_EXIT else ""
        self._reply = Failure(status="error_infra", error=f"the worker died, exit code {code}{why}")

    def _expire(self) -> None:
        self._replace()
        self._reply = Failure(
            status="error_deadline", error=f"no answer within {self._timeout_s} s"
        )

    def _replace(self) -> int | None:
        """End the process and start the next, which gets ready meanwhile; the exit code."""
        code = self.kill()
        self.start()
        self.answered = True
        return code

    @staticmethod
    def gather(
        slots: Iterable[Slot],
        *,
        first_only: bool = False,
        patient: bool = True,
        others: Iterable[Slot] = (),
        until_ready: Collection[Slot] = (),
        on_tick: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until every slot (or at least one) has answered, or run past its deadline.

        Args:
            slots: to which something was sent.
            first_only: one answer is enough.
            patient: False to take what is there, and to end those past their deadline.
            others: likewise, but nobody waits for their answers: they are only looked at.
            until_ready: idle ones whose processes start; one that is ready ends the waiting, too.
            on_tick: called now and then while nothing comes; what it raises ends the waiting.
        """
        awaited = list(slots)
        slots = [*awaited, *others]
        now = time.monotonic()
        for slot in slots:
            # Nobody looked: it may be that this process was stopped then.
            slot._forgive(now - slot._looked)
            slot._looked = now
        while True:
            missing = sum(not slot.answered for slot in awaited)
            if patient and (not missing or (first_only and missing < len(awaited))):
                return
            if any(slot.is_ready() for slot in until_ready):
                return
            pending = {slot._connection: slot for slot in slots if not slot.answered}
            if not pending:
                return
            start = time.monotonic()
            left = min(slot._deadline for slot in pending.values()) - start
            patience = min(max(0.0, left), _TICK_S) if patient else 0.0
            starting = [slot._connection for slot in until_ready if slot._is_alive()]
            came = wait([*pending, *starting], patience)  # type: ignore[list-item]
            for connection in came:
                if connection in pending:
                    pending.pop(connection)._receive()  # type: ignore[arg-type]
            now = time.monotonic()
            for slot in pending.values():
                slot._looked = now
                if not slot._forgive(now - start - patience) and now >= slot._deadline:
                    slot._expire()
            if not patient:
                return
            if not came:
                on_tick()

    def _forgive(self, late_s: float) -> bool:
        """Move the deadline by time that is not the worker's; little of it does not count."""
        if late_s > _TICK_S:
            self._deadline += late_s
        return late_s > _TICK_S
