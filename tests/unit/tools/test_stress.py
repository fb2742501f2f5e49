"""Faults in tools end their own episodes only; and the stress test notices where they do not."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from components.rollout.episode import failed_rollout
from components.rollout.types import Rollout
from components.rollout.workers import WorkerPool
from tests.unit.rollout.fakes import keep_mib, make_env, make_renderer, spec
from tools import stress_rollouts
from tools.stress_checks import (
    adopted_orphans,
    census,
    differences,
    open_things,
    wrong_ends,
)
from tools.stress_faults import FAULTS, draw_faults
from tools.stress_rollouts import LIMITS, Settings, make_specs, stress

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts in /proc")

# This seed draws every fault; half of the episodes stay sound.
SMALL = Settings(
    episodes=24, rate=0.5, seed=2046, num_workers=4, tool_timeout_s=0.5, env_timeout_s=4.0
)


@pytest.mark.slow
def test_every_fault_ends_its_own_episode_only():
    plan = draw_faults(make_specs(SMALL), SMALL.rate)
    assert set(plan.values()) == set(FAULTS)
    report = stress(SMALL)
    assert report["problems"] == []
    # Said once more, without the checks of the tool.
    faults = report["faults"]
    assert sum(sum(counts.values()) for counts in faults.values()) == 24
    assert faults["none"] == {"completed": 24 - len(plan)}
    drawn = Counter(plan.values())
    for name in ("hang", "burn", "burn_deaf"):
        assert faults[name] == {"error_deadline": drawn[name]}
    for name in ("leak", "break_env", "sys_exit", "os_exit", "killed", "abandon"):
        assert faults[name] == {"error_infra": drawn[name]}
    assert report["before"] == report["after"]
    assert 4.0 <= report["hung"]["with_s"] < report["hung"]["without_s"] + 12.0


class TestMemory:
    def test_what_a_worker_may_take(self):
        settings = {
            "make_env": make_env(),
            "make_renderer": make_renderer,
            "limits": LIMITS,
            "temperature": 1.0,
            "num_workers": 1,
            "env_timeout_s": 30.0,
        }
        with WorkerPool(**settings, worker_memory_mib=256) as pool:
            first, too_much, second, lost, third = pool.run_local(keep_mib, [100, 400, 100, 40, 10])
        assert first == second > 0
        assert too_much == -1  # refused, and nothing of it stays: the worker lives
        assert lost.status == "error_infra"
        assert "it used up worker_memory_mib" in lost.error
        assert third not in (first, -1)  # a new worker, with nothing leaked
        with pytest.raises(ValueError, match="worker_memory_mib=0: must be at least 1"):
            WorkerPool(**settings, worker_memory_mib=0)
        with WorkerPool(**settings) as pool:
            assert pool.run_local(keep_mib, [400])[0] > 0


class TestChecks:
    """Each check finds what it is there for."""

    def rollouts(self) -> list[Rollout]:
        return [
            dataclasses.replace(
                failed_rollout(
                    dataclasses.replace(spec("a", rollout_id=f"r{i}"), env_seed=i), "completed", ""
                ),
                reward=1.0,
            )
            for i in range(3)
        ]

    def check(self, rollouts: list[Rollout], finished: dict[str, int], plan: dict[int, str]):
        specs = [rollout.spec for rollout in self.rollouts()]
        return wrong_ends(specs, rollouts, finished, plan)

    def test_ends(self):
        right, once = self.rollouts(), {"r0": 1, "r1": 1, "r2": 1}
        assert self.check(right, once, {}) == []
        assert self.check(right, once, {1: "raise"}) == []
        [twice] = self.check(right, once | {"r2": 2}, {})
        assert "r2" in twice
        assert "reported 2 times" in twice
        [status] = self.check(right, once, {1: "hang"})
        assert "status completed, due error_deadline" in status
        assert "2 rollouts of 3" in self.check(right[:2], once, {})[0]
        lost = dataclasses.replace(right[0], status="error_infra", reward=None)
        assert len(self.check([lost, *right[1:]], once, {})) == 1
        assert self.check([lost, *right[1:]], once, {0: "killed"}) == []
        zero = dataclasses.replace(lost, reward=0.0)
        [reward] = self.check([zero, *right[1:]], once, {0: "killed"})
        assert "status error_infra with reward 0.0" in reward

    def test_differences(self):
        before = self.rollouts()
        for change in ({"reward": 0.5}, {"messages": ({"role": "user"},)}, {"error": "x"}):
            after = [before[0], dataclasses.replace(before[1], **change), before[2]]
            assert differences(before, after, {}) == ["r1: not as without faults"]
            assert differences(before, after, {1: "hang"}) == []

    def test_census(self):
        before = census()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            assert census()["processes"] == before["processes"] + 1
        finally:
            child.kill()
            child.wait()
        with Path(__file__).open():
            assert census()["file descriptors"] == before["file descriptors"] + 1
            assert f"descriptor of {os.getpid()}: {Path(__file__).resolve()}" in open_things()
        assert census() == before

    def test_an_orphan_is_counted_until_it_has_ended(self):
        """What a tool started and nobody ends: its worker, its parent, is gone."""
        start = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL).pid)"
        with adopted_orphans() as reap:
            before = census()
            done = subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
            orphan = psutil.Process(int(done.stdout))
            reap()
            assert census()["processes"] == before["processes"] + 1
            assert f"process {orphan.pid}: sleep 60 " in open_things()
            orphan.kill()
            while orphan.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            assert census()["processes"] == before["processes"] + 1
            reap()
            assert census() == before


def test_draws_depend_on_the_rollout_id_alone():
    specs = make_specs(Settings(episodes=1000, rate=0.3, seed=0))
    plan = draw_faults(specs, 0.3)
    assert 250 < len(plan) < 350
    assert draw_faults(reversed(specs), 0.3) == plan
    assert set(plan.values()) == set(FAULTS)
    assert len({spec.env_seed for spec in specs}) == 1000


@pytest.mark.parametrize("wrong", ["--episodes=7", "--rate=1.5"])
def test_bad_settings(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        stress_rollouts.main([wrong])
    name, value = wrong[2:].split("=")
    assert f"{name}={value}" in capsys.readouterr().err
