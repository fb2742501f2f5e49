"""A clean stop on Ctrl-C or SIGTERM: between units of work, never inside an optimizer step."""

from __future__ import annotations

import signal
from types import FrameType


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
        """Raise :class:`StopRequested` if a stop was asked for. Call it at safe points."""
        if self.requested:
            raise StopRequested
