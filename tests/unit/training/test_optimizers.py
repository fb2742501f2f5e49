"""torchao's 8-bit optimizers on fp32 masters: against AdamW, in bytes, and resumed."""

from pathlib import Path

import pytest
import torch
from torch import nn

from components.training import checkpoint
from components.training.optimizers import OptimizerComponent, set_learning_rate
from components.training.parallelize import World
from components.training.precision import MasterWeights
from components.training.resume_state import load_weights

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def problems(target, **settings):
    found = []
    OptimizerComponent().check({"_component_": target, **settings}, "optimizer", found)
    return found


def test_names_that_are_no_optimizers_are_refused(monkeypatch):
    assert problems("torch.optim.AdamW", lr=1e-3) == []
    assert problems("torchao.optim.AdamW8bit", lr=1e-3) == []
    (paged,) = problems("torchao.optim.PagedAdamW8bit", lr=1e-3)
    assert "'torchao.optim' has no 'PagedAdamW8bit'; did you mean 'AdamW8bit'?" in paged
    (absent,) = problems("bitsandbytes.optim.PagedAdamW8bit", lr=1e-3)
    assert "no module 'bitsandbytes' is installed" in absent
    offload = problems("torchao.optim.CPUOffloadOptimizer")
    assert any("fp32 master weights already are" in text for text in offload)
    (typo,) = problems("torchao.optim.AdamW8bit", lrr=1e-3)
    assert "did you mean 'lr'" in typo
    monkeypatch.setenv("WORLD_SIZE", "2")
    (ranks,) = problems("torchao.optim.AdamW8bit")
    assert "optimizer._component_ = 'torchao.optim.AdamW8bit': its states cannot be" in ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles with triton")
def test_a_machine_without_a_compiler_is_told(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (text,) = problems("torchao.optim.AdamW8bit")
    assert "no C++ compiler ('no-such-compiler'" in text
    assert problems("torch.optim.AdamW") == []


def test_learning_rates_that_are_tensors():
    group = {"lr": torch.tensor(1e-3)}
    kept = group["lr"]
    set_learning_rate(group, 5e-4)
    assert group["lr"] is kept  # compiled code has read it
    assert float(kept) == pytest.approx(5e-4)
    group = {"lr": 1e-3}
    set_learning_rate(group, 5e-4)
    assert group["lr"] == 5e-4


def trainee(optimizer):
    """A bf16 model with its masters and an optimizer that has not stepped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).bfloat16()
    masters = MasterWeights(model)
    return model, masters, optimizer(masters.parameters(), lr=1e-3, weight_decay=0.0)


def train(model, masters, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, 32, 64, generator=generator).bfloat16()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        masters.publish()


def weights(masters):
    return {name: p.detach().clone() for name, p in masters.named_parameters()}


@pytest.mark.compile
def test_eight_bits_train_like_adamw_and_resume_bitwise(tmp_path):
    from torchao.optim import AdamW8bit

    model, masters, optimizer = trainee(AdamW8bit)
    start = weights(masters)
    train(model, masters, optimizer, range(3))
    checkpoints = checkpoint.Checkpoints(tmp_path, ALONE)
    facts = {"step": 3, "seed": 0}
    checkpoints.save(masters, optimizer, None, facts, take_model=lambda changing: Path.mkdir)
    path = checkpoint.last_whole(tmp_path)
    assert path is not None
    train(model, masters, optimizer, range(3, 6))
    whole = weights(masters)

    again = trainee(AdamW8bit)
    checkpoints.restore(path, again[1], again[2], None, seed=0)
    train(*again, range(3, 6))
    resumed = weights(again[1])
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    lost = trainee(AdamW8bit)  # the test would see a lost state
    load_weights(lost[1].named_parameters(), checkpoint.load(path).weights)
    lost[1].publish()
    train(*lost, range(3, 6))
    assert not torch.equal(weights(lost[1])["0.weight"], whole["0.weight"])

    # Two states of a byte per number, and a float32 for each 256; AdamW's take eight.
    entry = optimizer.state_dict()["state"][0]
    parts = [entry[key].__tensor_flatten__()[0] for key in ("exp_avg", "exp_avg_sq")]
    held = sum(
        getattr(entry[key], part).nbytes
        for key, names in zip(("exp_avg", "exp_avg_sq"), parts, strict=True)
        for part in names
        if part != "qmap"  # 256 numbers, whatever the size
    )
    assert held == 2 * (64 * 128 + 64 * 128 // 256 * 4)

    plain = trainee(torch.optim.AdamW)
    train(*plain, range(6))
    for name, value in weights(plain[1]).items():
        moved, wanted = whole[name] - start[name], value - start[name]
        assert wanted.abs().max() > 1e-3
        assert torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), 0) > 0.99
