"""What the Hugging Face builders read from config.json, and what they refuse."""

import json
from importlib import import_module

import pytest
import torch

from components.models import from_hf
from components.models.from_hf import lora_policy, policy
from components.models.hf_config import model_windows
from components.training.config import instantiate
from components.training.precision import MasterWeights

from . import tiny


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "qwen3"}, r"model_type is 'qwen3' \(the nearest is 'qwen2'.*allowed: lla"),
        ({"model_type": "bert"}, "model_type is 'bert'; allowed: llama, mistral, qwen2, phi3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"head_dim": 8}, "head_dim is 8; from_hf builds 6 only"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; from_hf builds 0.0 only"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        policy(tiny.write_narrow(tmp_path / "m", **settings), dtype=torch.float32)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, [None, None, None]),
        ({"sliding_window": None}, [None, None, None]),
        ({"sliding_window": 128}, [127, 127, 127]),
        ({"sliding_window": 128, "use_sliding_window": False}, [None, None, None]),
        (
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 8],
        ),
        (
            {
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [8, None, 8],
        ),
    ],
)
def test_a_window_of_w_keys_reaches_w_minus_1_back(raw, expected):
    assert model_windows({"num_hidden_layers": 3} | raw) == expected


def test_the_users_window_wins(tmp_path):
    directory = tiny.write_narrow(tmp_path / "m", model_type="mistral", sliding_window=5)
    windows = {
        setting: [layer.attn.window for layer in policy(directory, **settings).layers]
        for setting, settings in {
            "model": {"dtype": torch.float32},
            "none": {"dtype": torch.float32, "window": None},
            "two": {"dtype": torch.float32, "window": [1, None]},
        }.items()
    }
    assert windows == {"model": [4, 4], "none": [None, None], "two": [1, None]}


def test_a_model_by_yaml_alone(tmp_path):
    """As the recipe builds it: the directory and the dtype beside what the config says."""
    from omegaconf import OmegaConf

    node = OmegaConf.create(
        {
            "_component_": "components.models.from_hf.lora_policy",
            "lora_rank": 2,
            "lora_alpha": 4,
            "lora_modules": ["q_proj", "w2"],
            "sinks": -4.0,
            "window": [3, None],
            "prefix": 2,
        }
    )
    model = instantiate(node, tiny.write_narrow(tmp_path / "m"), dtype=torch.bfloat16)
    trained = {name for name, _ in MasterWeights(model).named_parameters()}
    assert {name.rpartition(".attn.")[2] for name in trained if "sinks" in name} == {"sinks"}
    assert len(trained) == 2 * (2 * 2 + 1)
    assert model.layers[0].attn.q_proj.weight.dtype == torch.bfloat16
    assert model.layers[0].attn.q_proj.lora_a.weight.dtype == torch.float32
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])


def test_all_layers_share_one_rotary_table_that_a_dtype_does_not_round(tmp_path):
    for model_type in ("llama", "phi3"):
        directory = tiny.write_narrow(tmp_path / model_type, model_type=model_type)
        if model_type == "phi3":
            fuse(directory)
        model = policy(directory, dtype=torch.bfloat16)
        ropes = {id(layer.attn.pos_embeddings): layer.attn.pos_embeddings for layer in model.layers}
        (rope,) = ropes.values()
        assert rope.cache.dtype == torch.float32
        assert rope.cache.device.type == "cpu"


def fuse(directory):
    """Rewrite the weights as Phi 3 names them."""
    from safetensors.torch import load_file, save_file

    state = load_file(directory / "model.safetensors")
    for i in range(2):
        block = f"model.layers.{i}"
        for fused, parts in {
            "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        }.items():
            pieces = [state.pop(f"{block}.{part}.weight") for part in parts]
            state[f"{block}.{fused}.weight"] = torch.cat(pieces)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, directory / "model.safetensors")


# What config.json of the released models says, beside what all of them share.
RELEASED = {
    "qwen2_5_0_5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 21,
        "attention_dropout": 0.0,
    },
    "llama3_2_1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "mistral_7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "phi3_mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": 2047,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_are_what_torchtunes_own_builders_make(name, tmp_path, monkeypatch):
    """Sizes, names, epsilon and rotary table of the model that torchtune publishes."""
    raw = {"hidden_act": "silu"} | RELEASED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(from_hf, "load_hf", lambda model, directory: None)
    ours = policy(tmp_path, dtype=torch.bfloat16)
    with torch.device("meta"):
        theirs = getattr(import_module(f"torchtune.models.{PACKAGE[name]}"), name)()
    shapes = {key: value.shape for key, value in theirs.state_dict().items()}
    assert {key: value.shape for key, value in ours.state_dict().items()} == shapes
    assert ours.norm.eps == theirs.norm.eps
    assert ours.layers[0].mlp_norm.eps == theirs.layers[0].mlp_norm.eps
    rope = theirs.layers[0].attn.pos_embeddings
    rope.rope_init()  # off the meta device
    table = ours.layers[0].attn.pos_embeddings.cache
    shared = min(len(table), len(rope.cache))
    torch.testing.assert_close(table[:shared], rope.cache[:shared], rtol=0, atol=1e-6)


PACKAGE = {
    "qwen2_5_0_5b": "qwen2_5",
    "llama3_2_1b": "llama3_2",
    "mistral_7b": "mistral",
    "phi3_mini": "phi3",
}


def test_settings_of_adapters_are_checked_first(tmp_path):
    lora = {"lora_rank": 2, "lora_alpha": 4.0}
    with pytest.raises(ValueError, match=r"'o_proj' \(did you mean 'output_proj'\?\)"):
        lora_policy(tmp_path / "none", dtype=torch.float32, lora_modules=["o_proj"], **lora)
