"""A guard on two ranks through the real command: both decide alike on what one of them caused."""

import pytest
import torch

from components.training.shards import load_shards
from tests.recipes.runs import rows, steps

pytestmark = [pytest.mark.model, pytest.mark.slow]


def halves(output_dir, step):
    """Weights and moments of a checkpoint, by rank: FSDP2 shards the first dimension."""
    everything = load_shards(output_dir / f"step_{step}/resume")
    whole = {
        name: tensor
        for name, tensor in everything.items()
        if name.startswith(("weights/", "optimizer/")) and tensor.dim() > 0
    }
    return [{name: tensor.chunk(2)[rank] for name, tensor in whole.items()} for rank in (0, 1)]


def test_an_outlier_of_the_second_rank_is_skipped_by_both(tune, tmp_path):
    """The run goes on to its last step. Each step is one row per rank: the third has the outlier.

    In the step that is skipped no weight or moment of either rank moves; in the next all do.
    """
    output_dir = tmp_path / "run"
    done = tune.train(
        output_dir,
        launcher=("--nproc_per_node", "2"),
        rollout__num_workers=2,
        eval="null",
        num_steps=4,
        save_every=1,
        checkpoints__keep_last=4,
        warm_start__num_steps=0,
        rollout__max_turns=3,
        checker__levels=64,
        loss="{_component_: tests.recipes.spiking.SpikingLoss, on_rank: 1, at_row: 3}",
        guards="{grad_spike: {factor: 20, window: 2, action: skip}}",
    )
    found = rows(output_dir)
    assert steps(output_dir) == [1, 2, 3, 4]
    assert [row["pack/num_batches"] for row in found] == [1] * 4
    assert [row["guard/skipped"] for row in found] == [0, 0, 1, 0]
    assert done.stdout.count("guard (skip): train/grad_norm") == 1  # said once, not by each rank
    for rank in (0, 1):
        second, third, fourth = (halves(output_dir, step)[rank] for step in (2, 3, 4))
        assert second.keys() == third.keys() == fourth.keys()
        assert any(name.startswith("optimizer/") for name in second)
        for name in second:
            assert torch.equal(second[name], third[name]), (rank, name)
            assert not torch.equal(third[name], fourth[name]), (rank, name)
