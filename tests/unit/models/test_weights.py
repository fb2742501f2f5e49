import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.attention.plan import MaskPlan
from components.models import weights
from components.models.lora import adapters
from components.models.smollm2 import lora_smollm2, smollm2
from components.models.weights import load_hf, save_hf

from . import tiny


def build(directory, dtype=torch.float32):
    return smollm2(directory, dtype=dtype, backend="folded")


def refused(directory, state, tie=True):
    with pytest.raises(ValueError, match="do not fit the model") as error:
        build(tiny.write(directory, state=state, tie=tie))
    return str(error.value)


def test_missing_tensors_are_listed(tmp_path):
    state = tiny.tensors()
    for name in list(state):
        if ".mlp." in name:
            del state[name]
    message = refused(tmp_path / "m", state)
    assert "6 missing: model.layers.0.mlp.gate_proj.weight; " in message
    assert "and 2 more" in message
    assert str(tmp_path / "m") in message


def test_foreign_and_misshapen_tensors_are_listed(tmp_path):
    state = tiny.tensors()
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    state["model.norm.weight"] = torch.zeros(25)
    message = refused(tmp_path / "m", state)
    assert "1 not in the model: model.layers.0.self_attn.q_proj.bias" in message
    assert "1 of another shape: model.norm.weight [25], the model has [24]" in message


def test_a_layer_too_many_is_foreign(tmp_path):
    state = tiny.tensors()
    state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(40, 24)
    assert "1 not in the model: model.layers.2.mlp.up_proj.weight" in refused(tmp_path / "m", state)


def test_a_stored_copy_of_the_tied_head_must_be_one(tmp_path):
    state = tiny.tensors()
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    build(tiny.write(tmp_path / "same", state=state))
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    assert "1 not in the model: lm_head.weight" in refused(tmp_path / "other", state)


def test_no_weight_file_is_an_error(tmp_path):
    directory = tiny.write(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        build(directory)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_type", "qwen2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
    ],
)
def test_another_architecture_is_refused(tmp_path, setting, value):
    directory = tiny.write(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text()) | {setting: value}
    (directory / "config.json").write_text(json.dumps(config))
    shown = value["rope_type"] if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=rf"config\.json: \w+ is {shown!r}"):
        build(directory)


def test_shards_are_read_through_the_index(tmp_path):
    directory = tiny.write(tmp_path / "m")
    state = tiny.tensors()
    whole = build(directory).state_dict()
    (directory / "model.safetensors").unlink()
    names = sorted(state)
    files = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert all(torch.equal(t, whole[name]) for name, t in build(directory).state_dict().items())
    (directory / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model-2\.safetensors"):
        build(directory)


@pytest.mark.parametrize("tie", [True, False])
def test_a_round_trip_is_bit_exact(tmp_path, tie):
    source = tiny.write(tmp_path / "source", tie=tie)
    save_hf(build(source), tmp_path / "saved", source)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["tie_word_embeddings"] is tie


def test_the_saved_dtype_is_chosen_and_written_down(tmp_path):
    source = tiny.write(tmp_path / "source")
    save_hf(build(source), tmp_path / "half", source, dtype=torch.bfloat16)
    save_hf(build(source, torch.bfloat16), tmp_path / "own", source)
    for name in ("half", "own"):
        saved = load_file(tmp_path / name / "model.safetensors")
        assert {t.dtype for t in saved.values()} == {torch.bfloat16}
        assert (
            json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == "bfloat16"
        )


def test_loading_again_copies_into_the_same_parameters(tmp_path):
    source = tiny.write(tmp_path / "source")
    model = build(source)
    parameter = model.layers[0].attn.q_proj.weight
    wanted = parameter.detach().clone()
    with torch.no_grad():
        parameter.zero_()
    load_hf(model, source)
    assert model.layers[0].attn.q_proj.weight is parameter
    assert torch.equal(parameter, wanted)


def test_adapters_are_merged_into_what_is_saved_and_the_model_is_left_alone(tmp_path):
    source = tiny.write(tmp_path / "source")
    model = lora_smollm2(
        source,
        dtype=torch.float32,
        lora_rank=4,
        lora_alpha=8,
        lora_modules=["q_proj", "k_proj", "output_proj", "w1", "w2"],
        backend="folded",
    )
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_b.weight.normal_()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    save_hf(model, tmp_path / "merged", source)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    tokens, positions = torch.tensor([[3, 14, 15, 9]]), torch.arange(4)[None]
    plain = build(tmp_path / "merged")
    ours = model(tokens, mask=MaskPlan.causal(4), input_pos=positions)
    merged = plain(tokens, mask=MaskPlan.causal(4), input_pos=positions)
    assert torch.allclose(ours, merged, atol=1e-4)
    assert not torch.equal(plain.layers[0].mlp.w1.weight, before["layers.0.mlp.w1.weight"])

    # weights handed in by the caller (gathered from shards) take the place of the model's own
    state = {n: torch.zeros_like(t) if ".lora_b." in n else t for n, t in before.items()}
    save_hf(model, tmp_path / "given", source, state=state)
    base = load_file(source / "model.safetensors")
    given = load_file(tmp_path / "given" / "model.safetensors")
    assert all(torch.equal(base[name], given[name]) for name in base)


def test_a_save_that_dies_leaves_the_old_directory(tmp_path, monkeypatch):
    source = tiny.write(tmp_path / "source")
    model = build(source)
    target = tmp_path / "saved"
    save_hf(model, target, source)
    whole = load_file(target / "model.safetensors")
    with torch.no_grad():
        model.norm.scale.add_(1)

    def die(tensors, path, metadata):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(weights, "save_file", die)
        with pytest.raises(KeyboardInterrupt):
            save_hf(model, target, source)
    kept = load_file(target / "model.safetensors")
    assert all(torch.equal(kept[name], whole[name]) for name in whole)
    save_hf(model, target, source)  # what the killed run left is no obstacle
    fresh = load_file(target / "model.safetensors")
    assert torch.equal(fresh["model.norm.weight"], whole["model.norm.weight"] + 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved", "source"]


def test_the_source_is_never_overwritten(tmp_path):
    source = tiny.write(tmp_path / "source")
    with pytest.raises(ValueError, match="the model came from"):
        save_hf(build(source), source, source)
