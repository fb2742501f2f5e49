"""Two ranks through the real command: the same run as one, and none waits for another forever."""

import pytest
import torch

from components.training import checkpoint
from tests.recipes import tiny_model
from tests.recipes.runs import played, rows, steps

pytestmark = [pytest.mark.model, pytest.mark.slow]

TWO = {"launcher": ("--nproc_per_node", "2"), "rollout__num_workers": 2}
SHORT = {
    "eval": "null",
    "save_every": 1,
    "num_steps": 2,
    "warm_start__num_steps": 0,
    "rollout__max_turns": 3,
    # No row holds two groups, so a rank with fewer rollouts has fewer rows of its own.
    "tokens_per_batch": 1024,
}


@pytest.fixture(scope="module")
def one_and_two(tune, tmp_path_factory):
    """The same run on one rank and on two: four groups a step, two on each of two ranks.

    Batches of other sizes round otherwise. With 49152 tokens of nearly equal probability, one drawn
    token in a hundred is then another; at a low temperature the distribution is sharp, and none is.
    """
    here = tmp_path_factory.mktemp("ranks")
    sharp = tiny_model.write(here / "sharp", tune.model_dir, end_factor=1.5)
    # AdamW's first steps are about lr times the sign of a gradient. With this eps a gradient that
    # is rounding alone (1e-8) does not move a weight by as much as one of 1.
    keys = {**SHORT, "tasks_per_step": 4, "optimizer__eps": 1e-5}
    keys |= {"model_dir": sharp, "rollout__temperature": 0.1}
    tune.train(here / "one", **keys)
    tune.train(here / "two", **keys, **TWO)
    return here / "one", here / "two"


def by_name(output_dir):
    """Recorded rollouts by their id: ranks take groups in turn, so the order is another."""
    return {record["spec"]["rollout_id"]: record for record in played(output_dir)}


def test_one_and_two_ranks_play_the_same_rollouts(one_and_two):
    """Every bit but for the sampler's log-probabilities: in other batches they round otherwise."""
    one, two = map(by_name, one_and_two)
    assert one.keys() == two.keys()
    assert len(one) == 2 * 4 * 3
    for name in one:
        a, b = one[name], two[name]
        assert len(a["turns"]) == len(b["turns"])
        for left, right in zip(a["turns"], b["turns"], strict=True):
            assert left["ids"]
            logprobs = left.pop("logprobs"), right.pop("logprobs")
            assert logprobs[0] == pytest.approx(logprobs[1], rel=1e-5, abs=1e-4)
        assert a == b


def test_one_and_two_ranks_take_the_same_steps(one_and_two):
    """Losses and gradients to a relative 1e-5, weights to 2e-6: sums are made in another order.

    Two steps move the weights by about 4e-3.
    """
    one, two = map(rows, one_and_two)
    assert [row["step"] for row in one] == [row["step"] for row in two] == [1, 2]
    for a, b in zip(one, two, strict=True):
        assert a["pack/trained_tokens"] == b["pack/trained_tokens"] > 0
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], rel=1e-12)
        assert a["train/grad_norm"] > 0
        assert a["loss/total"] != 0
        for metric in ("loss/total", "train/grad_norm"):
            assert a[metric] == pytest.approx(b[metric], rel=1e-5), (a["step"], metric)
    one, two = (checkpoint.load(run / "step_2").weights for run in one_and_two)
    assert one.keys() == two.keys()
    for name in one:
        gap = torch.linalg.vector_norm(one[name] - two[name])
        assert gap <= 2e-6 * torch.linalg.vector_norm(one[name]), name


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_whose_rollouts_all_fail_does_not_hold_up_the_other(
    tune, tmp_path, monkeypatch, broken
):
    monkeypatch.setenv("FAILS_ON_RANK", str(broken))
    tune.train(
        tmp_path / "run",
        env="tests.recipes.failing_env.FailingEnv",
        **SHORT,
        **TWO,
    )
    for row in rows(tmp_path / "run"):
        assert row["rollout/error_frac"] == 0.5
        assert row["group/too_small_frac"] == 0.5
        assert row["pack/trained_tokens"] > 0  # the other rank's
        assert row["train/grad_norm"] > 0
    assert steps(tmp_path / "run") == [1, 2]
    for record in played(tmp_path / "run"):
        fails = record["spec"]["group"] % 2 == broken
        assert (record["status"] == "error_infra") == fails
        if fails:
            assert f"the environment of rank {broken} is broken" in record["error"]
            assert record["reward"] is None
    assert checkpoint.is_whole(tmp_path / "run/step_2")


def test_ranks_that_refill_and_update_unequally_end(tune, tmp_path):
    """Rank 1 never has anything to train, and what is drawn instead may all be for rank 0."""
    tune.train(
        tmp_path / "run",
        checker="tests.recipes.checkers.EqualOnRank",
        checker__rank=1,
        dynamic_sampling__max_refills=1,
        updates_per_batch=2,
        **SHORT | {"num_steps": 3},
        **TWO,
    )
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3]
    names = [record["spec"]["rollout_id"] for record in played(tmp_path / "run")]
    assert len(set(names)) == len(names)
    for row in found:
        mine = [name for name in names if name.startswith(f"train/{row['step']}/")]
        assert row["group/refilled"] >= 1  # rank 1's group at least
        assert len(mine) == 3 * (2 + row["group/refilled"])
    trained = [row for row in found if row["pack/trained_tokens"]]
    assert trained
    for row in trained:
        assert row["pack/num_batches"] >= 1
        assert row["train/grad_norm"] > 0
        # rank 1's group and what was drawn on rank 1 had no variance
        assert row["group/zero_std_frac"] > 0
    assert checkpoint.is_whole(tmp_path / "run/step_3")
