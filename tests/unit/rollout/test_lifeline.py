"""Nothing of a worker stays: what its tools started, what its pool's process left, what is open."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from components.rollout.lifeline import end_group
from components.rollout.workers import Failure
from tests.unit.rollout.fakes import start_child
from tests.unit.rollout.test_workers import make_pool


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_run(pids: Iterable[int], *, patience_s: float = 10.0) -> list[int]:
    """Those that run when all should have ended."""
    end = time.monotonic() + patience_s
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def leftovers(pids: Iterable[int]) -> list[int]:
    """The same; and they end now, so that a failed test leaves none of them."""
    left = still_run(pids)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def wait_for_pids(folder: Path, number: int) -> list[int]:
    end = time.monotonic() + 60
    while len(names := os.listdir(folder)) < number:
        assert time.monotonic() < end, f"only {names}"
        time.sleep(0.05)
    return [int(name) for name in names]


def start(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    """Run lines in a process of their own, with a forkserver of its own."""
    script = tmp_path / "job.py"
    script.write_text(
        "from pathlib import Path\n"
        "from tests.unit.rollout.fakes import look_inside, start_child\n"
        "from tests.unit.rollout.test_workers import make_pool\n" + textwrap.dedent(body)
    )
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        text=True,
    )


class TestChildren:
    @pytest.mark.parametrize(
        ("then", "status"), [("hang", "error_deadline"), ("exit", "error_infra"), ("return", None)]
    )
    def test_they_end_with_their_worker(self, tmp_path, then, status):
        """A worker killed by its deadline, one that its tool ended, one of a closed pool."""
        with make_pool(num_workers=1) as pool:
            [answer] = pool.run_local(start_child, [(tmp_path, then)], timeout_s=5.0)
            assert (answer.status if isinstance(answer, Failure) else None) == status
            pids = wait_for_pids(tmp_path, 2)
            if then == "return":
                assert len(still_run(pids, patience_s=0.2)) == 2
            else:
                assert not leftovers(pids)
        assert not leftovers(pids)

    def test_a_group_of_somebody_else_is_spared(self):
        """As when the pid has been given anew."""
        other = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        try:
            end_group(other.pid)
            assert runs(other.pid)
        finally:
            other.kill()
            other.wait()
        end_group(other.pid)  # and there may be no group at all


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_all_end_when_the_process_of_the_pool_is_killed(tmp_path, number):
    """Idle workers, waiting ones, and one that never gives up the interpreter's lock."""
    (pids := tmp_path / "pids").mkdir()
    job = start(
        tmp_path,
        f"""
        thens = [(Path({str(pids)!r}), then) for then in ("burn", "hang", "return")]
        make_pool().run_local(start_child, thens, timeout_s=1000)
        """,
    )
    wait_for_pids(pids, 6)
    everything = [child.pid for child in psutil.Process(job.pid).children(recursive=True)]
    assert len(everything) >= 8  # those, the forkserver and the resource tracker
    job.send_signal(number)
    assert job.wait() == -number
    assert not leftovers(everything)


def test_without_signals_from_pipes_a_thread_does_it(tmp_path):
    script = """
        import fcntl, os, subprocess, sys, time
        from components.rollout import lifeline
        vars(fcntl).pop("F_SETSIG", None)
        lifeline.hold(int(sys.argv[1]))
        print(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        time.sleep(1000)
    """
    reader, writer = os.pipe()
    job = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(reader)],
        pass_fds=[reader],
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(reader)
    assert job.stdout is not None
    pids = [int(pid) for pid in job.stdout.readline().split()]
    assert pids[0] == job.pid
    assert len(still_run(pids, patience_s=0.2)) == 2
    os.close(writer)
    assert job.wait(60) == -signal.SIGKILL
    assert not leftovers(pids)
    job.stdout.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts in /proc")
def test_nothing_is_open_when_close_returns(tmp_path):
    """Even if the forkserver is slow to close what it has of a worker."""
    job = start(
        tmp_path,
        """
        from multiprocessing.connection import wait
        import time
        from tools.stress_checks import census

        preload = ("tests.unit.rollout.fakes:slow_exit_codes",)
        with make_pool(num_workers=2, preload=preload) as pool:
            pool.run_local(look_inside, ["pid"] * 2)
        closed = census()
        time.sleep(2.0)
        assert census() == closed, (census(), closed)
        with make_pool(num_workers=1) as pool:
            pool.run_local(look_inside, ["pid"])
            process = pool._slots[0]._process
            process.kill()
            process.join()
            assert not wait([process.sentinel], 0)  # it is slow indeed
        """,
    )
    assert job.wait(60) == 0
    assert job.stdout is not None
    job.stdout.close()


def test_a_job_that_was_stopped_loses_nothing(tmp_path):
    """Stopped for longer than its deadlines, as a suspended job of a cluster is."""
    job = start(
        tmp_path,
        """
        with make_pool(num_workers=2, env_timeout_s=5.0) as pool:
            pool.run_local(look_inside, ["pid"] * 2)
            print("ready", flush=True)
            print(pool.run_local(look_inside, [1.5, 1.5, "hang"]))
        """,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    time.sleep(0.5)
    everything = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    for process in everything:
        process.suspend()
    time.sleep(6.5)
    for process in everything:
        process.resume()
    answers, _ = job.communicate(timeout=60)
    assert answers.count("(1.5, 'FakeEnv', 'HermesRenderer')") == 2
    assert answers.count("no answer within 5.0 s") == 1  # and the deadline still holds
