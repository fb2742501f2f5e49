"""The shipped gpt-oss configs: the tiny one trained, the large ones built on the meta device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from components.models.gpt_oss import builders
from components.training.config import instantiate, load_config, validate
from recipes import grpo_agentic
from tests.recipes.runs import ROOT, arguments, rows
from tests.unit.models.gpt_oss.test_builders import released


@pytest.mark.model
def test_the_tiny_config_trains_sinks_router_and_experts(tune, tmp_path):
    made = tmp_path / "tiny"
    subprocess.run(
        [sys.executable, "tools/make_tiny_gpt_oss.py", str(made)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    config = "configs/gpt_oss/tiny_mock.yaml"
    tune.run(*arguments(config=config, model_dir=made, output_dir=tmp_path / "run"))
    first, second = rows(tmp_path / "run")
    for row in (first, second):
        assert row["group/zero_std_frac"] == 0
        assert row["mismatch/kl"] < 1e-6  # the engine sees the same sinks, windows and routing
    assert first["loss/kl"] == 0.0
    before = load_file(made / "model.safetensors")
    after = load_file(tmp_path / "run/step_2/model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    for number in range(4):
        for part in ("self_attn.sinks", "mlp.router.weight", "mlp.experts.down_proj"):
            assert f"model.layers.{number}.{part}" in moved


@pytest.mark.parametrize(
    ("name", "layers", "experts", "billions"),
    [("gpt_oss/20b_retail", 24, 32, 20.9), ("gpt_oss/120b_retail", 36, 128, 116.8)],
)
def test_the_large_configs_on_the_meta_device(
    tmp_path, monkeypatch, name, layers, experts, billions
):
    cfg = validate(load_config(name), grpo_agentic.SCHEMA, check=grpo_agentic.check)
    monkeypatch.setattr(builders, "load_hf", lambda model, directory, **_: model)
    model = instantiate(cfg.model, released(tmp_path / "m", layers, experts), dtype=torch.bfloat16)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert all(p.is_meta for n, p in model.named_parameters() if ".experts." in n)
    assert round(sum(p.numel() for p in frozen) / 1e9, 1) == billions
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == layers * len(cfg.model.lora_modules) * 2
    assert cfg.rollout.max_tokens <= model.config.max_positions
