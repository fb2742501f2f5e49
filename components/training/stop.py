"""A clean stop on Ctrl-C or SIGTERM: between units of work, never inside an optimizer step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from components.training.parallelize import World


class StopRequested(Exception):
    """Raised at a safe point after a stop was asked for."""


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a flag; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Take over SIGINT and SIGTERM of this process (main thread only)."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def check(self) -> None:
        """Raise :class:`StopRequested` if this process was asked to stop."""
        if self.requested:
            raise StopRequested

    def check_together(self, world: World) -> None:
        """Raise on all ranks if any of them was asked to stop: all leave, or none. Collective."""
        if world.max([float(self.requested)])[0]:
            raise StopRequested

    @contextmanager
    def apart(self, world: World) -> Iterator[Callable[[], None]]:
        """Work that each rank does by itself, for as long as its share takes.

        Yields ``check``, to be called at safe points: it ends this rank's work early. At the end
        all ranks leave together with :class:`StopRequested`, or all go on. Collective.
        """
        with suppress(StopRequested):
            yield self.check
        self.check_together(world)
