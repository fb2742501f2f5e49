"""Compiled layers through the real command."""

import pytest
import torch

from components.training import checkpoint
from tests.recipes import tiny_model
from tests.recipes.runs import played, rows

pytestmark = [pytest.mark.model, pytest.mark.compile]


def test_compiled_layers_take_the_same_steps(tune, tmp_path, monkeypatch):
    """Two steps in fp32: the same rollouts; losses, gradients, weights to a relative 1e-4.

    Fused kernels round otherwise, and so does the sampler, whose layers these are: at a low
    temperature the distribution is sharp, so that rounding does not choose another token.
    """
    sharp = tiny_model.write(tmp_path / "sharp", tune.model_dir, end_factor=1.5)
    runs = {"false": tmp_path / "eager", "true": tmp_path / "compiled"}
    for compile, output_dir in runs.items():
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"kernels_{compile}"))
        tune.train(
            output_dir,
            model_dir=sharp,
            rollout__temperature=0.1,
            compile=compile,
            num_steps=2,
            save_every=2,
            eval="null",
            warm_start__num_steps=0,
            # AdamW's first steps are signs, which rounding decides where a gradient is small.
            optimizer="{_component_: torch.optim.SGD, lr: 1.0e-3}",
        )
    assert not list((tmp_path / "kernels_false").rglob("*.so"))
    assert list((tmp_path / "kernels_true").rglob("*.so"))  # machine code was made
    eager, compiled = map(rows, runs.values())
    assert [row["step"] for row in eager] == [row["step"] for row in compiled] == [1, 2]
    for a, b in zip(eager, compiled, strict=True):
        assert a["pack/trained_tokens"] == b["pack/trained_tokens"] > 0
        for metric in ("loss/total", "train/grad_norm"):
            assert a[metric] == pytest.approx(b[metric], rel=1e-4), (a["step"], metric)
    for a, b in zip(*map(played, runs.values()), strict=True):
        assert a["spec"] == b["spec"]
        assert [turn["ids"] for turn in a["turns"]] == [turn["ids"] for turn in b["turns"]]
    eager, compiled = (checkpoint.load(run / "step_2").weights for run in runs.values())
    for name in eager:
        gap = torch.linalg.vector_norm(eager[name] - compiled[name])
        assert gap <= 1e-5 * torch.linalg.vector_norm(eager[name]), name
