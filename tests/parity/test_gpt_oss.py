"""gpt-oss against transformers' GptOssForCausalLM: eager attention, fp32, every feature on."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from components.attention.plan import MaskPlan
from components.models.gpt_oss import gpt_oss, lora_gpt_oss
from components.models.gpt_oss.build import rotary
from components.models.gpt_oss.config import read_config
from components.models.gpt_oss.routing import record_routing
from components.models.lora import adapters
from components.models.mxfp4 import decode_transposed
from components.models.weights import hf_state, save_hf
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest
from tests.unit.models.gpt_oss import tiny

IDS = torch.randint(0, tiny.VOCAB, (48,), generator=torch.Generator().manual_seed(3))
ADAPTED = ["q_proj", "k_proj", "v_proj", "output_proj", "gate_up_proj", "down_proj"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("gpt_oss") / "tiny")


def load_theirs(directory, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    assert type(model).__name__ == "GptOssForCausalLM"
    return model.eval()


def logits(model, ids=IDS):
    num = len(ids)
    return model(ids[None], mask=MaskPlan.causal(num), input_pos=torch.arange(num)[None])


@pytest.mark.parametrize(
    ("backend", "experts"), [("folded", "grouped"), ("folded", "loop"), ("reference", "auto")]
)
def test_logits_and_every_gradient_equal_transformers(directory, backend, experts):
    theirs = load_theirs(directory)
    ours = gpt_oss(
        directory,
        dtype=torch.float32,
        backend=backend,
        experts=experts,
        checkpoint_activations=experts == "grouped",
    )
    assert len(IDS) > 5 * tiny.KEYS
    expected, got = theirs(IDS[None]).logits[0], logits(ours)
    difference = float((got - expected).detach().abs().max())
    assert difference <= 1e-4
    assert expected.abs().max() > 3  # the tolerance means something
    for out in (expected, got):
        F.cross_entropy(out[:-1], IDS[1:]).backward()

    named = dict(theirs.named_parameters())
    gradients = hf_state(ours, state={n: p.grad for n, p in ours.named_parameters()})
    assert gradients.keys() == named.keys()
    worst = 0.0
    for name, gradient in gradients.items():
        wanted = named[name].grad
        assert wanted.abs().max() > 1e-6, f"{name} is not tested"
        error = float((gradient - wanted).norm() / wanted.norm())
        assert error <= 1e-3, (name, error)
        worst = max(worst, error)
    print(f"{backend} {experts}: logits {difference:.1e}, gradients {worst:.1e} at worst")


def test_each_layer_and_its_routing_equal_transformers(directory):
    theirs, ours = load_theirs(directory), gpt_oss(directory, dtype=torch.float32)
    seen = []
    for layer in ours.layers:
        layer.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    with torch.no_grad(), record_routing(ours) as routing:
        expected = theirs(IDS[None], output_hidden_states=True, output_router_logits=True)
        logits(ours)
    # transformers' last hidden state is behind the norm
    for number, (got, wanted) in enumerate(zip(seen, expected.hidden_states[1:-1], strict=False)):
        assert (got - wanted[0]).abs().max() <= 1e-4, number
    for number, (got, raw) in enumerate(zip(routing.layers(), expected.router_logits, strict=True)):
        wanted = raw.view(len(IDS), -1).topk(2, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(got, wanted), number


def test_router_weights_are_a_softmax_over_the_chosen(directory):
    moe = gpt_oss(directory, dtype=torch.float32).layers[0].mlp
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([0.0, 2.0, -1.0, 0.0, 1.0, -5.0, 0.0, 0.0]))
        weights, chosen, margin = moe.route(torch.zeros(1, tiny.WIDTH))
    assert chosen.tolist() == [[1, 4]]
    assert weights[0].tolist() == pytest.approx([0.7311, 0.2689], abs=5e-5)
    assert float(margin) == 1.0


def test_yarn_equals_transformers_table(directory):
    from transformers import AutoConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    for settings in ({}, {"head_dim": 64, "rope_theta": 150_000.0, "rope_scaling": None}):
        raw = json.loads((directory / "config.json").read_text()) | settings
        if settings:
            released = {
                "factor": 32.0,
                "beta_fast": 32.0,
                "original_max_position_embeddings": 4096,
            }
            raw["rope_scaling"] = tiny.CONFIG["rope_scaling"] | released
            raw["max_position_embeddings"] = 131_072
        folder = directory.parent / f"rope{len(settings)}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(raw))
        positions = torch.tensor([[0, 1, 100, raw["max_position_embeddings"] - 1]])
        theirs = GptOssRotaryEmbedding(AutoConfig.from_pretrained(folder))
        cos, sin = theirs(torch.zeros(1), positions)
        table = rotary(read_config(folder)).cache[positions]
        assert torch.allclose(table[..., 0], cos, atol=1e-6)
        assert torch.allclose(table[..., 1], sin, atol=1e-6)


def test_greedy_decoding_equals_transformers_beyond_the_window(directory):
    theirs = load_theirs(directory)
    engine = LocalEngine(
        gpt_oss(directory, dtype=torch.float32), max_tokens=128, max_batch_size=4, prefill_chunk=7
    )
    prompts = [IDS[:12].tolist(), [*IDS[:6].tolist(), 5, 9, 1], IDS[:20].tolist()]
    requests = [
        SampleRequest(
            rollout_id=str(number),
            context=tuple(prompt),
            shared_len=6,
            max_new_tokens=64,
            stop_ids=frozenset(),
            temperature=0.0,
            seed=0,
        )
        for number, prompt in enumerate(prompts)
    ]
    for prompt, result in zip(prompts, engine.generate(requests), strict=True):
        out = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=64,
            eos_token_id=None,
            pad_token_id=0,
        )
        wanted = out[0, len(prompt) :]
        assert len(wanted) == 64
        assert list(result.ids) == wanted.tolist()
        assert len(set(result.ids)) > 8  # not one token over and over
        with torch.no_grad():
            raw = theirs(out).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = raw.gather(1, wanted[:, None]).squeeze(1).tolist()
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


def test_mxfp4_equals_transformers_decoding_bit_for_bit(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    directory = tiny.write_packed(tmp_path / "packed")
    stored = load_file(directory / "model.safetensors")
    loaded = hf_state(gpt_oss(directory, dtype=torch.bfloat16))
    names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert len(names) == 2 * tiny.LAYERS
    for name in names:
        pair = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        wanted = convert_moe_packed_tensors(*pair)
        assert torch.equal(decode_transposed(*pair), wanted)
        assert torch.equal(loaded[name], wanted)


def test_a_packed_directory_comes_back_as_one_that_transformers_loads(tmp_path):
    source = tiny.write_packed(tmp_path / "packed")
    ours = gpt_oss(source, dtype=torch.bfloat16)
    save_hf(ours, tmp_path / "saved", source)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["GptOssForCausalLM"]
    theirs = load_theirs(tmp_path / "saved", torch.bfloat16)
    for name, parameter in theirs.named_parameters():
        saved = load_file(tmp_path / "saved" / "model.safetensors")[name]
        assert saved.dtype == torch.bfloat16
        assert torch.equal(parameter.to(torch.bfloat16), saved), name
    # in fp32 both compute the same function of these weights
    theirs = load_theirs(tmp_path / "saved")
    with torch.no_grad():
        expected = theirs(IDS[None]).logits[0]
        got = logits(gpt_oss(source, dtype=torch.float32))
    assert (got - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def test_bfloat16_is_as_close_to_fp64_as_transformers_is(directory):
    with torch.no_grad():
        exact = load_theirs(directory, torch.float64)(IDS[None]).logits[0].log_softmax(-1)
        eager = load_theirs(directory, torch.bfloat16)(IDS[None]).logits[0].double().log_softmax(-1)
        got = logits(gpt_oss(directory, dtype=torch.bfloat16)).double().log_softmax(-1)
    ours, theirs = (float((exact.exp() * (exact - x)).sum(-1).median()) for x in (got, eager))
    print(f"median KL to fp64: ours {ours:.1e}, transformers {theirs:.1e}")
    assert ours <= 1.5 * theirs


def test_trained_adapters_are_merged_into_what_transformers_loads(tmp_path, directory):
    torch.manual_seed(0)
    model = lora_gpt_oss(
        directory, dtype=torch.float32, lora_rank=4, lora_alpha=8, lora_modules=ADAPTED
    )
    before = logits(model)
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_b.weight.normal_(std=0.05)
    trained = logits(model)
    assert (trained - before).abs().max() > 0.1
    save_hf(model, tmp_path / "merged", directory)
    with torch.no_grad():
        expected = load_theirs(tmp_path / "merged")(IDS[None]).logits[0]
    assert (trained - expected).abs().max() <= 1e-4 * float(expected.abs().max())
