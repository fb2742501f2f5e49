import logging

import pytest
import torch
from safetensors.torch import load_file
from torchtune.modules.peft import disable_adapter, get_adapter_params

from components.attention.plan import MaskPlan
from components.models.gpt_oss import gpt_oss, lora_gpt_oss
from components.models.lora import adapters
from components.models.weights import save_hf

from . import tiny

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9]])
ALL = ("q_proj", "k_proj", "v_proj", "output_proj", "gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("gpt_oss") / "tiny")


def lora(directory, modules=ALL, dtype=torch.float32, **settings):
    settings = {"lora_rank": 4, "lora_alpha": 8, "backend": "folded"} | settings
    return lora_gpt_oss(directory, dtype=dtype, lora_modules=list(modules), **settings)


def train(model, std=0.1):
    torch.manual_seed(1)
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_b.weight.normal_(std=std)


def logits(model):
    return model(TOKENS, mask=MaskPlan.causal(12), input_pos=torch.arange(12)[None])


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["o_proj"], r"'o_proj' \(did you mean 'output_proj'\?\)"),
        (["w1"], "no module is named 'w1'; allowed: q_proj, .*, gate_up_proj, down_proj"),
        (["gate_up"], r"'gate_up' \(did you mean 'gate_up_proj'\?\)"),
        (["experts"], "no module is named 'experts'"),
        (["router"], "no module is named 'router'"),
        ([], "must be a list of names"),
    ],
)
def test_targets_that_match_nothing_are_an_error(directory, modules, message):
    with pytest.raises(ValueError, match=message):
        lora(directory, modules)


@pytest.mark.parametrize(
    ("modules", "per_layer", "size"),
    [
        (("q_proj",), 1, 4 * (32 + 64)),
        (("q_proj", "output_proj"), 2, 2 * 4 * (32 + 64)),
        (("down_proj",), 1, 8 * 4 * (64 + 32)),  # one for each of 8 experts
        (ALL, 6, 4 * (2 * 96 + 2 * 64) + 8 * 4 * (32 + 128 + 64 + 32)),
    ],
)
def test_the_adapters_are_counted_and_alone_trained(directory, modules, per_layer, size, caplog):
    with caplog.at_level(logging.INFO):
        model = lora(directory, modules)
    assert f"{per_layer * tiny.LAYERS} adapters of rank 4" in caplog.text
    assert len(adapters(model)) == per_layer * tiny.LAYERS
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == get_adapter_params(model).keys()
    assert sum(p.numel() for p in trained.values()) == tiny.LAYERS * size
    assert {p.dtype for p in trained.values()} == {torch.float32}


def test_sinks_are_trained_if_asked_for(directory):
    model = lora(directory, ("q_proj",), train_sinks=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum(name.endswith(".attn.sinks") for name in trained) == tiny.LAYERS


def test_a_fresh_adapter_is_the_base_model_and_a_trained_one_can_be_switched_off(directory):
    base = logits(gpt_oss(directory, dtype=torch.float32, backend="folded"))
    model = lora(directory)
    assert torch.equal(logits(model), base)
    train(model)
    assert not torch.allclose(logits(model), base, atol=1e-1)
    with disable_adapter(model):
        assert torch.equal(logits(model), base)
    assert not torch.allclose(logits(model), base, atol=1e-1)


@pytest.mark.parametrize("experts", ["grouped", "loop"])
def test_an_experts_adapter_is_the_formula(directory, experts):
    model = lora(directory, ("down_proj",), experts=experts)
    train(model)
    seen = {}
    module = model.layers[1].mlp.experts.down_proj
    module.register_forward_hook(lambda m, args, out: seen.update(args=args, out=out))
    logits(model)
    rows, groups = seen["args"]
    a, b = (p.weight.double() for p in (module.lora_a, module.lora_b))
    for row, expert, got in zip(rows.double(), groups.expert, seen["out"], strict=True):
        merged = module.weight[expert].double() + 8 / 4 * a[expert] @ b[expert]
        assert torch.allclose(row @ merged + module.bias[expert], got.double(), atol=1e-4)


def test_gradients_reach_the_adapters_of_the_experts_that_are_used(directory):
    model = lora(directory, checkpoint_activations=True)
    train(model)
    logits(model).square().mean().backward()
    for name, module in adapters(model).items():
        for part in (module.lora_a, module.lora_b):
            assert part.weight.grad is not None, name
            assert part.weight.grad.abs().sum() > 0, name
    mlp = model.layers[0].mlp
    used = mlp.load > 0
    assert 0 < used.sum() < tiny.EXPERTS
    grads = mlp.experts.down_proj.lora_a.weight.grad.abs().sum((1, 2))
    assert torch.equal(grads > 0, used)


def test_a_float32_adapter_on_bfloat16_experts_takes_small_updates(directory):
    model = lora(directory, ("gate_up_proj",), dtype=torch.bfloat16)
    train(model)
    logits(model).square().mean().backward()
    weight = model.layers[0].mlp.experts.gate_up_proj.lora_a.weight
    assert weight.grad.dtype == torch.float32
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1e-6)
    assert not torch.equal(weight, before)


def test_adapters_are_merged_into_what_is_saved_and_the_model_is_left_alone(tmp_path, directory):
    model = lora(directory)
    save_hf(model, tmp_path / "fresh", directory)
    stored = load_file(directory / "model.safetensors")
    fresh = load_file(tmp_path / "fresh" / "model.safetensors")
    assert all(torch.equal(fresh[name], stored[name]) for name in stored)

    train(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    save_hf(model, tmp_path / "merged", directory)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name in stored if not torch.equal(merged[name], stored[name])}
    assert len(changed) == 6 * tiny.LAYERS
    assert not any(name.endswith(("bias", "sinks", "router.weight")) for name in changed)
    plain = gpt_oss(tmp_path / "merged", dtype=torch.float32, backend="folded")
    ours = logits(model)
    assert (ours - logits(plain)).abs().max() < 1e-4 * ours.abs().max()

    module = model.layers[3].mlp.experts.gate_up_proj
    a, b = module.lora_a.weight.double(), module.lora_b.weight.double()
    exact = module.weight.double() + 2 * torch.einsum("eir,ero->eio", a, b)
    got = merged["model.layers.3.mlp.experts.gate_up_proj"].double()
    assert torch.allclose(got, exact, atol=1e-6)
