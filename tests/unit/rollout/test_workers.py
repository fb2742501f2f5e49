from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from components.rollout.agent_loop import Limits
from components.rollout.stats import rollout_metrics
from components.rollout.types import Rollout, SampleFailure
from components.rollout.workers import Failure, WorkerPool
from tests.unit.rollout import fakes
from tests.unit.rollout.fakes import CALL, FakeEngine, look_inside, make_env, make_renderer, spec

LIMITS = Limits(max_turns=10, max_turn_tokens=120, max_tokens=4000, max_refused=2)


def make_pool(**changes: Any) -> WorkerPool:
    settings: dict[str, Any] = {
        "make_env": make_env(),
        "make_renderer": make_renderer,
        "limits": LIMITS,
        "temperature": 1.0,
        "num_workers": 3,
        "env_timeout_s": 30.0,
        "start_timeout_s": 60.0,
    }
    return WorkerPool(**settings | changes)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with make_pool() as pool:
        yield pool


def without_times(rollouts: list[Rollout]) -> list[Rollout]:
    return [
        dataclasses.replace(r, stats={k: v for k, v in r.stats.items() if k != "env_time_s"})
        for r in rollouts
    ]


def pids(pool: WorkerPool) -> list[int]:
    return [slot._process.pid for slot in pool._slots if slot._process is not None]


class TestRounds:
    def test_order_batches_and_release(self, pool):
        """Three workers, five rollouts: batches follow the specs alone."""
        turns = (1, 3, 2, 1, 1)
        specs = [spec(f"user_stop:{n}", rollout_id=f"r{i}") for i, n in enumerate(turns)]
        engine, done = FakeEngine(), []
        rollouts = pool.run(specs, engine, on_done=lambda r: done.append(r.spec.rollout_id))
        assert [rollout.spec for rollout in rollouts] == specs
        assert [len(rollout.turns) for rollout in rollouts] == list(turns)
        assert [rollout.status for rollout in rollouts] == ["completed"] * 5
        # r0 and r2 end in the gatherings after the first and the second batch: the next specs join.
        assert engine.batches == [["r0", "r1", "r2"], ["r1", "r2", "r3"], ["r1", "r4"]]
        assert done == engine.released == ["r0", "r2", "r3", "r1", "r4"]

    def test_results_do_not_depend_on_who_is_quick(self, pool):
        """The engine's turns depend on the whole batch, so any other order would show."""
        specs = [spec(f"user_stop:{1 + i % 4}", member=i) for i in range(8)]
        expected = without_times(pool.run(specs, FakeEngine()))
        with make_pool(make_env=make_env(max_delay_s=0.04)) as slow:
            for _ in range(2):
                engine = FakeEngine()
                assert without_times(slow.run(specs, engine)) == expected
        texts = {rollout.messages[2]["text"] for rollout in expected}
        assert len(texts) == 8

    def test_environments_are_reused(self, pool):
        before = set(pids(pool))
        pool.run([spec("user_stop:1", member=i) for i in range(4)], FakeEngine())
        assert set(pids(pool)) == before

    def test_mistakes(self, pool):
        with pytest.raises(ValueError, match="rollout_id must be unique"):
            pool.run([spec("user_stop:1")] * 2, FakeEngine())
        assert pool.run([], FakeEngine()) == []
        with pytest.raises(ValueError, match="num_workers=0"):
            make_pool(num_workers=0)
        with pytest.raises(ValueError, match="env_timeout_s=0"):
            make_pool(env_timeout_s=0)
        with pytest.raises(ValueError, match="temperature=-1"):
            make_pool(temperature=-1)

    def test_a_mistake_in_the_limits_stops_the_run(self):
        limits = dataclasses.replace(LIMITS, max_tokens=130)
        with make_pool(limits=limits, num_workers=2) as pool:
            specs = [spec("user_stop:1", member=i) for i in range(2)]
            with pytest.raises(ValueError, match=r"max_tokens=130 is too small for task"):
                pool.run(specs, FakeEngine())

    @pytest.mark.parametrize(
        ("make", "error", "match"),
        [
            (fakes.bad_env, ValueError, "did you mean 'retail'"),
            (fakes.broken_env, RuntimeError, "KeyError: 'no data'"),
        ],
    )
    def test_an_environment_that_cannot_be_made(self, make, error, match):
        with make_pool(make_env=make, num_workers=1) as pool, pytest.raises(error, match=match):
            pool.run([spec("user_stop:1")], FakeEngine())

    def test_an_error_of_the_engine_leaves_a_usable_pool(self, pool):
        class Broken(FakeEngine):
            def sample_all(self, requests):
                raise KeyError("out of memory")

        engine = Broken()
        with pytest.raises(KeyError, match="out of memory"):
            pool.run([spec("user_stop:2", member=i) for i in range(3)], engine)
        assert len(engine.released) == 3
        [rollout] = pool.run([spec("user_stop:2")], FakeEngine())
        assert rollout.status == "completed"
        assert len(rollout.turns) == 2

    def test_a_turn_that_could_not_be_sampled_loses_its_rollout_and_no_other(self, pool):
        class Lossy(FakeEngine):
            def sample_all(self, requests):
                turns = super().sample_all(requests)
                lost = SampleFailure(error="the server is gone")
                number = len(self.batches)
                return [
                    lost if number == 2 and request.rollout_id.endswith("/1") else turn
                    for request, turn in zip(requests, turns, strict=True)
                ]

        engine = Lossy()
        specs = [spec("user_stop:3", member=i) for i in range(3)]
        rollouts = pool.run(specs, engine)
        assert [r.status for r in rollouts] == ["completed", "error_infra", "completed"]
        lost = rollouts[1]
        assert (lost.reward, lost.error, len(lost.turns)) == (None, "the server is gone", 1)
        assert rollout_metrics(rollouts)["rollout/error_frac"] == pytest.approx(1 / 3)
        assert sorted(engine.released) == sorted(s.rollout_id for s in specs)

    def test_temperature_and_rounds(self, pool):
        engine, rounds = FakeEngine(), []
        specs = [spec("user_stop:2")]
        pool.run(specs, engine, on_round=lambda: rounds.append(len(engine.batches)))
        pool.run(specs, engine, temperature=0.0)
        assert rounds == [0, 1]
        assert [request.temperature for request in engine.requests] == [1.0, 1.0, 0.0, 0.0]
        with pytest.raises(ValueError, match="temperature=nan"):
            pool.run(specs, engine, temperature=float("nan"))


class TestLosses:
    def test_one_of_eight_hangs(self):
        """Fault 24: the step ends by its deadline with seven; the eighth is not reward 0."""
        with make_pool(num_workers=8, env_timeout_s=5.0) as pool:
            specs = [spec("hang:2" if i == 3 else "user_stop:3", member=i) for i in range(8)]
            engine = FakeEngine()
            pool.run_local(look_inside, ["pid"] * 8)  # all are up: the clock below is the step's
            begin = time.monotonic()
            rollouts = pool.run(specs, engine)
            assert time.monotonic() - begin < 100  # it hangs for 1,000 s
            assert [r.status for r in rollouts].count("completed") == 7
            assert rollouts[3].status == "error_deadline"
            assert rollouts[3].reward is None
            assert not rollouts[3].valid
            assert "5.0 s" in rollouts[3].error
            assert [len(r.turns) for r in rollouts] == [3, 3, 3, 0, 3, 3, 3, 3]
            assert len(engine.released) == 8
            again = pool.run([dataclasses.replace(s, task_id="user_stop:1") for s in specs], engine)
            assert {r.status for r in again} == {"completed"}

    def test_a_worker_dies(self, pool):
        specs = [spec("die:2" if i == 1 else "user_stop:3", member=i) for i in range(4)]
        rollouts = pool.run(specs, FakeEngine())
        assert [r.status for r in rollouts] == [
            "completed",
            "error_infra",
            "completed",
            "completed",
        ]
        assert rollouts[1].reward is None
        assert "exit code 3" in rollouts[1].error

    def test_an_idle_worker_that_died_is_replaced(self, pool):
        pool.run_local(look_inside, ["pid"] * 3)
        os.kill(pids(pool)[0], signal.SIGKILL)
        time.sleep(0.2)
        rollouts = pool.run([spec("user_stop:1", member=i) for i in range(3)], FakeEngine())
        assert {r.status for r in rollouts} == {"completed"}

    def test_exceptions_come_back_as_text(self, pool):
        specs = [spec(f"{kind}:1") for kind in ("raise", "user", "timeout", "user_stop")]
        rollouts = pool.run(specs, FakeEngine())
        statuses = [r.status for r in rollouts]
        assert statuses == ["error_infra", "error_user", "error_deadline", "completed"]
        assert "KeyError: 'broken database'" in rollouts[0].error

    def test_tool_calls_cross_the_pipe(self, pool):
        engine = FakeEngine({"user_stop:2/0": [CALL, "Bye"]})
        [rollout] = pool.run([spec("user_stop:2")], engine)
        assert rollout.stats["tool_calls"] == 1


class TestLocalCalls:
    def test_results_in_order(self, pool):
        items = [0.05, "b", 0.0, "d", "e"]
        results = pool.run_local(look_inside, items)
        assert results == [(item, "FakeEnv", "HermesRenderer") for item in items]

    def test_failures_stand_in_their_place(self):
        with make_pool(num_workers=2) as pool:
            results = pool.run_local(look_inside, ["a", "raise", "hang", "d"], timeout_s=5.0)
            assert results[0] == ("a", "FakeEnv", "HermesRenderer")
            assert results[3] == ("d", "FakeEnv", "HermesRenderer")
            assert isinstance(results[1], Failure)
            assert "KeyError: 'no such item'" in results[1].error
            assert results[2] == Failure(status="error_deadline", error="no answer within 5.0 s")

    def test_what_on_round_raises_ends_the_work(self):
        def stop():
            raise InterruptedError("asked to")

        with make_pool(num_workers=2) as pool:
            with pytest.raises(InterruptedError):
                pool.run_local(look_inside, ["a", "hang", "c"], on_round=stop)
            [answer] = pool.run_local(look_inside, ["b"])  # the pool is still good
            assert answer[0] == "b"


class TestProcesses:
    def test_workers_are_light(self, pool):
        """No torch, no main module of the caller (pytest), one thread."""
        import torch  # noqa: F401  the parent has it

        [modules, threads] = pool.run_local(look_inside, ["modules", "threads"])
        assert modules == []
        assert threads == ("1", 1)
        assert os.environ.get("SINKFLEX_PRELOAD") is None

    def test_workers_ignore_an_interrupt(self, pool):
        pool.run_local(look_inside, ["pid"] * 3)
        before = pids(pool)
        for pid in before:
            os.kill(pid, signal.SIGINT)
        pool.run_local(look_inside, ["pid"] * 3)
        assert pids(pool) == before

    def test_ctrl_c_and_close_leave_nothing_behind(self):
        pool = make_pool(num_workers=2)
        pool.run_local(look_inside, ["pid"] * 2)
        started = [psutil.Process(pid) for pid in pids(pool)]
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        # A shell starts background jobs with SIGINT ignored, and Python then leaves it so.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                pool.run([spec("hang:1", member=0), spec("user_stop:1", member=1)], FakeEngine())
        finally:
            signal.signal(signal.SIGINT, before)
        [rollout] = pool.run([spec("user_stop:1")], FakeEngine())
        assert rollout.status == "completed"
        started += [psutil.Process(pid) for pid in pids(pool)]
        pool.close()
        pool.close()
        assert not [process for process in started if process.is_running()]

    def test_a_main_module_is_not_imported(self, tmp_path):
        """A recipe runs as __main__ and imports torch at its top: workers must not import it."""
        script = tmp_path / "recipe.py"
        script.write_text(
            textwrap.dedent(
                """
                import torch
                from components.rollout.agent_loop import Limits
                from components.rollout.workers import WorkerPool
                from tests.unit.rollout.fakes import FakeEnv, look_inside, make_env, make_renderer

                def own_env():
                    return FakeEnv()

                limits = Limits(max_turns=1, max_turn_tokens=1, max_tokens=1, max_refused=0)
                rest = dict(make_renderer=make_renderer, limits=limits, temperature=1.0,
                            num_workers=1, env_timeout_s=30.0)
                preload = ("tests.tiny", "tests.unit.rollout.fakes:tokenizer_dir")
                with WorkerPool(make_env=make_env(), preload=preload, **rest) as pool:
                    print(pool.run_local(look_inside, ["modules", "preloaded"]))
                try:
                    WorkerPool(make_env=own_env, **rest)
                except ValueError as error:
                    print(error)
                """
            )
        )
        root = os.getcwd()
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first == "[[], ['tests.tiny', 'tests.unit.rollout.fakes:tokenizer_dir']]"
        assert "__main__" in second
