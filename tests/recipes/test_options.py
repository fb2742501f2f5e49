"""Options of the update and dynamic sampling, in runs of the real command."""

import pytest

from components.training import checkpoint
from tests.recipes.runs import played, rows, without_timings

pytestmark = [pytest.mark.model, pytest.mark.slow]

OPTIONS = {
    "eval": "null",
    "save_every": 1,
    "warm_start__num_steps": 0,
    "checker__levels": 2,  # half of the groups of two have no variance
    "rollout__group_size": 2,
    "tokens_per_batch": 4096,
    "rollout__max_turns": 3,
    "tasks_per_step": 2,
    "dynamic_sampling__max_refills": 2,
    "advantages__leave_one_out": "true",
    "advantages__num_trained": 2,  # all
    "mask_overlong": "true",
    "loss": "components.rl.losses.GSPOLoss",
    "loss__eps_low": 3e-4,
    "loss__eps_high": 4e-4,
    "aggregation__over": "sequence",
    "importance__level": "sequence",
    "importance__mask_below": 0.5,
    "importance__mask_above": 2,
    "entropy_bonus": 0.001,
    "updates_per_batch": 2,
    "probe_noise": "true",
}


@pytest.fixture(scope="module")
def straight(tune, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("options") / "run"
    tune.train(output_dir, num_steps=2, **OPTIONS)
    return output_dir


def test_groups_are_refilled_and_counted(straight):
    found = rows(straight)
    assert [row["step"] for row in found] == [1, 2]
    names = [record["spec"]["rollout_id"] for record in played(straight)]
    assert len(set(names)) == len(names)
    for row in found:
        mine = [name for name in names if name.startswith(f"train/{row['step']}/")]
        assert len(mine) == 2 * (2 + row["group/refilled"])
        kept = (1 - row["group/zero_std_frac"] - row["group/too_small_frac"]) * len(mine) / 2
        assert kept == pytest.approx(2) or row["group/refilled"] >= 2
    assert any(row["group/refilled"] > 0 for row in found)


def test_the_second_update_is_clipped(straight):
    trained = [row for row in rows(straight) if row["pack/trained_tokens"]]
    assert trained
    for row in trained:
        assert row["importance/masked_frac"] == 0  # one module samples and trains
        assert row["policy/clip_frac_low"] + row["policy/clip_frac_high"] > 0
        assert row["loss/total"] < row["loss/policy"] + 0.01 * row["loss/kl"]  # the bonus
        assert ("grad/signal" in row) is (row["pack/num_batches"] > 1)  # pairs of rows are needed


def test_a_resumed_run_goes_on_with_the_same_tasks_and_losses(tune, straight, tmp_path):
    output_dir = tmp_path / "run"
    tune.train(output_dir, num_steps=1, **OPTIONS)
    tune.train(output_dir, num_steps=2, resume="true", **OPTIONS)
    assert [without_timings(r) for r in rows(output_dir)] == [
        without_timings(r) for r in rows(straight)
    ]
    assert played(output_dir) == played(straight)
    left, right = (checkpoint.load(path / "step_2").state for path in (output_dir, straight))
    assert left == right


def test_the_ratio_against_the_generator(tune, tmp_path):
    tune.train(
        tmp_path / "run",
        num_steps=1,
        eval="null",
        warm_start__num_steps=0,
        ratio="generator",
        importance__cap="null",
        aggregation__over="constant",
        aggregation__divisor=1024,
        loss="components.rl.losses.CISPOLoss",
        loss__eps_low=1,
        loss__eps_high=4,
    )
    (row,) = rows(tmp_path / "run")
    assert row["pack/trained_tokens"] > 0
    assert row["mismatch/kl"] < 1e-6
    assert row["train/grad_norm"] > 0
