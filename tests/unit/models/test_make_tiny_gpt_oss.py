"""The tiny gpt-oss that tools/make_tiny_gpt_oss.py writes, read by transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.chat.harmony import HarmonyRenderer
from components.envs.base import Message
from components.models.paths import model_dir

pytestmark = pytest.mark.model

TOOL = Path(__file__).parents[3] / "tools" / "make_tiny_gpt_oss.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_tiny_gpt_oss", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def directory(tool, tmp_path_factory):
    tokenizer_dir = model_dir("smollm2-135m-instruct")
    return tool.make(tmp_path_factory.mktemp("models") / "tiny", tokenizer_dir=tokenizer_dir)


@pytest.fixture(scope="module")
def reference(directory):
    from transformers import GptOssForCausalLM

    model, info = GptOssForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info  # no key missing, unexpected or of another shape
    return model


def test_every_feature_is_on(directory, reference):
    c = reference.config
    assert c.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (c.sliding_window, c.num_local_experts, c.num_experts_per_tok) == (32, 8, 2)
    rotary = reference.model.rotary_emb
    assert rotary.attention_scaling == pytest.approx(1.3465736, abs=1e-6)  # 0.1 ln 32 + 1
    plain = 150_000.0 ** (-torch.arange(0, 32, 2) / 32)
    assert rotary.inv_freq[0] == pytest.approx(float(plain[0]))  # fast ones stay
    assert rotary.inv_freq[-1] == pytest.approx(float(plain[-1]) / 32)  # slow ones are stretched
    tensors = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    zero = [name for name, tensor in tensors.items() if not tensor.count_nonzero()]
    assert zero == []
    sinks = torch.stack([tensors[f"model.layers.{layer}.self_attn.sinks"] for layer in range(4)])
    assert sinks.abs().min() > 1e-3


def test_windows_and_sinks_matter(reference):
    ids = torch.randint(0, 49_000, (1, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = reference(ids).logits
        sinks = [layer.self_attn.sinks for layer in reference.model.layers]
        kept = [sink.clone() for sink in sinks]
        for sink in sinks:
            sink.fill_(-1e4)
        without = reference(ids).logits
        for sink, value in zip(sinks, kept, strict=True):
            sink.copy_(value)
    assert (logits - without).abs().max() > 0.05


def test_vocabulary_and_ids_fit(directory, reference):
    renderer = HarmonyRenderer(directory)
    assert reference.config.vocab_size == renderer.vocab_size == 49_152 + 7
    assert reference.config.eos_token_id in renderer.stop_ids
    assert renderer.stop_ids < set(reference.generation_config.eos_token_id)


def test_most_of_its_turns_are_in_the_format_and_differ(directory, reference):
    """Sampled by transformers: a random policy whose turns reach the environment."""
    renderer = HarmonyRenderer(directory)
    user = Message(role="user", content="Please create a task called 'Fix the printer'.")
    prompt = renderer.render_observation([user], after_turn=False).ids
    torch.manual_seed(0)
    sampled = reference.generate(
        torch.tensor([prompt] * 32),
        max_new_tokens=48,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=sorted(renderer.stop_ids),
    )
    texts = []
    for row in sampled[:, len(prompt) :].tolist():
        length = next((i + 1 for i, token in enumerate(row) if token in renderer.stop_ids), None)
        message = renderer.parse(row[:length]).message if length else None
        texts += [message.content] if message else []
    assert len(texts) >= 26
    assert len(set(texts)) >= len(texts) - 3


def test_the_same_seed_gives_the_same_bytes(tool, directory, tmp_path):
    tokenizer_dir = model_dir("smollm2-135m-instruct")
    again = tool.make(tmp_path / "again", tokenizer_dir=tokenizer_dir)
    other = tool.make(tmp_path / "other", tokenizer_dir=tokenizer_dir, seed=1)
    names = sorted(path.name for path in directory.iterdir())
    assert [path.name for path in sorted(again.iterdir())] == names
    for name in names:
        assert (again / name).read_bytes() == (directory / name).read_bytes()
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (directory / weights).read_bytes()


def test_the_command(tool, tmp_path, capsys):
    assert tool.main([str(tmp_path / "out"), "--tokenizer", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    assert tool.main([str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "config.json").is_file()
