"""Decoding from a packed copy of the weights: the model's numbers, and never those of old weights.

The reference is a plain dense forward of the model over each whole rollout.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchtune.modules.peft import disable_adapter

from components.models.decode_step import DecodeStep, why_not
from components.models.lora import add_adapters
from components.policy.local import LocalEngine
from tests.unit.policy.tiny import KINDS, VOCAB, plain_logprobs, request, tiny_model

CONTEXT = [5, 9, 1, 44, 17, 3]
# q, k, v: 48 x (96 + 32 + 32); out: 96 x 48; gate, up, down: 3 x 48 x 64; the head: 61 x 48
NUMBERS = 3 * (48 * 160 + 96 * 48 + 3 * 48 * 64) + VOCAB * 48


def engine_of(model, **settings) -> LocalEngine:
    return LocalEngine(model, **({"max_tokens": 60, "max_batch_size": 3} | settings))


def error(engine: LocalEngine, model, *, seed: int = 0) -> float:
    """Of the log-probabilities of a new rollout, against a plain forward of the model as it is."""
    name = f"{engine.stats.decode_steps}"
    [result] = engine.generate([request(name, CONTEXT, seed=seed, max_new_tokens=12)])
    engine.release([name])
    expected = plain_logprobs(model, CONTEXT, result.ids, temperature=1.0)
    return max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True))


def adapted(seed: int = 3):
    """A model with adapters that do something, as they are after some training."""
    model = tiny_model("all")
    add_adapters(model, ["q_proj", "v_proj", "output_proj", "w1", "w2", "w3"], rank=2, alpha=6.0)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.15)
    return model


@torch.no_grad()
def change(model, how: str) -> None:
    """Other weights, as an optimizer, a copy from another model, or a loader would write them."""
    for parameter in model.parameters():
        new = parameter + 0.05 * torch.randn_like(parameter)
        if how == "in place":
            parameter.copy_(new)
        elif how == "data":
            parameter.data.copy_(new)  # raises no version counter
        else:
            parameter.data = new


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_models_forward(kind):
    model = tiny_model(kind)
    engine = engine_of(model, pack_weights=True)
    assert engine.packed_bytes() == 0
    assert error(engine, model) < 1e-5
    assert engine.packed_bytes() == 4 * NUMBERS
    apart = engine_of(model, pack_weights=False)
    assert error(apart, model) < 1e-5
    assert apart.packed_bytes() == 0


def test_bfloat16_is_no_further_off_than_unpacked():
    exact, model = tiny_model("all"), tiny_model("all").to(torch.bfloat16)
    if why_not(model) is not None:
        pytest.skip(f"here {why_not(model)}")
    exact.load_state_dict(model.state_dict())
    asked = request("a", CONTEXT, temperature=0.0, max_new_tokens=40)

    def worst(*, pack_weights: bool) -> float:
        [result] = engine_of(model, pack_weights=pack_weights).generate([asked])
        expected = plain_logprobs(exact, CONTEXT, result.ids, temperature=0.0)
        return max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True))

    assert worst(pack_weights=True) <= 2 * worst(pack_weights=False) + 0.02


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
def test_old_weights_are_never_served(how, sync):
    if how == "data" and not sync:
        pytest.skip("nothing tells of such a change but a sync")
    model = tiny_model("sinks")
    engine = engine_of(model)
    error(engine, model)
    change(model, how)
    if sync:
        engine.sync(1)
    assert error(engine, model) < 1e-5
    assert engine.packed_bytes() == 4 * NUMBERS  # the old copy is gone


def test_a_copy_that_is_not_made_anew_is_seen(monkeypatch):
    """The test above can fail: with the copy kept, the log-probabilities are those of the old."""
    model = tiny_model("sinks")
    engine = engine_of(model)
    error(engine, model)
    change(model, "in place")
    monkeypatch.setattr(DecodeStep, "is_stale", lambda self: False)
    assert error(engine, model) > 1e-2


def test_adapters_are_applied_beside_their_base():
    model = adapted()
    engine = engine_of(model)
    assert error(engine, model) < 1e-5
    with disable_adapter(model):
        assert error(engine, model) < 1e-5  # the base alone
    assert error(engine, model) < 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.mul_(-1.5)
    assert error(engine, model) < 1e-5


def test_adapters_count_in_the_numbers_above():
    model, other = adapted(), adapted(seed=4)
    assert error(engine_of(model), other) > 1e-2
    with disable_adapter(model):
        base = engine_of(model)
        error(base, model)
    assert base.packed_bytes() == 4 * NUMBERS
    assert error(base, model) < 1e-5  # switched on again: seen without a sync
    assert base.packed_bytes() > 4 * NUMBERS


def test_biases_and_scales_of_a_layer():
    model = tiny_model("all")
    torch.manual_seed(1)
    for layer in model.layers:
        layer.attn.q_proj.bias = nn.Parameter(torch.randn(96))
        layer.attn.output_proj.bias = nn.Parameter(torch.randn(48))
        layer.attn.k_norm = nn.RMSNorm(16)
        layer.mlp_scale = nn.Linear(48, 48)
    assert error(engine_of(model, pack_weights=True), model) < 1e-5


def test_other_layers_go_through_their_own_modules():
    class Mirror(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, *, mask, input_pos):
            return -self.layer(-x, mask=mask, input_pos=input_pos)

    model = tiny_model("all")
    model.layers[1] = Mirror(model.layers[1])
    model.layers[2].mlp = nn.Sequential(nn.Linear(48, 48), nn.Tanh())
    engine = engine_of(model, pack_weights=True)
    assert error(engine, model) < 1e-5
    # the first layer, the attention of the third, and the head
    packed = 48 * 160 + 96 * 48
    assert engine.packed_bytes() == 4 * (2 * packed + 3 * 48 * 64 + VOCAB * 48)


@pytest.mark.parametrize("kind", ["plain", "all"])
def test_bitwise_the_same_alone_or_in_company(kind):
    """The same steps with other neighbours: the products have one shape, whoever is there."""
    model = tiny_model(kind)
    asked = request("a", CONTEXT, shared_len=4, max_new_tokens=20, seed=5)
    others = [
        request(name, [*CONTEXT[:4], *range(n)], shared_len=4, seed=n, max_new_tokens=20)
        for name, n in (("b", 3), ("c", 7))
    ]
    [alone] = engine_of(model).generate([asked])
    [together, *_] = engine_of(model).generate([asked, *others])
    [last] = engine_of(model).generate([*others, asked])[2:]
    assert alone == together == last


def test_settings_are_checked():
    wide = tiny_model(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"pack_weights: true, but .*float64.*pack_weights: false"):
        engine_of(wide, pack_weights=True)
    with pytest.raises(ValueError, match="cannot be packed for decoding"):
        DecodeStep(wide, num_rows=1)
    with pytest.raises(ValueError, match="pack_weights must be auto, true or false, not 'yes'"):
        engine_of(tiny_model(), pack_weights="yes")


def test_what_auto_does_not_pack_is_said(caplog):
    wide = tiny_model(dtype=torch.float64)
    with caplog.at_level("INFO"):
        engine = engine_of(wide)
    assert "decode weights are not packed (auto): the weights are torch.float64" in caplog.text
    assert error(engine, wide) < 1e-6  # logits are float32
    assert engine.packed_bytes() == 0
