"""What must hold after ``tools/stress_rollouts.py`` has played: ends, sound episodes, leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from components.rollout.types import Rollout, RolloutSpec, Status
from tools.stress_faults import FAULTS

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def wrong_ends(
    specs: Sequence[RolloutSpec],
    rollouts: Sequence[Rollout],
    finished: Mapping[str, int],
    plan: Mapping[int, str],
) -> list[str]:
    """Episodes that were lost or counted twice, or whose status is not the one that is due."""
    problems = []
    if [rollout.spec for rollout in rollouts] != list(specs):
        problems.append(f"{len(rollouts)} rollouts of {len(specs)} orders, or in another order")
    for rollout in rollouts:
        name, status = rollout.spec.rollout_id, rollout.status
        fault = plan.get(rollout.spec.env_seed)
        due = FAULTS[fault][1] if fault else ""
        right = status == due if due else rollout.valid
        if finished[name] != 1 or status not in get_args(Status) or not right:
            problems.append(
                f"{name}: fault {fault}, status {status}, due {due or 'one with a reward'}, "
                f"reported {finished[name]} times: {rollout.error[-200:]}"
            )
        if rollout.valid != (rollout.reward is not None):
            problems.append(f"{name}: status {status} with reward {rollout.reward}")
    return problems


def differences(
    expected: Sequence[Rollout], rollouts: Sequence[Rollout], plan: Mapping[int, str]
) -> list[str]:
    """Sound episodes that came out otherwise than in the run without faults."""
    return [
        f"{before.spec.rollout_id}: not as without faults"
        for before, after in zip(expected, rollouts, strict=True)
        if before.spec.env_seed not in plan and _timeless(before) != _timeless(after)
    ]


def _timeless(rollout: Rollout) -> Rollout:
    stats = {name: value for name, value in rollout.stats.items() if name != "env_time_s"}
    return dataclasses.replace(rollout, stats=stats)


@contextlib.contextmanager
def adopted_orphans() -> Iterator[Callable[[], None]]:
    """Processes below this one whose parents end become its children: none escapes ``census``.

    Yields:
        A function that takes note of those that have ended, as init would.
    """
    own = set(_children().get(os.getpid(), ()))
    _set_subreaper(True)

    def reap() -> None:
        for pid in set(_children().get(os.getpid(), ())) - own:
            os.waitpid(pid, os.WNOHANG)

    try:
        yield reap
    finally:
        _set_subreaper(False)


def _set_subreaper(on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def census() -> dict[str, int]:
    """Processes below this one; threads and file descriptors of it and of those."""
    pids = [os.getpid(), *_descendants()]
    return {
        "processes": len(pids) - 1,
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        "file descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
    }


def open_things() -> list[str]:
    """What ``census`` counts, by name: processes with their commands, descriptors with targets."""
    found = []
    for pid in (os.getpid(), *_descendants()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        found.append(f"process {pid}: {command or 'ended'}")
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the one that lists this folder
                found.append(f"descriptor of {pid}: {os.readlink(path)}")
    return found


def _descendants() -> list[int]:
    """Processes that came from this one, ended ones that nobody has waited for included."""
    children = _children()
    found, new = [], [os.getpid()]
    while new:
        new = [child for parent in new for child in children.get(parent, ())]
        found += new
    return found


def _children() -> dict[int, list[int]]:
    """Parent -> its children, of the whole machine."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
            continue
        children.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    return children
