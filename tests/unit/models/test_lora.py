import logging

import pytest
import torch
from torchtune.modules.peft import disable_adapter, get_adapter_params

from components.attention.plan import MaskPlan
from components.models.lora import AdapterLinear, adapters, merged_weight
from components.models.smollm2 import lora_smollm2, smollm2

from . import tiny

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])


@pytest.fixture
def directory(tmp_path):
    return tiny.write(tmp_path / "tiny")


def lora(directory, modules=("q_proj", "w2"), dtype=torch.float32, **settings):
    settings = {"lora_rank": 4, "lora_alpha": 8, "backend": "folded"} | settings
    return lora_smollm2(directory, dtype=dtype, lora_modules=list(modules), **settings)


def logits(model):
    return model(TOKENS, mask=MaskPlan.causal(7), input_pos=torch.arange(7)[None])


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["q_proj", "o_proj"], r"'o_proj' \(did you mean 'output_proj'\?\)"),
        (["gate_proj"], r"'gate_proj' \(did you mean 'w1'\?\)"),
        (["up_proj"], r"'up_proj' \(did you mean 'w3'\?\)"),
        (["down_proj"], r"'down_proj' \(did you mean 'w2'\?\)"),
        (["q_porj"], r"'q_porj' \(did you mean 'q_proj'\?\)"),
        (["xyzzy"], r"named 'xyzzy'; allowed: q_proj, k_proj, v_proj, output_proj, w1, w2, w3"),
        ([], "must be a list of names, not"),
        ("q_proj", "must be a list of names, not 'q_proj'"),
    ],
)
def test_names_that_match_nothing_are_an_error(directory, modules, message):
    with pytest.raises(ValueError, match=message):
        lora_smollm2(
            directory, dtype=torch.float32, lora_rank=4, lora_alpha=8, lora_modules=modules
        )


@pytest.mark.parametrize(("key", "value"), [("lora_rank", 0), ("lora_alpha", 0.0)])
def test_a_rank_or_alpha_that_trains_nothing_is_an_error(directory, key, value):
    with pytest.raises(ValueError, match=f"{key} must be"):
        lora(directory, **{key: value})


def test_the_adapters_are_counted_and_alone_trained(directory, caplog):
    with caplog.at_level(logging.INFO):
        model = lora(directory, ("q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"))
    assert "14 adapters of rank 4" in caplog.text
    assert len(adapters(model)) == 14
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(get_adapter_params(model))
    assert all(".lora_a." in name or ".lora_b." in name for name in trained)
    # rank * (in + out) per linear: q, k, v, o and three of the MLP, in two layers
    sizes = [24 + 32, 24 + 16, 24 + 16, 32 + 24, 24 + 40, 40 + 24, 24 + 40]
    assert sum(p.numel() for p in get_adapter_params(model).values()) == 2 * 4 * sum(sizes)


def test_a_fresh_adapter_is_the_base_model_and_a_trained_one_can_be_switched_off(directory):
    base = logits(smollm2(directory, dtype=torch.float32, backend="folded"))
    model = lora(directory)
    assert torch.equal(logits(model), base)
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_b.weight.normal_()
    assert not torch.allclose(logits(model), base, atol=1e-2)
    with disable_adapter(model):
        assert torch.equal(logits(model), base)
    assert not torch.allclose(logits(model), base, atol=1e-2)


def test_adapters_of_two_models_differ_by_the_seed(directory):
    torch.manual_seed(1)
    first = lora(directory).layers[0].attn.q_proj.lora_a.weight
    torch.manual_seed(1)
    again = lora(directory).layers[0].attn.q_proj.lora_a.weight
    other = lora(directory).layers[0].attn.q_proj.lora_a.weight
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_float32_adapter_on_a_bfloat16_base_takes_small_updates(directory):
    model = lora(directory, dtype=torch.bfloat16)
    weight = model.layers[0].attn.q_proj.lora_a.weight
    assert weight.dtype == torch.float32
    assert model.layers[0].attn.q_proj.weight.dtype == torch.bfloat16
    with torch.no_grad():
        model.layers[0].attn.q_proj.lora_b.weight.normal_()
    logits(model).square().mean().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1e-6)
    assert not torch.equal(weight, before)


def test_the_adapter_is_the_formula_and_folds_into_the_weight():
    torch.manual_seed(0)
    linear = AdapterLinear(24, 16, rank=3, alpha=6.0)
    with torch.no_grad():
        linear.lora_b.weight.normal_()
    x = torch.randn(5, 24)
    w, a, b = (
        t.detach().double() for t in (linear.weight, linear.lora_a.weight, linear.lora_b.weight)
    )
    expected = x.double() @ (w + 6.0 / 3 * b @ a).T
    assert torch.allclose(linear(x).double(), expected, atol=1e-5)
    kept = linear.weight.detach().clone()
    folded = merged_weight(linear.weight, linear.lora_a.weight, linear.lora_b.weight, scale=2.0)
    assert torch.allclose(folded.double(), w + 2.0 * b @ a, atol=1e-6)
    assert torch.equal(linear.weight, kept)
