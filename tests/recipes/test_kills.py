"""Twenty kills at seeded random moments of training and saving, and the result of a run without."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from components.training import checkpoint
from tests.recipes.kills import run_with_kills
from tests.recipes.runs import (
    TIMEOUT_S,
    assert_no_orphans,
    kill_group,
    played,
    ranks_of,
    rows,
    steps,
    training,
    wait_for,
    without_timings,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_KILLS = 4  # of each of five runs
KEYS = {
    "num_steps": 6,  # a kill lets at most one further step be saved
    "save_every": 1,
    "eval": "null",
    "warm_start__num_steps": 0,
    "checkpoints__keep_best": "{metric: reward/mean}",
    "checkpoints__exports": "kept",
    "loss": "tests.recipes.drawing.DrawingLoss",
}
TWO = {"launcher": ("--nproc_per_node", "2")}


@pytest.fixture(scope="module")
def straight(tune, tmp_path_factory):
    """On one rank, never killed."""
    output_dir = tmp_path_factory.mktemp("straight") / "run"
    tune.train(output_dir, **KEYS)
    return output_dir


def assert_same_run(straight, killed):
    """Metrics without timings, rollouts, exported model, resume state: every bit."""
    left, right = rows(straight), rows(killed)
    assert sum(row["pack/trained_tokens"] > 0 for row in left) > 3  # there is something to repeat
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for a, b in zip(left, right, strict=True):
        assert without_timings(a) == without_timings(b)
    assert played(straight) == played(killed)
    last = f"step_{KEYS['num_steps']}"
    assert checkpoint.last_whole(killed).name == last
    # The exported model; state.json: loader, random generators, optimizer's settings, guards.
    names, others = (
        {str(p.relative_to(run / last)) for p in (run / last).rglob("*") if p.is_file()}
        for run in (straight, killed)
    )
    assert names == others
    assert {"model.safetensors", "resume/state.json"} <= names
    for name in names:
        # safetensors writes a shard's header in no fixed order and the manifest has its hash: the
        # tensors are compared below.
        if "shard" not in name and not name.endswith("manifest.json"):
            a, b = ((run / last / name).read_bytes() for run in (straight, killed))
            assert a == b, name
    left, right = (checkpoint.load(run / last) for run in (straight, killed))
    assert left.state["rng"] == right.state["rng"]
    for part in ("weights", "optimizer", "reference"):
        a, b = getattr(left, part), getattr(right, part)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), part
    whole = {p.name for p in straight.glob("step_*")}
    assert {p.name for p in killed.glob("step_*")} == whole  # the best, the last, and no leftovers


@pytest.mark.parametrize(
    ("in_background", "seed"), [("false", 0), ("false", 1), ("false", 2), ("true", 3)]
)
def test_one_rank_ends_with_every_bit_the_same(tune, straight, tmp_path, in_background, seed):
    killed = tmp_path / "killed"
    told = run_with_kills(
        tune,
        killed,
        num_kills=NUM_KILLS,
        seed=seed,
        checkpoints__in_background=in_background,
        **KEYS,
    )
    print("\n".join(told))
    assert len(told) == NUM_KILLS + 1, told
    assert_same_run(straight, killed)


def test_two_ranks_end_with_equal_losses(tune, tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    keys = {**KEYS, **TWO}
    tune.train(straight, **keys)
    told = run_with_kills(tune, killed, num_kills=NUM_KILLS, seed=8, **keys)
    print("\n".join(told))
    assert len(told) == NUM_KILLS + 1, told
    left, right = rows(straight), rows(killed)
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for a, b in zip(left, right, strict=True):
        for name in ("loss/total", "reward/mean", "train/grad_norm"):
            assert a.get(name) == pytest.approx(b.get(name), rel=1e-5, abs=1e-8), (a["step"], name)
    last = f"step_{keys['num_steps']}"
    expected, found = (load_file(run / last / "model.safetensors") for run in (straight, killed))
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-5, name


def test_a_killed_rank_ends_the_run_with_its_last_checkpoint_whole(tune, tmp_path):
    """One of two ranks is killed: the launcher ends the other, nothing is left running."""
    run = tmp_path / "run"
    keys = {**KEYS, **TWO, "model_dir": tune.model_dir, "output_dir": run}
    process = tune.start(*training(**keys))
    try:
        wait_for(lambda: 3 in steps(run), process)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
        for leader in (process.pid, *ranks):
            assert_no_orphans(SimpleNamespace(pid=leader), timeout_s=60)
    finally:
        kill_group(process)
    assert process.returncode not in (0, None)
    last = checkpoint.last_whole(run).name
    assert int(last.removeprefix("step_")) >= 2  # of step 3, perhaps even that of a later one
    done = tune.train(resume="true", **keys)
    assert f"resuming from {last}" in done.stdout
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert len(checkpoint.load(run / "step_6").state["rng"]) == 2
