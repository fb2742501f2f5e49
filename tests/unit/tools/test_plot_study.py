"""The table and the picture of a study, from results that were written by hand."""

import json
import subprocess
import sys

import pytest

from tests.unit.tools.test_learning_study import ROOT
from tools.plot_study import curve


def result(arm, seed, rewards, *, steps=()):
    tasks = {f"t{i}": [reward, reward] for i, reward in enumerate(rewards)}
    evals = {"held_out": {"tasks": tasks, "do_nothing_mean": 0.125}}
    found = {"arm": arm, "seed": seed, "same": {"minutes": 15}, "evals": evals}
    if steps:
        rows = [{"step": i, "time/step_s": s, "reward/mean": r} for i, (s, r) in enumerate(steps)]
        found["curve"] = [{"step": 0, "loss/held_out": 1.0}, *rows]
    return found


RESULTS = [
    *(result("before", seed, [0, 0, 1, 0, 0, 1, 0, 0]) for seed in (0, 1)),
    *(
        result("grpo", seed, [0, 1, 1, 0, 1, 1, 1, 0], steps=[(60, 0.25), (60, 0.5), (30, 0.75)])
        for seed in (0, 1)
    ),
    result("sft", 0, [0, 0, 1, 0, 1, 1, 0, 0]),
]


def plot(*arguments):
    command = [sys.executable, "tools/plot_study.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_table_and_the_picture(tmp_path):
    for found in RESULTS:
        path = tmp_path / f"{found['arm']}_{found['seed']}.json"
        path.write_text(json.dumps(found), encoding="utf-8")
    (tmp_path / "warm_start.json").write_text("{}", encoding="utf-8")
    done = plot(tmp_path, "--output", tmp_path / "study.png")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("| held_out | grpo | 2 | 0.250 | 0.625 | +0.375 [-0.027, +0.750] |")
    assert lines[3].startswith("| held_out | sft | 1 | 0.250 | 0.375 | +0.125 [")
    assert lines[4].startswith("| held_out | grpo-sft | 1 | 0.375 | 0.625 | +0.250 [")
    assert lines[5] == "| held_out | doing nothing | | | 0.125 | |"
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_reward_stands_at_the_time_at_which_its_step_began():
    minutes, rewards = curve(RESULTS[2])
    assert minutes == pytest.approx([0.0, 1.0, 2.0])
    assert rewards == [0.25, 0.5, 0.75]
    assert curve(RESULTS[0]) == ([], [])


def test_nothing_to_draw_is_an_error(tmp_path):
    done = plot(tmp_path)
    assert done.returncode == 2
    assert "holds no ARM_SEED.json" in done.stderr
