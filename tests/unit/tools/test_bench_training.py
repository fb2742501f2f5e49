"""The arithmetic of the benchmark of updates, by hand, and that its arms do the same work."""

import json
from dataclasses import replace

import pytest
import torch

from components.models.decoder import ModelConfig
from tests.unit.models import tiny
from tools.bench_training import Bench, main, matmul_share, measure, ratio
from tools.bench_training_job import Job, read_job, rollouts
from tools.bench_training_ours import flops, product_rate, rows_of, run

CONFIG = ModelConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    embed_dim=24,
    ffn_dim=40,
    vocab_size=300,
    max_positions=256,
    rope_base=1e4,
    norm_eps=1e-5,
    tie_word_embeddings=True,
)


def job(arm, *, model="", responses=(2, 3), vocab_size=300):
    prompt, answers, rewards = rollouts(prompt=5, responses=list(responses), vocab_size=vocab_size)
    return Job(
        arm=arm,
        model=str(model),
        prompt=prompt,
        responses=answers,
        rewards=rewards,
        dtype="fp32",
        num_updates=2,
    )


@pytest.mark.parametrize(
    ("arm", "lengths"),
    [
        # The last token of each rollout predicts nothing; the prompt's last is in each branch.
        ("tree", [4 + (1 + 1) + (1 + 2)]),
        ("packed", [5 + 1 + 5 + 2]),
        ("padded", [8, 8]),
    ],
)
def test_rows_of_an_arm(arm, lengths):
    rows = rows_of(job(arm))
    assert [len(row.tokens) for row in rows] == lengths
    assert sum(len(row.index) for row in rows) == 5
    assert sorted(a for row in rows for a in row.advantages.tolist()) == [-0.5] * 2 + [0.5] * 3


def test_flops_by_hand():
    found = flops(CONFIG, rows_of(job("tree")))
    weights = 24 * 32 + 2 * 24 * 16 + 32 * 24 + 3 * 24 * 40
    assert found["layers"] == 2 * 3 * weights * 2 * 9
    pairs = (1 + 2 + 3 + 4) + (5 + 6) + (5 + 6 + 7)
    assert found["attention"] == 3 * 2 * 2 * 32 * pairs * 2  # scores and values, two layers
    assert found["head"] == 2 * 3 * 24 * 300 * 5


def test_a_share_is_flops_over_time_over_the_rate_of_the_products():
    arm = {"flops": {"a": 60.0, "b": 40.0}, "wall_s": [4.0, 2.0, 3.0]}
    arm["product_flops_per_s"] = [50.0, 150.0]
    assert matmul_share(arm) == pytest.approx(100 / 3 / 100)
    arms = {"trl": {"wall_s": [9.0]}, "tree": arm}
    assert ratio(arms, "trl", "tree") == 3.0
    assert ratio(arms, "packed", "tree") is None
    assert product_rate(CONFIG, tokens=16, trained=8, dtype=torch.float32) > 0


def test_the_arms_take_the_same_update(tmp_path):
    """Equal gradients over two updates: what is timed is equal work."""
    model = tiny.write(tmp_path / "model", state=tiny.tensors())
    (model / "config.json").write_text(json.dumps(tiny.CONFIG | {"vocab_size": 50}))
    norms = []
    for arm in ("tree", "packed", "padded"):
        orders = job(arm, model=model, vocab_size=150)
        orders = replace(
            orders,
            prompt=[i % 50 for i in orders.prompt],
            responses=[[i % 50 for i in ids] for ids in orders.responses],
        )
        found = run(read_job(orders.write(tmp_path / "job.json")))
        assert len(found["wall_s"]) == 2
        norms.append(found["grad_norm"])
    assert norms[0][0] > 0
    assert norms[0] != pytest.approx(norms[0][::-1], rel=1e-5)  # the first update did something
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-4)


class Scripted(Bench):
    """Arms that take as long as they are told to."""

    SECONDS = {"tree": 2.0, "packed": 6.0, "padded": 9.0, "trl": 12.0}  # noqa: RUF012

    def _run(self, python, script, job):
        norm = 1.1 if job.arm == self.wrong else 1.0
        return {
            "wall_s": [self.SECONDS[job.arm] + 4 * (job.rows_at_once == 8)] * job.num_updates,
            "cpu_s": [],
            "grad_norm": [norm] * job.num_updates,
            "flops": {"layers": 8.0},
            "product_flops_per_s": [10.0, 6.0] if job.product_rates else [],
        }


def scripted(tmp_path, *, wrong="", **settings):
    source = tiny.write(tmp_path / "model", state=tiny.tensors())
    config = tiny.CONFIG | {"vocab_size": 200, "num_hidden_layers": 9}
    (source / "config.json").write_text(json.dumps(config))
    bench = Scripted(source, dtype="bf16", folder=tmp_path, **settings)
    bench.wrong = wrong
    return bench


@pytest.mark.parametrize("quick", [True, False])
def test_the_keys_of_a_run(tmp_path, quick):
    bench = scripted(tmp_path, trl_python=tmp_path, quick=quick)
    found = measure(bench)
    assert found["speedup_vs_trl_1k_64"] == 6.0  # the faster of two ways
    assert found["speedup_vs_trl_5k_512"] == 6.0
    assert found["tree_vs_packed_5k_512"] == 3.0
    assert found["packed_vs_padded"] == (None if quick else 1.5)
    assert found["matmul_share"] == pytest.approx(8 / 2 / 8)
    assert found["layers_5k_512"] == (8 if quick else "all")
    layers = {name: json.loads((p / "config.json").read_text()) for name, p in bench.models.items()}
    assert layers["5k_512"]["num_hidden_layers"] == (8 if quick else 9)
    assert layers["1k_64"]["num_hidden_layers"] == 9
    without = measure(scripted(tmp_path / "none", trl_python=None, quick=quick))
    assert without["speedup_vs_trl_1k_64"] is None
    assert without["without_trl"]


def test_arms_that_do_not_take_the_same_step_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"1k_64: gradient norms .*trl"):
        measure(scripted(tmp_path, wrong="trl", trl_python=tmp_path, quick=True))


def test_without_trl(tmp_path, capsys):
    absent = tmp_path / "python"
    assert main(["--trl-python", str(absent)]) == 1
    assert "make bench-venv" in capsys.readouterr().err
