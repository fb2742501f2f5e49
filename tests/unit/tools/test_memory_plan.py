"""The planner's extrapolation from two and six layers, against whole models."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from components.cpu import multiplies_bf16
from components.models.gpt_oss import GPT_OSS_20B, GPT_OSS_120B
from components.models.paths import model_dir
from components.training.component import build
from tests.unit.models import tiny
from tests.unit.models.gpt_oss import tiny as tiny_moe
from tools import memory_plan
from tools.make_tiny_gpt_oss import make
from tools.memory_gpt_oss import longest_row, static_bytes, total
from tools.memory_plan import HELD, main, predict
from tools.memory_probe import Setting, Update, measure

LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_modules": ["q_proj", "v_proj"]}
LORA_NODE = LORA | {"_component_": "components.models.smollm2.lora_smollm2"}


@pytest.fixture
def deep(tmp_path, monkeypatch):
    """Directories of eight layers: a llama and an MXFP4 gpt-oss."""
    state = {}
    for name, value in tiny.tensors().items():
        for copy in range(4):  # layers 0 and 1 four times
            number = name.replace("layers.0.", f"layers.{2 * copy}.")
            number = number.replace("layers.1.", f"layers.{2 * copy + 1}.")
            state[number] = value.clone()
    llama = tiny.write(tmp_path / "llama", state=state)
    (llama / "config.json").write_text(
        json.dumps(tiny.CONFIG | {"num_hidden_layers": 8, "max_position_embeddings": 256})
    )
    monkeypatch.setattr(tiny_moe, "LAYERS", 8)
    monkeypatch.setattr(tiny_moe, "CONFIG", tiny_moe.CONFIG | {"num_hidden_layers": 8})
    return {"llama": llama, "moe": tiny_moe.write_packed(tmp_path / "moe")}


def setting(builder, dtype, *, beta=0.01, tokens=512, **settings):
    return Setting(
        model={"_component_": f"components.models.{builder}", "backend": "folded", **settings},
        dtype=dtype,
        optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-4},
        beta=beta,
        tokens=tokens,
        trained=128,
        chunk=64,
        max_grad_norm=1.0,
        num_workers=3,
        max_tokens=256,
        packed=True,
    )


def peak_of(chosen, directory):
    """What the updates of a directory's model hold and allocate, and the peak of such a process."""
    found = measure(Update(partial(build, chosen.model, str(directory)), chosen))
    parts = sum(found[name] for name in HELD) + max(found["row"], found["step"])
    return found, 1000 + parts * 5 // 4


@pytest.mark.parametrize(
    ("directory", "chosen"),
    [
        ("llama", setting("smollm2.smollm2", torch.bfloat16)),
        ("llama", setting("smollm2.lora_smollm2", torch.float32, quantize_base=True, **LORA)),
        (
            "moe",
            setting(
                "gpt_oss.lora_gpt_oss",
                torch.bfloat16,
                beta=0.0,
                experts="packed",
                checkpoint_activations=True,
                **LORA,
            ),
        ),
    ],
    ids=["full", "qlora", "packed"],
)
def test_the_plan_is_within_a_tenth_of_the_whole_model(monkeypatch, deep, directory, chosen):
    # Python takes 1,000 bytes, and the C library keeps a quarter of what the parts are at most.
    monkeypatch.setattr(memory_plan, "process_bytes", lambda *_: 1000)
    plan = predict(chosen, deep[directory], resident=lambda _, part: peak_of(chosen, part)[1])
    whole, peak = peak_of(chosen, deep[directory])
    for name in (*HELD, "gradients"):
        assert plan[name] == whole[name], name  # these are counted: the extrapolation is exact
    for name in ("row", "step"):
        assert plan[name] == pytest.approx(whole[name], rel=0.1), name
    assert plan["row"] > plan["head_chunk"]
    assert plan["process"] == 1000
    assert plan["allocator"] == pytest.approx(0.2 * plan["peak"], rel=0.02)
    assert plan["peak"] == pytest.approx(peak, rel=0.1)
    assert (whole["reference"] > 0) == (chosen.beta > 0)


def test_what_is_held_by_hand(deep):
    """bf16: two bytes, masters four, AdamW eight; the cache 2 x 8 layers x rows of 256 tokens."""
    chosen = setting("smollm2.smollm2", torch.bfloat16)
    whole = measure(Update(partial(build, chosen.model, str(deep["llama"])), chosen))
    per_layer = 2 * 32 * 24 + 2 * 16 * 24 + 3 * 24 * 40 + 2 * 24
    numbers = 50 * 24 + 24 + 8 * per_layer
    num_tensors = 2 + 8 * 9
    rotary = 256 * 4 * 2 * 4  # cos and sin of four pairs, in fp32
    assert whole["weights"] == 2 * numbers + rotary
    assert whole["reference"] == 2 * numbers
    assert whole["masters"] == whole["gradients"] == 4 * numbers
    assert whole["optimizer"] == 8 * numbers + 4 * num_tensors  # and a count of steps each
    rows = 4  # of three workers, as rows are doubled
    assert whole["kv_cache"] == 2 * 8 * rows * 2 * 256 * 8 * 2
    products = numbers - 24 - 8 * 2 * 24  # all but the norms; the embedding is the head
    # packed where there are packed products in bf16
    assert whole["engine_copy"] == (2 * products if multiplies_bf16() else 0)
    apart = measure(
        Update(partial(build, chosen.model, str(deep["llama"])), replace(chosen, packed=False))
    )
    assert apart["engine_copy"] == 0


def test_the_released_sizes():
    """The published 12.8 GiB and 56.7 GiB of MXFP4 weights, dense parts and experts (design)."""
    resident = static_bytes(GPT_OSS_20B, experts="packed")
    assert (resident["dense"] + resident["experts"]) / 2**30 == pytest.approx(12.8, abs=0.15)
    streamed = static_bytes(GPT_OSS_120B, experts="streamed")
    assert streamed["host_experts"] / 2**30 == pytest.approx(56.7, abs=0.2)
    assert streamed["experts"] / 2**30 == pytest.approx(3.2, abs=0.1)
    assert streamed["dense"] / 2**30 == pytest.approx(4.04, abs=0.3)
    # bf16 keys and values of 8 heads of 64: of every token in half of the layers, of 128 in the
    # others; eight rollouts of 8,192
    per_token = 2 * 8 * 64 * 2
    assert resident["kv_cache"] == 8 * 12 * (8192 + 128) * per_token
    assert streamed["kv_cache"] == 8 * 18 * (8192 + 128) * per_token
    for plan in (resident, streamed):
        plan |= {"row_constant": 10**9, "row_per_token": 10**6}
        tokens = longest_row(plan, 32)
        assert total(plan, tokens) <= 32 * 10**9 < total(plan, tokens + 1000)
    assert (
        longest_row(
            static_bytes(GPT_OSS_120B, experts="packed")
            | {
                "row_constant": 10**9,
                "row_per_token": 10**6,
            },
            24,
        )
        == 0
    )


def test_errors_are_one_line(capsys, tmp_path):
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("configs/gpt_oss/tiny_mock.yaml", {}),
        ("configs/mock.yaml", {"tokens_per_batch": 2048}),
        ("configs/retail.yaml", {"tokens_per_batch": 2048, "model": LORA_NODE}),
        (
            "configs/retail.yaml",
            {"tokens_per_batch": 2048, "model": LORA_NODE | {"quantize_base": True}},
        ),
    ],
    ids=["gpt_oss", "full", "lora", "qlora"],
)
def test_the_peak_of_a_process(capsys, tmp_path, config, overrides):
    """VmHWM of a process that takes two steps of the whole model."""
    if "gpt_oss" in config:
        tokenizer_dir = model_dir("smollm2-135m-instruct")
        overrides = overrides | {
            "model_dir": make(tmp_path / "tiny-gpt-oss", tokenizer_dir=tokenizer_dir)
        }
    settings = [
        f"{name}={json.dumps(value) if isinstance(value, dict) else value}"
        for name, value in overrides.items()
    ]
    assert main(["--config", config, *settings, "--measure", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak"] == pytest.approx(plan["measured"], rel=0.1)
