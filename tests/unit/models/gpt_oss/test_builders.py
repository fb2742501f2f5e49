import json

import pytest
import torch

from components.models import gpt_oss as family
from components.models.gpt_oss import GPT_OSS_20B, GPT_OSS_120B, build, gpt_oss, random_gpt_oss
from components.models.gpt_oss.config import read_config
from components.models.gpt_oss.rope import Yarn

from . import tiny

RELEASED = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
"""What OpenAI's config.json says, but for layers and experts."""


def released(directory, num_layers, num_experts, **settings):
    directory.mkdir(exist_ok=True)
    kinds = ["sliding_attention", "full_attention"] * (num_layers // 2)
    sizes = {"num_hidden_layers": num_layers, "num_local_experts": num_experts}
    config = tiny.CONFIG | RELEASED | sizes | {"layer_types": kinds} | settings
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def count(model):
    """All parameters, and those that a token uses: 4 experts of each layer."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    config = model.config
    return total, total - experts + experts * config.experts_per_token // config.num_experts


@pytest.mark.parametrize(
    ("config", "layers", "experts", "total", "active"),
    [(GPT_OSS_20B, 24, 32, 20.9, 3.6), (GPT_OSS_120B, 36, 128, 116.8, 5.1)],
)
def test_the_released_sizes_on_the_meta_device(tmp_path, config, layers, experts, total, active):
    directory = released(tmp_path / "m", layers, experts)
    read = read_config(directory)
    assert read.layer_windows == config.layer_windows == (127, None) * (layers // 2)
    model = build(read, dtype=torch.bfloat16)
    assert all(p.is_meta for p in model.parameters())
    billions, used = (number / 1e9 for number in count(model))
    assert round(billions, 1) == total
    # the published count of used parameters leaves the embeddings out
    assert round(used - model.tok_embeddings.weight.numel() / 1e9, 1) == active
    assert model.config.max_positions == 131_072
    assert model.layers[0].attn.sinks.dtype == torch.float32
    assert model.layers[0].attn.window == 127
    assert model.layers[1].attn.window is None
    shapes = {name: tuple(p.shape) for name, p in model.layers[0].named_parameters()}
    assert shapes["mlp.experts.gate_up_proj.weight"] == (experts, 2880, 5760)
    assert shapes["mlp.experts.down_proj.weight"] == (experts, 2880, 2880)
    assert shapes["attn.q_proj.weight"] == (4096, 2880)
    assert shapes["attn.k_proj.bias"] == (512,)


def test_a_builder_with_a_size_refuses_another_one(tmp_path):
    small = tiny.write(tmp_path / "tiny")
    for builder in (family.gpt_oss_20b, family.gpt_oss_120b):
        name = builder.__name__
        with pytest.raises(ValueError, match=rf"what {name} builds: num_layers is 4, not \d+") as e:
            builder(small, dtype=torch.bfloat16)
        assert "Use gpt_oss, which builds any size" in str(e.value)
    lora = {"dtype": torch.bfloat16, "lora_rank": 2, "lora_alpha": 4, "lora_modules": ["q_proj"]}
    with pytest.raises(ValueError, match="Use lora_gpt_oss, which"):
        family.lora_gpt_oss_20b(small, **lora)
    large = released(tmp_path / "120b", 36, 128)
    with pytest.raises(ValueError, match="num_layers is 36, not 24; num_experts is 128, not 32"):
        family.gpt_oss_20b(large, dtype=torch.bfloat16)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        family.gpt_oss_120b(large, dtype=torch.bfloat16)  # the size fits


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("model_type", "qwen2", "model_type is 'qwen2'; gpt_oss builds 'gpt_oss' only"),
        ("attention_bias", False, "attention_bias is False"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("attention_dropout", 0.1, "attention_dropout is 0.1"),
        ("quantization_config", {"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ("output_router_logits", True, "output_router_logits is True"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_type is 'llama3'"),
        ("rope_scaling", {"rope_type": "yarn", "mscale": 1.0}, "mscale"),
        ("num_experts_per_tok", 9, r"experts_per_token \(9\) must be from 1 to num_experts \(8\)"),
        ("layer_types", ["full_attention"], "windows has 1 entries, num_layers is 4"),
    ],
)
def test_settings_that_are_not_built_are_refused(tmp_path, setting, value, message):
    directory = tiny.write(tmp_path / "m", **{setting: value})
    with pytest.raises(ValueError, match=message):
        gpt_oss(directory, dtype=torch.float32)


def test_windows_and_rope_are_read_as_config_json_has_them(tmp_path):
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    config = read_config(tiny.write(tmp_path / "a", layer_types=kinds))
    assert config.layer_windows == (None, tiny.KEYS - 1, None, None)
    assert config.yarn == Yarn(factor=4.0, beta_fast=8.0, original_positions=128)
    assert read_config(tiny.write(tmp_path / "b", sliding_window=None)).windows == (None,) * 4
    # transformers 5 keeps everything of the rope in one place, and rounds unless told otherwise
    rope = {k: v for k, v in tiny.CONFIG["rope_scaling"].items() if k != "truncate"}
    rope["rope_theta"] = 5e3
    five = tiny.write(tmp_path / "c", rope_scaling=None, rope_theta=None, rope_parameters=rope)
    assert read_config(five).rope_base == 5e3
    assert read_config(five).yarn == Yarn(
        factor=4.0, beta_fast=8.0, original_positions=128, truncate=True
    )
    assert read_config(tiny.write(tmp_path / "d", rope_scaling=None)).yarn is None


@pytest.mark.parametrize("setting", ["backend", "experts"])
def test_an_unknown_backend_or_method_is_an_error(tmp_path, setting):
    directory = tiny.write(tmp_path / "m")
    with pytest.raises(ValueError, match="must be one of"):
        gpt_oss(directory, dtype=torch.float32, **{setting: "fast"})


def test_random_weights_follow_the_seed(tmp_path):
    config = read_config(tiny.write(tmp_path / "m"))
    one, same, other = (
        random_gpt_oss(config, dtype=torch.bfloat16, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.attn.sinks"], other["layers.0.attn.sinks"])
    assert one["layers.0.attn.sinks"].abs().min() > 0
