"""Rollouts ahead of training in runs of the real command: ``rollout.max_staleness`` 1."""

import os
import signal

import pytest

from components.training import checkpoint
from tests.recipes.runs import (
    assert_no_orphans,
    kill_group,
    played,
    rows,
    steps,
    training,
    wait_for,
    without_timings,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]

AHEAD = {"rollout__max_staleness": 1, "warm_start__num_steps": 0}


def trained_tasks(output_dir):
    """The tasks of each step."""
    found = {}
    for record in played(output_dir):
        if record["spec"]["rollout_id"].startswith("train/"):
            found.setdefault(record["step"], set()).add(record["spec"]["task_id"])
    return found


@pytest.fixture(scope="module")
def ahead(tune, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("ahead") / "run"
    tune.train(output_dir, **AHEAD)
    return output_dir


def test_batches_are_one_step_old_and_corrected(ahead):
    found = [row for row in rows(ahead) if "time/step_s" in row]
    assert [row["rollout/staleness_mean"] for row in found] == [0.0, 1.0, 1.0, 1.0]
    for row in found:  # trainer and generator on the same weights
        assert row["mismatch/logprob_diff_max"] < 1e-4
    clipped = [row["policy/clip_frac_low"] + row["policy/clip_frac_high"] for row in found]
    assert clipped[0] == 0
    assert sum(clipped[1:]) > 0  # with one update per batch: the clip acts on stale data


def test_evaluations_have_the_current_weights(ahead):
    for record in played(ahead):
        if record["spec"]["rollout_id"].startswith("eval/"):
            assert record["policy_version"] == record["step"]


def test_a_run_can_be_repeated(tune, ahead, tmp_path):
    tune.train(tmp_path / "run", **AHEAD)
    again, first = rows(tmp_path / "run"), rows(ahead)
    assert [without_timings(row) for row in again] == [without_timings(row) for row in first]
    assert played(tmp_path / "run") == played(ahead)


def test_a_killed_run_goes_on_with_the_same_tasks(tune, ahead, tmp_path):
    output_dir = tmp_path / "run"
    keys = {"model_dir": tune.model_dir, "output_dir": output_dir, **AHEAD}
    process = tune.start(*training(**keys))
    try:
        wait_for(lambda: 3 in steps(output_dir), process)
    finally:
        kill_group(process)
    tune.train(output_dir, resume="true", **AHEAD)
    assert trained_tasks(output_dir) == trained_tasks(ahead)  # nothing lost, nothing twice
    found = [row for row in rows(output_dir) if "time/step_s" in row]
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert found[2]["rollout/staleness_mean"] == 0.0  # the first after the checkpoint of step 2


def test_ctrl_c_saves_and_leaves_nothing_behind(tune, tmp_path):
    output_dir = tmp_path / "run"
    keys = {"model_dir": tune.model_dir, "output_dir": output_dir, "eval": "null", **AHEAD}
    process = tune.start(*training(**keys, num_steps=50, save_every=50))
    try:
        wait_for(lambda: 2 in steps(output_dir), process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert_no_orphans(process)
    finally:
        kill_group(process)
    last = max(steps(output_dir))
    assert f"stopped after step {last}; go on with resume=true" in out
    assert "Traceback" not in err
    assert checkpoint.last_whole(output_dir) == output_dir / f"step_{last}"


def test_two_ranks_play_ahead_without_collectives(tune, tmp_path):
    output_dir = tmp_path / "run"
    keys = {**AHEAD, "rollout__num_workers": 2, "num_steps": 3, "save_every": 1}
    launcher = ("--nproc_per_node", "2")
    tune.train(output_dir, launcher=launcher, **keys)
    found = [row for row in rows(output_dir) if "time/step_s" in row]
    assert [row["rollout/staleness_mean"] for row in found] == [0.0, 1.0, 1.0]
    assert all(row["mismatch/logprob_diff_max"] < 1e-4 for row in found)
    assert checkpoint.is_whole(output_dir / "step_3")


def test_what_does_not_go_together_is_said_at_once(tune, tmp_path):
    done = tune.train(
        tmp_path / "a", code=2, ratio="generator", importance__cap="null",
        guards="{mismatch: {above: 0.05, action: stop}}", **AHEAD,
    )  # fmt: skip
    assert "guards.mismatch: with ratio = generator and rollout.max_staleness = 1" in done.stderr
    done = tune.train(tmp_path / "b", code=2, compile="true", **AHEAD)
    assert "compile = true: must be false" in done.stderr
