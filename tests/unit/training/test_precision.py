"""What a model computes in, and fp32 master weights of a bf16 model."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from components.training import precision
from components.training.precision import MasterWeights, settle_dtype


def model(dtype, *, seed=0):
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    return layers.to(dtype)


def test_a_bf16_weight_moves_by_updates_that_would_round_away():
    layer = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.constant_(layer.weight, 1.0)
    masters = MasterWeights(layer)
    (master,) = masters.parameters()
    for _ in range(1000):
        master.grad = torch.full_like(master, -1.0)
        with torch.no_grad():
            master -= 1e-5 * master.grad
    masters.publish()
    assert master.item() == pytest.approx(1.01, abs=1e-4)
    assert layer.weight.item() == torch.tensor(1.01).to(torch.bfloat16).item()
    assert torch.tensor(1.0).bfloat16() + 1e-5 == 1.0  # what would have happened without


def test_gradients_are_added_up_in_fp32():
    layer = model(torch.bfloat16)
    masters = MasterWeights(layer)
    data = torch.randn(64, 8).bfloat16()
    expected = {name: torch.zeros(p.shape) for name, p in layer.named_parameters()}
    plain = model(torch.bfloat16)
    for row in data:
        layer(row).sum().backward()
        plain.zero_grad()
        plain(row).sum().backward()
        for name, p in plain.named_parameters():
            expected[name] += p.grad.float()
    assert all(p.grad is None for p in layer.parameters())  # moved, not kept twice
    for name, master in masters.named_parameters():
        assert master.dtype == torch.float32
        assert torch.equal(master.grad, expected[name])


def test_fp32_parameters_are_their_own_masters():
    layer = model(torch.float32)
    masters = MasterWeights(layer)
    assert [id(p) for p in masters.parameters()] == [id(p) for p in layer.parameters()]
    layer(torch.ones(8)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    before = [p.detach().clone() for p in layer.parameters()]
    masters.publish()
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_frozen_parameters_have_none():
    layer = model(torch.bfloat16)
    layer[0].requires_grad_(False)
    assert [name for name, _ in MasterWeights(layer).named_parameters()] == ["2.weight", "2.bias"]
    layer.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        MasterWeights(layer)


def test_mixed_precision_of_bf16_weights_and_fp32_adapters():
    layer = model(torch.bfloat16)
    layer[2].float()
    masters = dict(MasterWeights(layer).named_parameters())
    assert masters["2.weight"] is layer[2].weight
    assert masters["0.weight"] is not layer[0].weight
    assert torch.equal(masters["0.weight"], layer[0].weight.float())


@pytest.mark.parametrize(
    ("asked", "device", "cuda", "products", "settled", "said"),
    [
        ("auto", "cpu", False, True, "bf16", None),
        ("auto", "cpu", False, False, "fp32", "dtype: fp32: this CPU has no products in bf16"),
        ("auto", "cpu", True, False, "fp32", "dtype: fp32: this CPU has no products in bf16"),
        ("auto", "auto", False, False, "fp32", "dtype: fp32: this CPU has no products in bf16"),
        ("auto", "auto", True, False, "bf16", None),
        ("auto", "cuda", True, False, "bf16", None),
        ("bf16", "cpu", False, True, "bf16", None),
        ("bf16", "auto", True, False, "bf16", None),
        ("bf16", "cpu", False, False, "bf16", "fp32 or auto is many times faster"),
        ("fp32", "cpu", False, True, "fp32", None),
        ("fp32", "auto", True, True, "fp32", None),
        ("fp32", "cpu", False, False, "fp32", None),
    ],
)
def test_auto_is_bf16_where_there_are_products_in_bf16(
    asked, device, cuda, products, settled, said, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(precision, "multiplies_bf16", lambda: products)
    cfg = OmegaConf.create({"dtype": asked, "device": device})
    assert settle_dtype(cfg) is {"bf16": torch.bfloat16, "fp32": torch.float32}[settled]
    assert cfg.dtype == settled  # what config.yaml tells, and what a resumed run is compared with
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == (said is not None)
    assert said is None or said in warnings[0]
