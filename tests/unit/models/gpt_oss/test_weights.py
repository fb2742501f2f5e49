import json

import pytest
import torch
from safetensors.torch import load_file

from components.models.gpt_oss import gpt_oss
from components.models.weights import hf_state, load_hf, save_hf

from . import tiny


def refused(directory, state):
    with pytest.raises(ValueError, match="do not fit the model") as error:
        gpt_oss(tiny.write(directory, state=state), dtype=torch.float32)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_bit_exact_sinks_included(tmp_path, dtype):
    source = tiny.write(tmp_path / "source", state=tiny.tensors(dtype=dtype))
    model = gpt_oss(source, dtype=dtype)
    assert {layer.attn.sinks.dtype for layer in model.layers} == {torch.float32}
    assert model.layers[0].mlp.router.weight.dtype == dtype
    save_hf(model, tmp_path / "saved", source)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == dtype, name
        assert torch.equal(after[name], value), name
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_a_packed_directory_round_trips_through_bfloat16(tmp_path):
    source = tiny.write_packed(tmp_path / "packed")
    model = gpt_oss(source, dtype=torch.bfloat16)
    save_hf(model, tmp_path / "saved", source)
    again = gpt_oss(tmp_path / "saved", dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    packed = load_file(source / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    kept = [name for name in packed if not name.endswith(("_blocks", "_scales"))]
    assert all(torch.equal(saved[name], packed[name]) for name in kept)


def test_the_rows_of_q_and_k_are_paired_and_all_else_is_as_stored(tmp_path):
    state = tiny.tensors()
    model = gpt_oss(tiny.write(tmp_path / "m", state=state), dtype=torch.float32)
    attention, block = model.layers[2].attn, "model.layers.2.self_attn"
    half = tiny.HEAD // 2
    for ours, name, heads in (
        (attention.q_proj, "q_proj", tiny.HEADS),
        (attention.k_proj, "k_proj", tiny.KV_HEADS),
    ):
        for part in ("weight", "bias"):
            mine, theirs = getattr(ours, part), state[f"{block}.{name}.{part}"]
            for head in range(heads):
                for pair in range(half):
                    row = head * tiny.HEAD
                    # Hugging Face turns dimensions i and i + H / 2 together, ours 2i and 2i + 1
                    assert torch.equal(mine[row + 2 * pair], theirs[row + pair])
                    assert torch.equal(mine[row + 2 * pair + 1], theirs[row + half + pair])
    assert torch.equal(attention.v_proj.weight, state[f"{block}.v_proj.weight"])
    experts, stored = model.layers[2].mlp.experts, "model.layers.2.mlp.experts"
    assert torch.equal(experts.down_proj.weight, state[f"{stored}.down_proj"])
    assert torch.equal(experts.gate_up_proj.bias, state[f"{stored}.gate_up_proj_bias"])


@pytest.mark.parametrize(
    "name",
    ["self_attn.sinks", "mlp.router.bias", "mlp.experts.down_proj_bias", "self_attn.o_proj.bias"],
)
def test_every_tensor_is_needed(tmp_path, name):
    state = tiny.tensors()
    for layer in range(tiny.LAYERS):
        del state[f"model.layers.{layer}.{name}"]
    assert f"4 missing: model.layers.0.{name}; " in refused(tmp_path / "m", state)


def test_foreign_and_misshapen_tensors_are_listed(tmp_path):
    state = tiny.tensors()
    state["model.layers.0.mlp.gate.weight"] = torch.zeros(3)
    state["model.layers.1.self_attn.sinks"] = torch.zeros(5)
    message = refused(tmp_path / "m", state)
    assert "1 not in the model: model.layers.0.mlp.gate.weight" in message
    assert "1 of another shape: model.layers.1.self_attn.sinks [5], the model has [4]" in message


def test_half_of_a_packed_pair_is_missing_and_foreign(tmp_path):
    state = tiny.packed(tiny.tensors())
    del state["model.layers.0.mlp.experts.down_proj_scales"]
    message = refused(tmp_path / "m", state)
    assert "1 missing: model.layers.0.mlp.experts.down_proj" in message
    assert "1 not in the model: model.layers.0.mlp.experts.down_proj_blocks" in message


def test_loading_again_copies_into_the_same_parameters(tmp_path):
    source = tiny.write(tmp_path / "source")
    model = gpt_oss(source, dtype=torch.float32)
    sinks = model.layers[0].attn.sinks
    wanted = {name: value.clone() for name, value in hf_state(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_hf(model, source)
    assert model.layers[0].attn.sinks is sinks
    assert all(torch.equal(value, wanted[name]) for name, value in hf_state(model).items())


def test_small_updates_of_sinks_are_kept_until_they_are_saved(tmp_path):
    source = tiny.write(tmp_path / "source", state=tiny.tensors(dtype=torch.bfloat16))
    model = gpt_oss(source, dtype=torch.bfloat16)
    sinks = model.layers[0].attn.sinks
    before = sinks.detach().clone()
    with torch.no_grad():
        for _ in range(1000):
            sinks += 1e-4
    assert torch.allclose(sinks, before + 0.1, atol=1e-3)
    save_hf(model, tmp_path / "saved", source)
    saved = load_file(tmp_path / "saved" / "model.safetensors")["model.layers.0.self_attn.sinks"]
    assert torch.equal(saved, sinks.detach().to(torch.bfloat16))
