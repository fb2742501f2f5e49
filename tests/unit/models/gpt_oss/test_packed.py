"""Experts that stay in MXFP4, resident or streamed, against the decoded model."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from components.attention.plan import MaskPlan
from components.models.decoder import PolicyModel
from components.models.gpt_oss import GPT_OSS_20B, gpt_oss, lora_gpt_oss, random_gpt_oss
from components.models.gpt_oss.packed import PackedExpertLinear
from components.models.gpt_oss.streaming import ExpertStream
from components.models.lora import adapters
from components.models.mxfp4 import decode_transposed
from components.models.weights import save_hf
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest
from components.training import parallelize
from tools.bench_cases import peak_allocated

from . import tiny

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")
NUM = 24
IDS = torch.randint(0, tiny.VOCAB, (1, NUM), generator=torch.Generator().manual_seed(0))
SETTINGS = {
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_modules": ["q_proj", "v_proj", "output_proj"],
    "train_sinks": True,
    "backend": "folded",
}
KINDS = ("packed", "streamed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write_packed(tmp_path_factory.mktemp("packed") / "tiny")


def load(directory, experts, *, dtype=torch.float32, **settings):
    model = lora_gpt_oss(directory, dtype=dtype, experts=experts, **SETTINGS | settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for module in adapters(model).values():
            module.lora_a.weight.normal_(std=0.1)
            module.lora_b.weight.normal_(std=0.1)
    return model


def gradients(model, ids=IDS):
    """Logits, the gradients of all that is trained, and of every layer's input."""
    for parameter in model.parameters():
        parameter.grad = None
    seen = {}

    def keep(number):
        def hook(module, grad_input, grad_output):
            seen[f"layer {number}"] = grad_output[0].clone()

        return hook

    hooks = [
        layer.register_full_backward_hook(keep(n)) for n, layer in enumerate(model.layers[:-1])
    ]
    num = ids.shape[1]
    out = model(ids, mask=MaskPlan.causal(num), input_pos=torch.arange(num)[None])
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    for hook in hooks:
        hook.remove()
    return out.detach(), seen | {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("experts", KINDS)
def test_gradients_are_those_of_the_decoded_model(directory, experts, recompute):
    """Of adapters and sinks below the experts, and of the activations between the layers."""
    decoded = load(directory, "loop", checkpoint_activations=recompute)
    assert not any(isinstance(m, PackedExpertLinear) for m in decoded.modules())
    expected, wanted = gradients(decoded)
    model = load(directory, experts, checkpoint_activations=recompute)
    for _ in range(2):  # the stream starts its second pass where the first one ended
        out, grads = gradients(model)
        assert torch.allclose(out, expected, atol=1e-5, rtol=1e-5)
        assert grads.keys() == wanted.keys()
        assert len(grads) == tiny.LAYERS * 7 + (tiny.LAYERS - 1)
        for name, grad in grads.items():
            scale = wanted[name].abs().max()
            assert scale > 0, name
            assert (grad - wanted[name]).abs().max() < 1e-5 * scale, name


def test_the_product_in_fp64_by_hand():
    """[S, in] times one expert's decoded matrix and its transpose, experts unused and unequal."""
    from components.models.gpt_oss.grouped import group

    torch.manual_seed(0)
    linear = PackedExpertLinear(4, 64, 24)
    linear.blocks.random_(0, 256)
    linear.scales.random_(120, 126)
    linear.bias.data.normal_()
    weight = decode_transposed(linear.blocks, linear.scales).double()  # [E, in, out]
    groups = group(torch.tensor([[3], [0], [3], [3], [1]]), num_experts=4)
    rows = torch.randn(5, 64, dtype=torch.float64, requires_grad=True)
    linear.bias.data = linear.bias.data.double()
    out = linear(rows, groups)
    grad = torch.randn_like(out)
    out.backward(grad)
    for row, expert in enumerate((0, 1, 3, 3, 3)):
        exact = rows[row] @ weight[expert] + linear.bias[expert]
        assert torch.allclose(out[row], exact, rtol=1e-12)
        assert torch.allclose(rows.grad[row], weight[expert] @ grad[row], rtol=1e-12)
    assert torch.autograd.gradcheck(lambda x: linear(x, groups), rows)


# ---- bytes

WIDE = replace(
    GPT_OSS_20B,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    embed_dim=64,
    ffn_dim=256,
    num_experts=64,
    experts_per_token=2,
    vocab_size=64,
    windows=(7, None) * 3,
)
"""Experts that outweigh everything else: 64 of 64 -> 512 and 256 -> 64 in each of six layers."""
EXPERT = 64 * 512 + 256 * 64
"""Numbers in the weights of one expert."""
LAYER = 64 * EXPERT * 17 // 32
"""Bytes of a layer's experts in MXFP4: sixteen bytes and a scale for 32 numbers."""


def wide(experts, **settings) -> PolicyModel:
    model = random_gpt_oss(
        WIDE, dtype=torch.bfloat16, experts=experts, backend="folded", **settings
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn." in name)
    return model


def step(model):
    def run():
        gradients(model, torch.arange(16)[None])
        for parameter in model.parameters():
            parameter.grad = None

    run()  # tables and masks that are kept between calls
    return run


def peak_bytes(run):
    return peak_allocated(run, device=torch.device("cpu"))


def held_bytes(model):
    return sum(p.nbytes for p in model.parameters())


def test_packed_experts_are_decoded_one_at_a_time():
    """Weights 17 / 4 bits per number; a step adds a few experts' bytes to what activations take."""
    model, plain = wide("packed"), wide("loop")
    biases = 64 * (512 + 64) * 2
    experts = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    assert experts == 6 * (LAYER + biases)
    assert held_bytes(plain) - held_bytes(model) == 6 * (64 * EXPERT * 2 - LAYER)
    one = 64 * 512 * 2  # the larger map of an expert, decoded
    plainly = peak_bytes(step(plain))
    assert peak_bytes(step(model)) < plainly + 8 * one < plainly + LAYER


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_streamed_experts_take_two_layers(recompute):
    """Peak of a step: the dense part and the activations, as with packed experts, and two layers.

    The buffers are allocated by the first step, so this one counts them; the experts on the host
    are allocated before, outside of it.
    """
    packed = wide("packed", checkpoint_activations=recompute)
    alone = peak_bytes(step(packed))
    model = wide("streamed", checkpoint_activations=recompute)
    dense = held_bytes(model)
    assert dense == held_bytes(packed) - 6 * LAYER  # no expert's weight is a parameter
    (stream,) = {m._stream[0] for m in model.modules() if isinstance(m, PackedExpertLinear)}
    assert stream.layer_bytes() == LAYER
    assert stream.device_bytes() == 0
    first = peak_bytes(lambda: gradients(model, torch.arange(16)[None]))
    assert stream.device_bytes() == 2 * LAYER
    slack = dense  # the gradients of the dense part that the first step keeps, and its tables
    assert 2 * LAYER < first <= 2 * LAYER + alone + slack
    assert slack < LAYER / 2  # a third layer would not hide in it
    assert peak_bytes(step(model)) < alone + slack  # later steps allocate no more buffers
    assert stream.device_bytes() == 2 * LAYER


def test_a_pass_copies_each_layer_once():
    model = wide("streamed", checkpoint_activations=True)
    (stream,) = {m._stream[0] for m in model.modules() if isinstance(m, PackedExpertLinear)}
    gradients(model, torch.arange(16)[None])
    # Forward: six. Backward: four, the last two layers are still there.
    assert stream.num_copies == 6 + 4
    gradients(model, torch.arange(16)[None])
    assert stream.num_copies == 2 * (4 + 4) + 2


def test_the_neighbour_is_copied_in_the_direction_of_the_pass():
    host = [{"w": torch.full((2,), float(n))} for n in range(5)]
    stream, cpu = ExpertStream(host), torch.device("cpu")
    held = lambda: {slot.layer for slot in stream._slots}  # noqa: E731
    for layer in (0, 1, 2, 3, 4, 4, 3, 3, 2, 1, 0):
        assert torch.equal(stream.get(layer, cpu)["w"], host[layer]["w"])
        assert layer in held()
    assert held() == {0, 1}
    stream.get(3, cpu)  # out of order: right, if not prefetched
    assert held() == {3, 4}
    assert torch.equal(stream.get(1, cpu)["w"], host[1]["w"])
    with pytest.raises(ValueError, match="2 layers whose tensors are not all alike"):
        ExpertStream([host[0], {"w": torch.zeros(3)}])


# ---- sampling, saving, errors


@pytest.mark.parametrize("experts", KINDS)
def test_the_engine_samples_from_it(directory, experts):
    def sample(model):
        engine = LocalEngine(model, max_tokens=64, max_batch_size=1)
        engine.sync(0)
        request = SampleRequest(
            rollout_id="r",
            context=tuple(IDS[0, :6].tolist()),
            shared_len=3,
            max_new_tokens=8,
            stop_ids=frozenset(),
            temperature=1.0,
            seed=0,
        )
        return engine.generate([request])[0]

    ours, plain = sample(load(directory, experts)), sample(load(directory, "loop"))
    assert ours.ids == plain.ids
    assert ours.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.parametrize("experts", KINDS)
def test_the_export_is_mxfp4_bit_for_bit(directory, tmp_path, experts):
    model = load(directory, experts, dtype=torch.bfloat16)
    save_hf(model, tmp_path / "out", directory)
    before = load_file(directory / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in after.items():
        changed = name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight"))
        assert torch.equal(value, before[name]) != changed, name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


@pytest.mark.parametrize("experts", KINDS)
def test_the_plain_builder_loads_the_export(directory, tmp_path, experts):
    """It decodes what was written, and computes what was trained."""
    model = load(directory, experts)
    save_hf(model, tmp_path / "out", directory)
    again = gpt_oss(tmp_path / "out", dtype=torch.float32, backend="folded")
    inputs = {"mask": MaskPlan.causal(NUM), "input_pos": torch.arange(NUM)[None]}
    with torch.no_grad():
        assert torch.allclose(model(IDS, **inputs), again(IDS, **inputs), atol=1e-4)


def test_what_is_refused(directory, tmp_path):
    plain = tiny.write(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"experts: 'packed' needs MXFP4 weights, and .* plain"):
        load(plain, "packed")
    with pytest.raises(ValueError, match=r"experts: 'streamed' are frozen.*use lora_gpt_oss"):
        gpt_oss(directory, dtype=torch.float32, experts="streamed")
    with pytest.raises(ValueError, match="down_proj cannot be adapted with experts: 'packed'"):
        load(directory, "packed", lora_modules=["q_proj", "down_proj"])
    with pytest.raises(ValueError, match="one of auto, grouped, loop, packed, streamed, not 'cpu'"):
        load(directory, "cpu")
    with pytest.raises(ValueError, match="blocks of 32, 48 inputs are not"):
        PackedExpertLinear(2, 48, 32)
    world = parallelize.World(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="stored in four bits"):
        parallelize.shard(load(directory, "packed"), world, dtype=torch.float32)


def test_a_scale_that_is_not_a_number_is_refused(tmp_path):
    state = tiny.packed(tiny.tensors(dtype=torch.bfloat16))
    state["model.layers.2.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    bad = tiny.write(tmp_path / "bad", state=state, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match="a scale of 255 is not a number"):
        load(bad, "packed")
