"""A tiny random gpt-oss with every feature through the whole recipe, by YAML alone."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.runs import rows
from tests.recipes.tiny_model import TOKENIZER_FILES, VOCAB
from tests.unit.models.gpt_oss import tiny

pytestmark = pytest.mark.model
END = 2
SETTINGS = {
    "num_steps": 2,
    "save_every": 1,
    "eval": "null",
    "warm_start__num_steps": 0,
    "rollout__max_turn_tokens": 24,
    "rollout__max_turns": 3,
}


@pytest.fixture(scope="module")
def directory(tiny_model_dir, tmp_path_factory):
    """The tiny gpt-oss over SmolLM2's vocabulary, made to end about one turn in ten."""
    state = tiny.tensors()
    generator = torch.Generator().manual_seed(7)
    state["model.embed_tokens.weight"] = torch.randn(VOCAB, tiny.WIDTH, generator=generator)
    head = torch.randn(VOCAB, tiny.WIDTH, generator=generator) * 0.05
    head[END] *= 30
    state["lm_head.weight"] = head
    path = tiny.write(
        tmp_path_factory.mktemp("models") / "gpt_oss",
        state=state,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        eos_token_id=END,
    )
    for name in TOKENIZER_FILES:
        shutil.copyfile(tiny_model_dir / name, path / name)
    return path


def changed(directory, run, step=2):
    """Names of the tensors that training moved."""
    before = load_file(directory / "model.safetensors")
    after = load_file(run / f"step_{step}/model.safetensors")
    assert after.keys() == before.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.slow
def test_everything_is_trained_and_the_routing_is_logged(tune, directory, tmp_path):
    tune.train(
        tmp_path / "run",
        model_dir=directory,
        model="components.models.gpt_oss.gpt_oss",
        model__checkpoint_activations="true",
        **SETTINGS,
    )
    first, second = rows(tmp_path / "run")
    for row in (first, second):
        assert row["mismatch/kl"] < 1e-6  # engine and trainer see the same windows and sinks
        assert row["mismatch/route_frac"] == 0.0
        assert 1 / tiny.EXPERTS <= row["moe/load_max_frac"] <= 0.5
        assert 0 < row["moe/load_entropy"] <= 1
        assert row["policy/clip_frac_low"] == row["policy/clip_frac_high"] == 0.0
    assert first["policy/logprob_gain"] > 0
    moved = changed(directory, tmp_path / "run")
    for part in ("self_attn.sinks", "mlp.router.weight", "mlp.experts.gate_up_proj"):
        assert f"model.layers.0.{part}" in moved


@pytest.mark.slow
def test_adapters_of_attention_and_experts(tune, directory, tmp_path):
    tune.train(
        tmp_path / "run",
        model_dir=directory,
        dtype="bf16",
        optimizer__lr=1e-2,
        model="components.models.gpt_oss.lora_gpt_oss",
        model__lora_rank=4,
        model__lora_alpha=8,
        model__lora_modules="[q_proj, down_proj]",
        **SETTINGS,
    )
    for row in rows(tmp_path / "run"):
        assert row["mismatch/kl"] < 5e-2
        assert row["mismatch/route_frac"] < 0.2
    before = load_file(directory / "model.safetensors")
    after = load_file(tmp_path / "run/step_2/model.safetensors")
    for name, value in after.items():
        assert value.dtype == torch.bfloat16
        same = torch.equal(value, before[name].to(torch.bfloat16))
        assert same != name.endswith(("q_proj.weight", "experts.down_proj")), name
