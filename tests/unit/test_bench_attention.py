"""The attention benchmark: its arms compute one thing, its figures are those of what was timed."""

import json

import pytest
import torch
from torch import nn
from torchtune.modules import TransformerSelfAttentionLayer

from components.attention.sink_attention import SinkAttention
from components.models.decoder import ModelConfig, PolicyModel
from components.models.layers import FeedForward, RMSNorm
from tools import bench_attention, bench_model
from tools.bench_cases import Measured, Shape, make_arms, make_inputs, measure, peak_allocated

CPU = torch.device("cpu")
SHAPE = Shape(num_heads=4, num_kv_heads=2, head_dim=16)


def inputs(num_tokens):
    return make_inputs(num_tokens, shape=SHAPE, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("window", [None, 127])
def test_the_arms_compute_the_same(window):
    x = inputs(300)
    arms = make_arms(x, window=window, max_dense=300, max_reference=300)
    leaves = (x.q, x.k, x.v, x.sinks)
    results = {}
    for name in ("eager", "folded", "reference"):
        out = arms[name](x)
        results[name] = (out.detach(), *torch.autograd.grad(out, leaves, x.grad))
    for name in ("eager", "folded"):
        for got, expected in zip(results[name], results["reference"], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_which_arms_run():
    assert list(make_arms(inputs(64), window=None, max_dense=64, max_reference=32)) == [
        "eager",
        "fused",
        "folded",
    ]
    assert list(make_arms(inputs(64), window=9, max_dense=0, max_reference=0)) == ["folded"]


def test_peak_counts_what_lives_together():
    def run():
        one = torch.empty(1 << 20, dtype=torch.uint8)
        del one
        two = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(2)]
        del two

    assert 2 << 20 <= peak_allocated(run, device=CPU) < (2 << 20) + 4096


def test_a_slow_arm_has_one_pass_and_the_others_are_paired():
    x = inputs(32)
    calls = []

    def arm(name):
        def run(inputs):
            calls.append(name)
            return inputs.q * inputs.k.sum() * inputs.v.sum() * inputs.sinks.sum()

        return run

    arms = {"a": arm("a"), "b": arm("b")}
    measured = measure(arms, x, slow_s=10.0, budget_s=0.0, max_rounds=5)
    assert [len(m.total_s) for m in measured.values()] == [3, 3]
    assert calls == ["a", "b"] * 4  # a first pass for the memory, then three rounds in turn
    slow = measure(arms, x, slow_s=0.0, budget_s=1.0, max_rounds=5)
    assert [len(m.total_s) for m in slow.values()] == [1, 1]


def figures(seconds, peak):
    return Measured(forward_s=[seconds], backward_s=[seconds], peak_bytes=peak)


def test_summary_by_hand():
    results = {
        (4096, "causal", "eager"): figures(16.0, 3000),
        (4096, "causal", "fused"): figures(1.0, 90),
        (4096, "causal", "folded"): figures(2.0, 100),
        (8192, "causal", "eager"): figures(90.0, 9000),
        (8192, "causal", "folded"): figures(3.0, 200),
        (8192, "window 127", "folded"): figures(1.0, 250),
        (32768, "causal", "folded"): figures(50.0, 800),
        (32768, "window 127", "folded"): figures(2.0, 1000),
        (131072, "window 127", "folded"): figures(8.0, 4000),
    }
    found = bench_attention.summary(results, backend="folded")
    assert found == {
        "speedup_vs_eager_4096": 8.0,
        "memory_ratio_vs_eager_4096": 30.0,
        "time_ratio_vs_fused_4096": 2.0,
        "speedup_vs_eager_8192": 30.0,
        "memory_ratio_vs_eager_8192": 45.0,
        "window127_speedup_vs_full_32768": 25.0,
        "window127_memory_131072_over_8192": 16.0,
    }
    reached = {
        goal.key: goal.reached(found[goal.key])
        for goal in bench_attention.GOALS
        if goal.key in found
    }
    assert reached.pop("time_ratio_vs_fused_4096") is False
    assert all(reached.values())


def test_the_command(tmp_path, capsys):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    command = f"--quick --device cpu --lengths 64 128 --json {out} --plot {picture}"
    assert bench_attention.main(command.split()) == 0
    printed = capsys.readouterr().out
    assert "not measured" in printed
    report = json.loads(out.read_text())
    assert {(r["tokens"], r["mask"], r["arm"]) for r in report["rows"]} >= {
        (n, mask, arm)
        for n in (64, 128)
        for mask in ("causal", "window 127")
        for arm in ("folded",)
    }
    assert all(row["peak_bytes"] > 0 and min(row["forward_s"]) > 0 for row in report["rows"])
    assert report["machine"]["torch"] == torch.__version__
    assert picture.stat().st_size > 10_000


def tiny_model(backend):
    """Two layers with sinks, the first with a window."""
    torch.manual_seed(0)

    def layer(number):
        attention = SinkAttention(
            layer=number,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            q_proj=nn.Linear(16, 32),
            k_proj=nn.Linear(16, 16),
            v_proj=nn.Linear(16, 16),
            output_proj=nn.Linear(32, 16),
            sinks=nn.Parameter(torch.zeros(4)),
            window=31 if number == 0 else None,
            backend=backend,
        )
        mlp = FeedForward(
            gate_proj=nn.Linear(16, 8), down_proj=nn.Linear(8, 16), up_proj=nn.Linear(16, 8)
        )
        norms = {"sa_norm": RMSNorm(16, eps=1e-5), "mlp_norm": RMSNorm(16, eps=1e-5)}
        return TransformerSelfAttentionLayer(attention, mlp, **norms)

    config = ModelConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        embed_dim=16,
        ffn_dim=8,
        vocab_size=50,
        max_positions=4096,
        rope_base=1e4,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return PolicyModel(
        config,
        tok_embeddings=nn.Embedding(50, 16),
        layers=[layer(0), layer(1)],
        norm=RMSNorm(16, eps=1e-5),
        checkpoint_activations=True,
    )


def test_the_whole_model_study(capsys):
    records = bench_model.study(
        tiny_model,
        lengths=(256, 1024),
        device=CPU,
        backend="folded",
    )
    bench_model.print_study(records)
    assert "less memory" in capsys.readouterr().out
    peaks = {(r["arm"], r["tokens"]): r["peak_bytes"] for r in records}
    assert peaks["eager", 1024] > 4 * 1024**2 * 4  # scores of four heads in fp32
    assert peaks["folded", 1024] < 5 * peaks["folded", 256] < peaks["eager", 1024]
    assert all(len(r["step_s"]) in (1, 3) for r in records)


def test_only_attention_is_trained():
    model = tiny_model("folded")
    trained = bench_model.train_attention_only(model)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == len(names) == 18
    assert all(".attn." in name for name in names)
    with pytest.raises(ValueError, match="nothing to train"):
        bench_model.train_attention_only(nn.Linear(2, 2))
