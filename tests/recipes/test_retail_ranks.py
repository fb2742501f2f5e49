"""configs/retail.yaml on two ranks, as its header says to launch it, with the tiny model."""

import pytest
import torch

from components.models.smollm2 import smollm2
from components.training import checkpoint
from tests.recipes import tiny_model
from tests.recipes.runs import arguments, played, rows

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_retail_on_two_ranks_takes_a_step_and_saves_it(tune, tmp_path):
    """The config's own settings but for the model, the reward and what makes a run short.

    The benchmark gives a random model 0 for everything, and nothing would be trained.
    """
    # the config's rollouts have 5120 tokens
    model = tiny_model.write(tmp_path / "model", tune.model_dir, context=5120)
    output_dir = tmp_path / "run"
    done = tune.run(
        *arguments(
            launcher=("--nproc_per_node", "2"),
            config="configs/retail.yaml",
            device="cpu",
            model_dir=model,
            output_dir=output_dir,
            checker="tests.recipes.checkers.TextHash",
            checker__levels=64,
            num_steps=1,
            rollout__group_size=2,
            rollout__max_turn_tokens=32,
            rollout__num_workers=2,
            warm_start__num_steps=1,
            warm_start__num_demonstrations=2,
            warm_start__demonstrations_per_step=2,
        )
    )
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == 1
    assert "warm start   1/1" in done.stdout
    (row,) = rows(output_dir)
    assert row["step"] == 1
    assert row["pack/trained_tokens"] > 0
    assert row["train/grad_norm"] > 0
    assert row["loss/kl"] == 0.0
    assert row["rollout/error_frac"] == 0.0
    records = played(output_dir)
    # one group of two on each rank
    members = {(record["spec"]["group"], record["spec"]["member"]) for record in records}
    assert members == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {record["spec"]["domain"] for record in records} == {"retail"}
    folder = output_dir / "step_1"
    assert checkpoint.is_whole(folder)
    ours = dict(smollm2(folder, dtype=torch.bfloat16).named_parameters())
    saved = checkpoint.load(folder).weights
    before = dict(smollm2(model, dtype=torch.bfloat16).named_parameters())
    assert ours.keys() == saved.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, saved[name].to(torch.bfloat16)), name
    assert any(not torch.equal(ours[name], before[name]) for name in ours)
