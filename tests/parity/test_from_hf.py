"""Policies loaded from a Hugging Face directory against transformers' own classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.attention.plan import MaskPlan
from components.models.from_hf import lora_policy, policy
from components.models.weights import save_hf
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# name -> (configuration class, model class, settings)
KINDS = {
    "llama2": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama3.2": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "qwen2.5": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True, "sliding_window": 7, "use_sliding_window": False},
    ),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 7}),
}
IDS = torch.randint(3, 61, (1, 30), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=KINDS)
def source(request, tmp_path) -> Path:
    """A directory that transformers wrote."""
    import transformers

    config_name, model_name, settings = KINDS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**(SIZES | settings))
    model = getattr(transformers, model_name)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of one and biases of zero hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.3)
            assert parameter.abs().sum() > 0, name
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def theirs(directory: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def logits(model) -> torch.Tensor:
    num_tokens = IDS.shape[1]
    return model(IDS, mask=MaskPlan.causal(num_tokens), input_pos=torch.arange(num_tokens)[None])


def close(got: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> None:
    assert (got - expected).abs().max() <= limit * expected.abs().max()


def test_logits_and_weights_are_transformers_own(source, tmp_path):
    model = policy(source, dtype=torch.float32)
    close(logits(model), theirs(source)(IDS).logits[0])
    save_hf(model, tmp_path / "saved", source)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_merged_adapters_are_what_transformers_loads(source, tmp_path):
    model = lora_policy(
        source,
        dtype=torch.float32,
        lora_rank=3,
        lora_alpha=6.0,
        lora_modules=["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"],
    )
    base = theirs(source)(IDS).logits[0]
    close(logits(model), base)  # a fresh adapter changes nothing
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 3 * 7 * 2
    assert all(".lora_" in name for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_b." in name:
                parameter.normal_(std=0.1)
    adapted = logits(model)
    assert (adapted - base).abs().max() > 0.1
    save_hf(model, tmp_path / "saved", source)
    close(adapted, theirs(tmp_path / "saved")(IDS).logits[0])


def test_the_engine_samples_what_transformers_generates(source):
    """Greedy, past the window, with a shared prefix."""
    model = policy(source, dtype=torch.float32)
    engine = LocalEngine(model, max_tokens=64, max_batch_size=2, prefill_chunk=8)
    requests = [
        SampleRequest(
            rollout_id=str(length),
            context=tuple(IDS[0, :length].tolist()),
            shared_len=9,
            max_new_tokens=16,
            stop_ids=frozenset(),
            temperature=0.0,
            seed=0,
        )
        for length in (14, 21)
    ]
    reference = theirs(source)
    for asked, result in zip(requests, engine.generate(requests), strict=True):
        context = list(asked.context)
        for token in result.ids:
            with torch.no_grad():
                expected = reference(torch.tensor([context])).logits[0, -1]
            assert expected.argmax() == token
            context.append(token)


def test_learned_sinks_survive_a_round_trip(source, tmp_path):
    model = policy(source, dtype=torch.float32, sinks=0.5)
    assert all(layer.attn.sinks.tolist() == [0.5] * 6 for layer in model.layers)
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.sinks.normal_()
    save_hf(model, tmp_path / "saved", source)
    again = policy(tmp_path / "saved", dtype=torch.float32, sinks=0.0)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match=r"not in the model: model.layers.0.self_attn.sinks"):
        policy(tmp_path / "saved", dtype=torch.float32)
