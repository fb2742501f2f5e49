"""Adapters alone, loaded by PEFT over transformers' model: the logits are those of our model."""

import json

import pytest
import torch

from components.attention.plan import MaskPlan
from components.models.export import Exporter
from components.models.from_hf import lora_policy
from components.models.gpt_oss import lora_gpt_oss
from components.models.smollm2 import lora_smollm2
from tests.unit.models import tiny
from tests.unit.models.gpt_oss import tiny as tiny_gpt_oss

# PEFT 0.21 refuses to run beside the torchao that torchtune 0.6.1 needs, although plain linears
# have nothing to do with it.
TORCHAO = "peft.tuners.lora.torchao.is_torchao_available"

peft = pytest.importorskip("peft", reason="pip install -e .[dev] brings it")

LLAMA = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
ATTENTION = LLAMA[:4]
TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])
MODELS = {
    "smollm2": (tiny.write, lora_smollm2, {"lora_modules": LLAMA}),
    "from_hf": (tiny.write_narrow, lora_policy, {"lora_modules": ["q_proj", "w2"]}),
    "gpt_oss": (
        tiny_gpt_oss.write,
        lora_gpt_oss,
        {"lora_modules": ATTENTION, "train_sinks": False},
    ),
}


@pytest.mark.parametrize(("write", "build", "settings"), MODELS.values(), ids=MODELS)
def test_peft_loads_what_was_trained(tmp_path, monkeypatch, write, build, settings):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(TORCHAO, lambda: False)

    directory = write(tmp_path / "base")
    model = build(directory, dtype=torch.float32, lora_rank=3, lora_alpha=7, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name:
                param.normal_(std=0.2)
    exporter = Exporter(model, directory, what="adapter")
    exporter.take(changing=())(tmp_path / "adapter")

    def theirs():
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    adapted = peft.PeftModel.from_pretrained(theirs(), tmp_path / "adapter")
    positions = torch.arange(TOKENS.shape[1])
    with torch.no_grad():
        ours = model(TOKENS, mask=MaskPlan.causal(len(positions)), input_pos=positions[None])
        expected, base = adapted(TOKENS).logits[0], theirs()(TOKENS).logits[0]
    ours = ours.reshape(expected.shape)
    assert torch.allclose(ours, expected, atol=1e-4)
    assert not torch.allclose(ours, base, atol=0.1)  # the adapter does something
    # every tensor of the file was taken: PEFT only warns of names that it does not know
    named = dict(adapted.named_parameters())
    assert sum(".lora_" in name for name in named) == 2 * len(settings["lora_modules"]) * len(
        model.layers
    )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(directory)
