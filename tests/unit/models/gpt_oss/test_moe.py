import copy
import math

import pytest
import torch

from components.attention.plan import MaskPlan
from components.models.gpt_oss import gpt_oss
from components.models.smollm2 import smollm2
from tests.unit.models import tiny as dense

from . import tiny

IDS = torch.randint(0, tiny.VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tiny.write(tmp_path_factory.mktemp("gpt_oss") / "tiny")
    return gpt_oss(directory, dtype=torch.float32, checkpoint_activations=True)


def run(model, ids=IDS):
    num = ids.shape[1]
    return model(ids, mask=MaskPlan.causal(num), input_pos=torch.arange(num)[None])


def test_a_layer_written_out_in_fp64(model):
    moe = model.layers[0].mlp
    torch.manual_seed(0)
    x = torch.randn(2, 9, tiny.WIDTH) * 2
    with torch.no_grad():
        got = moe(x)
        d = {name: p.double() for name, p in moe.named_parameters()}
        for token, out in zip(x.flatten(0, 1).double(), got.flatten(0, 1), strict=True):
            logits = d["router.weight"] @ token + d["router.bias"]
            picked = logits.argsort(descending=True)[:2]
            weights = (logits[picked] - logits[picked].logsumexp(0)).exp()
            exact = torch.zeros(tiny.WIDTH, dtype=torch.float64)
            for expert, weight in zip(picked, weights, strict=True):
                h = token @ d["experts.gate_up_proj.weight"][expert]
                h = h + d["experts.gate_up_proj.bias"][expert]
                gate, up = h[0::2].clamp(max=7), h[1::2].clamp(-7, 7)
                h = (up + 1) * gate / (1 + (-1.702 * gate).exp())
                h = h @ d["experts.down_proj.weight"][expert]
                exact += weight * (h + d["experts.down_proj.bias"][expert])
            assert torch.allclose(out.double(), exact, atol=1e-4)


def test_the_router_is_fp32_in_a_bfloat16_model(model):
    moe = copy.deepcopy(model.layers[0].mlp).to(torch.bfloat16)
    with torch.no_grad():
        # 1 and 1 + 2**-9: one and the same number in bfloat16
        moe.router.weight.zero_()
        moe.router.weight[:, :2] = torch.tensor([1.0, 2.0**-9])
        moe.router.weight[3, 1] = 0
        moe.router.bias.zero_()
        x = torch.zeros(1, tiny.WIDTH, dtype=torch.bfloat16)
        x[0, :2] = 1
        weights, chosen, margin = moe.route(x)
    assert weights.dtype == torch.float32
    assert 3 not in chosen
    assert float(margin) == 0.0


def test_load_is_counted_once_per_training_pass_and_read_once(model):
    model.step_metrics()
    with torch.no_grad():
        run(model)
    assert model.step_metrics() == {}  # sampling and scoring do not count
    logits = run(model)
    before = [layer.mlp.load.clone() for layer in model.layers]
    assert all(int(load.sum()) == 2 * 40 for load in before)
    logits.sum().backward()
    # layers that are computed again count again, in the same shares
    assert all(
        torch.equal(layer.mlp.load, 2 * b) for layer, b in zip(model.layers, before, strict=True)
    )
    metrics = model.step_metrics()
    shares = [b.double() / b.sum() for b in before]
    mean = sum(float(s.max()) for s in shares) / tiny.LAYERS
    assert metrics["moe/load_max_frac"] == pytest.approx(mean)
    entropy = [-sum(x * math.log(x) for x in s.tolist() if x) / math.log(8) for s in shares]
    assert metrics["moe/load_entropy"] == pytest.approx(sum(entropy) / tiny.LAYERS)
    unused = sum(float((b == 0).double().mean()) for b in before) / tiny.LAYERS
    assert metrics["moe/unused_frac"] == pytest.approx(unused)
    assert 0 <= metrics["moe/near_tie_frac"] < 0.2
    assert model.step_metrics() == {}


def test_near_ties_and_an_even_load(model):
    moe = copy.deepcopy(model.layers[0].mlp)
    moe.step_metrics()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([5.0, 1.0, 0.9999, 0, 0, 0, 0, 0]))
    moe(torch.ones(1, 6, tiny.WIDTH))
    metrics = moe.step_metrics()
    assert metrics["moe/near_tie_frac"] == 1.0
    assert metrics["moe/load_max_frac"] == 0.5
    assert metrics["moe/unused_frac"] == 6 / 8
    assert metrics["moe/load_entropy"] == pytest.approx(math.log(2) / math.log(8))
    with torch.no_grad():
        moe.router.bias[2] = 0.9
    moe(torch.ones(1, 6, tiny.WIDTH))
    assert moe.step_metrics()["moe/near_tie_frac"] == 0.0


def test_counts_are_no_weights(model):
    assert not any("load" in name or "ties" in name for name in model.state_dict())


def test_a_dense_model_reports_nothing(tmp_path):
    plain = smollm2(dense.write(tmp_path / "dense"), dtype=torch.float32, backend="folded")
    plain(IDS[:, :7] % 50, mask=MaskPlan.causal(7), input_pos=torch.arange(7)[None])
    assert plain.step_metrics() == {}


@pytest.mark.parametrize("experts", ["grouped", "loop"])
def test_one_token_and_tokens_that_all_choose_alike(tmp_path, experts):
    directory = tiny.write(tmp_path / "m")
    model = gpt_oss(directory, dtype=torch.float32, experts=experts)
    single = run(model, IDS[:, :1])
    assert torch.allclose(single[0], run(model)[0], atol=1e-5)
    model.step_metrics()
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.router.bias[:2] += 1000
    run(model).sum().backward()
    assert model.step_metrics()["moe/unused_frac"] == 6 / 8
