"""A model for others: the whole of it, or its adapters alone."""

import json

import pytest
import torch
from safetensors.torch import load_file

from components.models.export import Exporter
from components.models.from_hf import lora_policy
from components.models.gpt_oss import lora_gpt_oss
from components.models.smollm2 import lora_smollm2, smollm2
from tests.unit.models import tiny
from tests.unit.models.gpt_oss import tiny as tiny_gpt_oss

MODULES = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
RANK, ALPHA = 3, 7.0


@pytest.fixture
def base(tmp_path):
    return tiny.write(tmp_path / "base")


@pytest.fixture
def model(base):
    model = lora_smollm2(
        base, dtype=torch.float32, lora_rank=RANK, lora_alpha=ALPHA, lora_modules=MODULES
    )
    shake(model)
    return model


def shake(model, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name:
                param.normal_(std=0.2)


def export(model, base, path, what):
    Exporter(model, base, what=what).take(changing=())(path)
    file = "adapter_model.safetensors" if what == "adapter" else "model.safetensors"
    return load_file(path / file)


def test_base_and_adapter_are_the_merged_model(model, base, tmp_path):
    """PEFT's rule by hand: W + alpha / r B A, on Hugging Face's weights."""
    adapter = export(model, base, tmp_path / "adapter", "adapter")
    merged = export(model, base, tmp_path / "merged", "full")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert len(adapter) == 2 * 2 * len(MODULES)
    changed = 0
    for name, weight in load_file(base / "model.safetensors").items():
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in adapter:
            a, b = adapter[f"{stem}.lora_A.weight"], adapter[f"{stem}.lora_B.weight"]
            weight = weight + ALPHA / RANK * b @ a
            changed += 1
        assert torch.allclose(merged[name], weight, atol=1e-6), name
    assert changed == 2 * len(MODULES)


@pytest.mark.parametrize("what", ["full", "adapter"])
def test_what_is_taken_is_not_changed_by_later_steps(model, base, tmp_path, what):
    expected = export(model, base, tmp_path / "now", what)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    write = Exporter(model, base, what=what).take(changing=names)
    shake(model, seed=1)
    write(tmp_path / "later")
    found = load_file(next((tmp_path / "later").glob("*model.safetensors")))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(
        not torch.equal(found[name], tensor)
        for name, tensor in export(model, base, tmp_path / "after", what).items()
    )


def test_an_adapter_that_is_not_there_is_refused(base):
    with pytest.raises(ValueError, match="export: adapter: the model has no adapters; use full"):
        Exporter(smollm2(base, dtype=torch.float32), base, what="adapter")


def test_joined_linears_of_phi3_are_refused(base, tmp_path):
    phi3 = tmp_path / "phi3"
    state = {}
    for name, tensor in tiny.tensors(tie=False).items():
        if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate", "up_proj")):
            state[name] = tensor
    for i in range(2):
        block = f"model.layers.{i}"
        state[f"{block}.self_attn.qkv_proj.weight"] = torch.zeros(24 + 12 + 12, 24)
        state[f"{block}.self_attn.o_proj.weight"] = torch.zeros(24, 24)
        state[f"{block}.mlp.gate_up_proj.weight"] = torch.zeros(80, 24)
    tiny.write(phi3, tie=False, state=state)
    config = tiny.CONFIG | {"model_type": "phi3", "head_dim": 6, "tie_word_embeddings": False}
    config |= {"hidden_act": "silu", "sliding_window": None, "original_max_position_embeddings": 32}
    (phi3 / "config.json").write_text(json.dumps(config))
    model = lora_policy(
        phi3, dtype=torch.float32, lora_rank=2, lora_alpha=2, lora_modules=["q_proj"]
    )
    with pytest.raises(ValueError, match="export: adapter: Hugging Face's phi3 joins linears"):
        Exporter(model, phi3, what="adapter")


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (["q_proj"], r"layers.0.attn.sinks is trained and is no adapter"),
        (["q_proj", "down_proj"], r"layers.0.mlp.experts.down_proj adapts every expert"),
    ],
)
def test_what_peft_has_no_place_for_is_refused(tmp_path, modules, said):
    base = tiny_gpt_oss.write(tmp_path / "gpt_oss")
    model = lora_gpt_oss(
        base,
        dtype=torch.float32,
        lora_rank=2,
        lora_alpha=2,
        lora_modules=modules,
        train_sinks=True,
    )
    with pytest.raises(ValueError, match=said):
        Exporter(model, base, what="adapter")
