"""A worker and the processes that its tools start: they end together, and with the pool's process.

A worker leads a process group of its own. ``end_group`` ends what is left of the group when the
worker is gone. ``hold`` sees to it that all of it ends when the pool's process does, in whatever
way: no cleanup runs there after a SIGKILL. Beyond reach is only what a tool has put in a group of
its own (``start_new_session=True``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from multiprocessing.connection import wait


def hold(sentinel: int) -> None:
    """Lead a new group, which is killed when the process at the other end of the pipe is gone.

    On Linux the kernel does it: the closing of a pipe's last writer is an event of the kind that
    ``fcntl(2)`` (O_ASYNC, F_SETSIG, F_SETOWN) turns into a signal of our choice, for a whole group.
    So it comes through even where a regular expression holds the interpreter's lock for ever, to
    which a thread that waits falls victim; there is one only where there is no F_SETSIG.

    Args:
        sentinel: reading end of a pipe whose writing end that process alone has open,
            e.g. ``multiprocessing.parent_process().sentinel``.
    """
    os.setpgid(0, 0)  # Ctrl-C and Ctrl-Z at a terminal go to the pool's process alone
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
        if wait([sentinel], timeout=0):  # it ended before we asked for the signal
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=follow, args=(sentinel,), daemon=True).start()


def follow(sentinel: int) -> None:
    """Wait for the end of the pipe, and kill our group."""
    wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def end_group(leader: int) -> None:
    """Kill what a process has left behind in its group.

    Args:
        leader: its pid; it has ended, and has been waited for.
    """
    # No new process is given a pid that still names a group. So if there is one of this pid, the
    # group had no one left, and a group of that name is not ours.
    if not _exists(leader):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
