"""What makes a run smaller, through the real command: two steps, and the second one resumed."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.runs import played, rows, without_timings
from tests.recipes.tiny_model import TOKENIZER_FILES, VOCAB
from tests.unit.models.gpt_oss import tiny

pytestmark = [pytest.mark.model, pytest.mark.slow]
END = 2
SETTINGS = {
    "num_steps": 2,
    "save_every": 1,
    "eval": "null",
    "warm_start__num_steps": 0,
    "checker__levels": 256,  # no two rewards are equal, so that every group is trained
    "rollout__max_turns": 3,
}
LORA = {
    "model__lora_rank": 4,
    "model__lora_alpha": 8,
    "model__lora_modules": "[q_proj, v_proj]",
    "optimizer__lr": 1e-3,
}
SMOL = {"model": "components.models.smollm2.lora_smollm2", **LORA}
GPT_OSS = {
    "model": "components.models.gpt_oss.lora_gpt_oss",
    "dtype": "bf16",
    **LORA,
    "optimizer__lr": 3e-3,  # a smaller step would be lost in the rounding of what is exported
}
OPTIONS = {
    "quantize_base": SMOL | {"model__quantize_base": "true"},
    "packed": GPT_OSS | {"model__experts": "packed"},
    "streamed": GPT_OSS | {"model__experts": "streamed"},
    "adamw8bit": {"optimizer": "{_component_: torchao.optim.AdamW8bit, lr: 1.0e-4}"},
    "checkpoint": {"model__checkpoint_activations": "true"},
}


@pytest.fixture(scope="module")
def packed_dir(tiny_model_dir, tmp_path_factory):
    """A tiny gpt-oss with MXFP4 experts over SmolLM2's vocabulary."""
    state = tiny.tensors(dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(7)
    embeddings = torch.randn(VOCAB, tiny.WIDTH, generator=generator)
    head = torch.randn(VOCAB, tiny.WIDTH, generator=generator) * 0.05
    # One feature that all tokens share, by which a turn ends after ten tokens or so.
    embeddings[:, 0] = 4.0
    head[END] = 0.0
    head[END, 0] = 6.5
    state["model.embed_tokens.weight"] = embeddings.bfloat16()
    state["lm_head.weight"] = head.bfloat16()
    path = tiny.write_packed(
        tmp_path_factory.mktemp("models") / "packed",
        state=state,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        eos_token_id=END,
    )
    for name in TOKENIZER_FILES:
        shutil.copyfile(tiny_model_dir / name, path / name)
    return path


@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains_and_resumes_to_the_same_numbers(tune, packed_dir, tmp_path, name):
    options = SETTINGS | OPTIONS[name]
    if name in ("packed", "streamed"):
        options["model_dir"] = packed_dir
    straight, again = tmp_path / "straight", tmp_path / "again"
    tune.train(straight, **options)
    first, second = rows(straight)
    assert first["pack/trained_tokens"] > 0
    assert first["train/grad_norm"] > 0
    assert first["mismatch/kl"] < (5e-2 if options.get("dtype") == "bf16" else 1e-6)
    before, after = (load_file(straight / f"step_{n}/model.safetensors") for n in (1, 2))
    moved = {n for n, value in after.items() if not torch.equal(value, before[n])}
    assert any("q_proj" in n or "v_proj" in n for n in moved)
    if "model__lora_rank" in options:
        assert all("q_proj" in n or "v_proj" in n for n in moved), moved

    shutil.copytree(straight, again)  # as it was after its first step
    shutil.rmtree(again / "step_2")
    tune.train(again, resume="true", **options)
    assert [without_timings(row) for row in rows(again)] == [
        without_timings(row) for row in (first, second)
    ]
    assert played(again) == played(straight)
    resumed = load_file(again / "step_2/model.safetensors")
    assert all(torch.equal(value, resumed[n]) for n, value in after.items())


def test_offloading_on_a_cpu_is_refused_before_any_rollout(tune, tmp_path):
    done = tune.train(tmp_path / "run", code=2, **SETTINGS, model__offload_activations="true")
    assert "offload_activations" in done.stdout + done.stderr
    assert "this is cpu; set it to false" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
