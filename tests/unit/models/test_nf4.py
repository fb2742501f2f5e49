"""Frozen weights in NF4: gradients, bytes, sampling and export, against the decoded model."""

import json

import pytest
import torch
from torch import nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.models.llama2 import lora_llama2
from torchtune.models.qwen2 import lora_qwen2

from components.attention.plan import MaskPlan
from components.models.attach import with_sink_attention
from components.models.from_hf import lora_policy
from components.models.lora import ADAPTABLE, adapters
from components.models.nf4 import decoded, is_nf4, quantize_base, stored_bytes, to_nf4
from components.models.smollm2 import lora_smollm2
from components.models.weights import save_hf
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest
from components.training import parallelize
from components.training.precision import MasterWeights

from . import tiny

TOKENS = torch.tensor([[3, 14, 15, 9, 2, 6, 5]])
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}
SETTINGS = {"lora_rank": 4, "lora_alpha": 8, "lora_modules": ["q_proj", "w2"], "backend": "folded"}


@pytest.fixture
def directory(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    state = {"model.embed_tokens.weight": random(50, 64), "model.norm.weight": torch.ones(64)}
    for i in range(2):
        state |= {f"model.layers.{i}.{n}.weight": random(*shape) for n, shape in SHAPES.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{i}.{norm}.weight"] = torch.ones(64)
    path = tiny.write(tmp_path / "tiny", state=state)
    (path / "config.json").write_text(json.dumps(tiny.CONFIG | SIZES))
    return path


def trained(model):
    """The model with adapters that do something."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_a.weight.normal_(std=0.1)
            module.lora_b.weight.normal_(std=0.1)
    return model


def decode_in_place(model):
    """The same model with plain numbers for what is in NF4."""
    count = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and is_nf4(weight):
            module.weight = nn.Parameter(decoded(weight.detach()), requires_grad=False)
            count += 1
    return count


def gradients(model, **inputs):
    for parameter in model.parameters():
        parameter.grad = None
    out = model(TOKENS, **inputs)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def compare_with_decoded(model, linears, **inputs):
    out, grads = gradients(model, **inputs)
    assert decode_in_place(model) == linears
    expected, wanted = gradients(model, **inputs)
    assert torch.allclose(out, expected, atol=1e-6, rtol=1e-6)
    assert grads.keys() == wanted.keys()
    assert grads
    for name, grad in grads.items():
        assert wanted[name].abs().max() > 1e-3, name  # else any gradient would do
        assert torch.allclose(grad, wanted[name], atol=1e-6, rtol=1e-6), name


INPUTS = {"mask": MaskPlan.causal(7), "input_pos": torch.arange(7)[None]}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("build", [lora_smollm2, lora_policy])
def test_gradients_are_those_of_the_decoded_model(directory, build, recompute):
    model = build(
        directory,
        dtype=torch.float32,
        quantize_base=True,
        checkpoint_activations=recompute,
        **SETTINGS,
    )
    compare_with_decoded(trained(model), 14, **INPUTS)


def test_nf4_numbers_are_the_nearest_of_the_paper():
    """The 16 quantiles of QLoRA's appendix E, times the block's largest magnitude."""
    negative = [1.0, 0.6961928, 0.5250731, 0.3949175, 0.2844414, 0.1847734, 0.0910500]
    positive = [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    levels = torch.tensor([*(-x for x in negative), 0.0, *positive])
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    blocks = weight.view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / scale).unsqueeze(-1).sub(levels).abs().argmin(-1)
    expected = (levels[nearest] * scale).view_as(weight)
    # The scales are rounded to 8 bits.
    assert torch.allclose(
        decoded(to_nf4(weight, name="w")), expected, atol=0.02 * weight.abs().max()
    )


def test_weights_take_four_and_a_half_bits(directory):
    model = lora_smollm2(directory, dtype=torch.bfloat16, quantize_base=True, **SETTINGS)
    packed = [p for p in model.parameters() if is_nf4(p)]
    numbers = sum(p.numel() for p in packed)
    assert numbers == 2 * sum(a * b for a, b in SHAPES.values())
    assert not any(p.requires_grad for p in packed)
    # Tiny matrices have few scales for each float32; 4.13 bits is what a large one takes.
    assert 4 * numbers < 8 * sum(map(stored_bytes, packed)) < 4.5 * numbers
    large = to_nf4(torch.randn(576, 1536), name="w")
    assert 8 * stored_bytes(large) < 4.14 * large.numel()
    assert type(large) is NF4Tensor


def test_a_matrix_that_has_no_blocks_is_an_error(tmp_path):
    narrow = tiny.write_narrow(tmp_path / "narrow")  # 12 x 24 is 4.5 blocks
    with pytest.raises(ValueError, match=r"quantize_base: layers.0.attn.k_proj.weight \[12, 24\]"):
        lora_smollm2(narrow, dtype=torch.float32, quantize_base=True, **SETTINGS)
    with pytest.raises(ValueError, match="cannot be NF4: a matrix"):
        to_nf4(torch.randn(4, 8, 8), name="experts")


def sample(model):
    engine = LocalEngine(model, max_tokens=32, max_batch_size=2)
    engine.sync(0)
    requests = [
        SampleRequest(
            rollout_id=f"r{i}",
            context=(3, 14, 15, 9 + i),
            max_new_tokens=8,
            temperature=1.0,
            seed=i,
            stop_ids=frozenset(),
            shared_len=0,
        )
        for i in range(2)
    ]
    return engine.generate(requests)


def test_the_engine_samples_from_it(directory):
    settings = {"dtype": torch.float32, "quantize_base": True} | SETTINGS
    model = trained(lora_smollm2(directory, **settings))
    results = sample(model)
    decode_in_place(model)
    for ours, plain in zip(results, sample(model), strict=True):
        assert ours.ids == plain.ids
        assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    full = trained(lora_smollm2(directory, **settings | {"quantize_base": False}))
    assert any(a.logprobs != b.logprobs for a, b in zip(results, sample(full), strict=True))


def test_what_is_exported_is_the_policy_that_was_trained(directory, tmp_path):
    """transformers computes from the export what the trainer computes."""
    transformers = pytest.importorskip("transformers")
    model = trained(lora_smollm2(directory, dtype=torch.float32, quantize_base=True, **SETTINGS))
    masters = MasterWeights(model)
    for parameter in masters.parameters():
        parameter.data.add_(0.01)
    masters.publish()
    save_hf(model, tmp_path / "out", directory)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    with torch.no_grad():
        theirs = loaded(TOKENS).logits[0]
        assert torch.allclose(model(TOKENS, **INPUTS), theirs, atol=1e-5)
    unrounded = lora_smollm2(directory, dtype=torch.float32, **SETTINGS)
    unrounded.load_state_dict({n: p for n, p in model.state_dict().items() if "lora_" in n}, False)
    assert not torch.allclose(unrounded(TOKENS, **INPUTS), theirs, atol=1e-2)


TORCHTUNE = {
    "vocab_size": 50,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 32,
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": True,
}


@pytest.mark.parametrize("build", [lora_llama2, lora_qwen2])
@pytest.mark.parametrize("sinks", [None, 0.5])
def test_any_torchtune_model(build, sinks):
    """llama without and qwen2 with biases; torchtune's plain linears are frozen, too."""
    torch.manual_seed(0)
    model = build(**TORCHTUNE | {"intermediate_dim": 96})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    quantize_base(model.layers, ADAPTABLE)
    with_sink_attention(model, backend="folded", sinks=sinks)
    compare_with_decoded(trained(model), 14, mask=MaskPlan.causal(7), input_pos=INPUTS["input_pos"])


def test_torchtunes_own_quantised_builder():
    """What torchtune quantised, attach leaves as it is."""
    torch.manual_seed(0)
    sizes = {"num_kv_heads": 4, "embed_dim": 256, "intermediate_dim": 256}
    model = lora_llama2(**TORCHTUNE | sizes, quantize_base=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    with_sink_attention(model, backend="folded")
    for module in adapters(model).values():
        assert is_nf4(module.weight)
    linears = [m for m in model.modules() if hasattr(m, "weight") and is_nf4(m.weight)]
    out, grads = gradients(trained(model), mask=MaskPlan.causal(7), input_pos=INPUTS["input_pos"])
    assert decode_in_place(model) == len(linears) >= 10
    for module in adapters(model).values():
        module._quantize_base = False
    for module in model.modules():
        if type(module).__name__ == "FrozenNF4Linear":
            module.__class__ = nn.Linear
    expected, wanted = gradients(model, mask=MaskPlan.causal(7), input_pos=INPUTS["input_pos"])
    assert torch.allclose(out, expected, atol=1e-6)
    assert all(torch.allclose(grads[name], wanted[name], atol=1e-6) for name in wanted)


def test_quantize_base_of_a_name_that_is_not_there():
    model = lora_llama2(**TORCHTUNE | {"intermediate_dim": 96})
    with pytest.raises(ValueError, match="quantize_base: no linear is named o_proj"):
        quantize_base(model.layers, ["q_proj", "o_proj"])


def test_more_ranks_are_refused(directory):
    model = lora_smollm2(directory, dtype=torch.float32, quantize_base=True, **SETTINGS)
    world = parallelize.World(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"14 weights are stored in four bits .* one rank, not on 2"
    ):
        parallelize.shard(model, world, dtype=torch.float32)


def test_a_bf16_export_can_be_loaded_again(directory, tmp_path):
    """The export has no trace of NF4: the plain builder loads it."""
    model = trained(lora_smollm2(directory, dtype=torch.bfloat16, quantize_base=True, **SETTINGS))
    save_hf(model, tmp_path / "out", directory)
    again = lora_smollm2(tmp_path / "out", dtype=torch.bfloat16, **SETTINGS)
    attention = model.layers[0].attn
    assert torch.equal(again.layers[0].attn.k_proj.weight, decoded(attention.k_proj.weight))
