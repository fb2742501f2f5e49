import pytest
import torch

from components.attention.plan import MaskPlan
from components.models.gpt_oss import gpt_oss
from components.models.smollm2 import smollm2
from components.policy.replay import routing_gap
from components.training import model_metrics as module
from components.training.model_metrics import model_metrics
from components.training.parallelize import World
from tests.unit.models import tiny as dense
from tests.unit.models.gpt_oss import tiny
from tests.unit.rl.ledgers import item

ITEMS = [item("b", [1, 2, 3], [4, 5], [6], [7]), item("a", [9, 8, 7, 6], [5, 4, 3], [2], [1, 1])]
ROUTES = {"mismatch/route_frac", "mismatch/route_token_frac"}
LOAD = {"moe/load_max_frac", "moe/load_entropy", "moe/unused_frac", "moe/near_tie_frac"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("gpt_oss") / "tiny")


def step(model, num_tokens=12):
    tokens = torch.arange(num_tokens)[None]
    model(tokens, mask=MaskPlan.causal(num_tokens), input_pos=tokens).sum().backward()


def test_a_dense_model_has_nothing_to_report_and_runs_nothing(tmp_path, monkeypatch):
    model = smollm2(dense.write(tmp_path / "dense"), dtype=torch.float32, backend="folded")
    monkeypatch.setattr(model, "forward", None)
    assert model_metrics(model, model, ITEMS, World.alone()) == {}


def test_load_and_routing_of_a_step(directory, monkeypatch):
    model = gpt_oss(directory, dtype=torch.float32)
    step(model)
    seen = []

    def spy(*args, **keys):
        seen.append((args[2], keys["num_prompt"]))
        return routing_gap(*args, **keys)

    monkeypatch.setattr(module, "routing_gap", spy)
    metrics = model_metrics(model, model, ITEMS, World.alone())
    assert metrics.keys() == ROUTES | LOAD
    assert metrics["mismatch/route_frac"] == 0.0  # one module, fp32
    assert seen == [((9, 8, 7, 6, 5, 4, 3), 4)]  # the first turn of the first by key
    step(model)
    nothing = [item("c", [1, 2, 3])]  # no sampled token: left out as the packing leaves it out
    assert model_metrics(model, model, nothing, World.alone()).keys() == LOAD
    assert model_metrics(model, model, [], World.alone()) == {}  # nothing was trained since


def test_the_replayed_part_is_bounded(directory, monkeypatch):
    monkeypatch.setattr(module, "NUM_REPLAYED", 2)
    assert module._first_turn(ITEMS) == ((9, 8, 7, 6, 5, 4), 4)


def test_another_engine_model_shows(directory):
    model, other = (gpt_oss(directory, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for layer in other.layers:
            layer.mlp.router.bias.neg_()
    step(model)
    assert model_metrics(model, other, ITEMS, World.alone())["mismatch/route_token_frac"] > 0.5


def test_ranks_are_averaged_over_those_that_report(directory, monkeypatch):
    monkeypatch.setattr(World, "gather", lambda self, items: [*items, {"moe/unused_frac": 1.0}])
    model = gpt_oss(directory, dtype=torch.float32)
    step(model)
    own = model.step_metrics()
    step(model)
    metrics = model_metrics(model, model, ITEMS, World.alone())
    assert metrics["moe/unused_frac"] == pytest.approx((own["moe/unused_frac"] + 1) / 2)
    assert metrics["moe/load_entropy"] == pytest.approx(own["moe/load_entropy"])
