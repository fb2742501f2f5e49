"""A Qwen2 directory with learned sinks and a window through the whole recipe, by YAML alone."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recipes.runs import rows
from tests.recipes.tiny_model import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS

pytestmark = pytest.mark.model


@pytest.fixture
def qwen2_dir(tiny_model_dir, tmp_path):
    """The tiny model as a Qwen2: biases on q, k and v."""
    directory = tmp_path / "qwen2"
    shutil.copytree(tiny_model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config |= {"use_sliding_window": False}
    (directory / "config.json").write_text(json.dumps(config))
    state = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    heads = {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS}
    for layer in range(NUM_LAYERS):
        for name, num in heads.items():
            bias = torch.randn(num * HEAD_DIM, generator=generator) * 0.05
            state[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_sinks_of_a_qwen2_are_trained_and_saved(tune, qwen2_dir, tmp_path):
    tune.train(
        tmp_path / "run",
        model_dir=qwen2_dir,
        dtype="bf16",
        num_steps=1,
        save_every=1,
        eval="null",
        warm_start__num_steps=0,
        optimizer__lr=1e-3,
        model="components.models.from_hf.policy",
        model__sinks=-1.0,
        model__window="[200, null]",
        model__prefix=8,
    )
    (row,) = rows(tmp_path / "run")
    assert row["policy/logprob_gain"] > 0
    assert row["mismatch/kl"] < 1e-3  # engine and trainer see the same windows and sinks
    before = load_file(qwen2_dir / "model.safetensors")
    after = load_file(tmp_path / "run/step_1/model.safetensors")
    sinks = {f"model.layers.{i}.self_attn.sinks" for i in range(NUM_LAYERS)}
    assert after.keys() - before.keys() == sinks
    for name in sinks:
        assert after[name].dtype == torch.float32
        assert (after[name] != -1.0).all()  # one step of Adam, about the learning rate
        assert (after[name] + 1.0).abs().max() < 2e-3
