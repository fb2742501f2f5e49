"""The reference of the KL term in runs of the real command: LoRA after a warm start."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from components.training.shards import load_shards
from tests.recipes.runs import Tune, played, rows, without_timings

pytestmark = [pytest.mark.model, pytest.mark.slow]

KEYS = {
    "eval": "null",
    "num_steps": 3,
    "save_every": 3,
    "checker__levels": 64,
    "rollout__max_turns": 3,
    "model": "components.models.smollm2.lora_smollm2",
    "model__lora_rank": 4,
    "model__lora_alpha": 8,
    "model__lora_modules": "[q_proj, v_proj]",
    "warm_start__num_steps": 2,
    "warm_start__optimizer__lr": 0.01,
    "optimizer__lr": 0.01,
}


@pytest.fixture(scope="module")
def runs(tiny_model_dir, tmp_path_factory):
    """Three steps with the reference kept, and with one in host memory that is reset after two.

    A home of their own, so that the one cached warm start is theirs.
    """
    here = tmp_path_factory.mktemp("reference")
    tune = Tune(here / "home", tiny_model_dir)
    tune.train(here / "kept", **KEYS)
    tune.train(here / "reset", reference__reset_every=2, reference__offload="true", **KEYS)
    (cached,) = (here / "home/warm_starts").glob("*.safetensors")
    return SimpleNamespace(kept=here / "kept", reset=here / "reset", warm_started=load_file(cached))


def saved(output_dir, kind):
    """Tensors of the last checkpoint's resume state: ``weights`` or ``reference``."""
    everything = load_shards(output_dir / "step_3/resume")
    return {
        name.removeprefix(f"{kind}/"): tensor
        for name, tensor in everything.items()
        if name.startswith(f"{kind}/")
    }


def test_the_reference_is_the_warm_started_adapter(runs):
    """Fault 20: not the base, whose adapters have B = 0."""
    reference, weights = saved(runs.kept, "reference"), saved(runs.kept, "weights")
    assert reference.keys() == weights.keys() == runs.warm_started.keys()
    assert len(reference) == 2 * 2 * 2
    for name, tensor in reference.items():
        assert torch.equal(tensor, runs.warm_started[name])
        assert tensor.any()
        assert not torch.equal(tensor, weights[name])


def test_kl_starts_at_zero_and_again_after_a_reset(runs):
    kept, reset = rows(runs.kept), rows(runs.reset)
    assert [row["step"] for row in kept] == [row["step"] for row in reset] == [1, 2, 3]
    assert all(row["pack/trained_tokens"] > 0 for row in kept)
    assert kept[0]["loss/kl"] == reset[0]["loss/kl"] == 0.0
    assert kept[1]["loss/kl"] > 0
    assert kept[2]["loss/kl"] > 0
    assert reset[2]["loss/kl"] == 0.0
    # the same rollouts and the same policy, so the same loss but for the KL term
    assert kept[2]["loss/policy"] == reset[2]["loss/policy"]
    assert kept[2]["loss/total"] == pytest.approx(
        reset[2]["loss/total"] + 0.01 * kept[2]["loss/kl"], rel=1e-5
    )


def test_until_the_reset_an_offloaded_reference_changes_nothing(runs):
    for a, b in zip(rows(runs.kept)[:2], rows(runs.reset)[:2], strict=True):
        assert without_timings(a) == without_timings(b)
    assert played(runs.kept) == played(runs.reset)  # those of step 3 are before its update


def test_the_reset_reference_is_saved(runs):
    """It is neither the warm start nor the weights after the third step."""
    reference, weights = saved(runs.reset, "reference"), saved(runs.reset, "weights")
    for name, tensor in reference.items():
        assert not torch.equal(tensor, runs.warm_started[name])
        assert not torch.equal(tensor, weights[name])
