"""Fault 20: with LoRA and a warm start, the reference is the warm-started adapter, not the base."""

from __future__ import annotations

import pytest
import torch

from components.attention.plan import MaskPlan
from components.models.smollm2 import lora_smollm2
from components.rl.aggregate import Aggregation
from components.rl.importance import Importance
from components.rl.losses import GRPOLoss
from components.rl.objective import Objective
from components.rl.packing import pack
from components.rollout.types import Rollout, RolloutSpec
from components.training.parallelize import World
from components.training.policy_update import PolicyUpdate
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from components.training.supervised import SupervisedSettings, supervised_steps
from components.training.update import UpdateSettings
from tests.unit.models import tiny
from tests.unit.training import dense_loss
from tests.unit.training.test_layouts import examples

RANK, ALPHA = 2, 4
THEIR_NAMES = {"attn.v_proj": "self_attn.v_proj", "mlp.w2": "mlp.down_proj"}


def demonstrations() -> list[Rollout]:
    found = []
    for number, item in enumerate(examples()):
        spec = RolloutSpec(
            rollout_id=item.key,
            task_id=item.key,
            domain="d",
            group=number,
            member=0,
            seed=0,
            env_seed=0,
        )
        found.append(Rollout(spec=spec, tokens=item.tokens, status="completed", reward=1.0))
    return found


@pytest.fixture
def model(tmp_path):
    """Adapters after three supervised steps."""
    torch.manual_seed(0)
    model = lora_smollm2(
        tiny.write(tmp_path / "model"),
        dtype=torch.float32,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_modules=["v_proj", "w2"],
    )
    masters = MasterWeights(model)
    supervised_steps(
        model,
        masters,
        torch.optim.SGD(masters.parameters(), lr=1.0),
        demonstrations(),
        settings=SupervisedSettings(
            num_steps=3,
            demonstrations_per_step=4,
            tokens_per_batch=40,
            logprob_chunk=8,
            max_grad_norm=1.0,
            seed=0,
        ),
        world=World.alone(),
        check_stop=lambda: None,
        on_step=lambda step, loss, norm: None,
    )
    return model


def theirs(model=None) -> torch.nn.Module:
    """transformers' model of the base, or with ``model``'s adapters added to its weights."""
    state = tiny.tensors()
    weights = {} if model is None else dict(model.named_parameters())
    for name, b in weights.items():
        if name.endswith("lora_b.weight"):
            layer, module = (
                name.removeprefix("layers.").removesuffix(".lora_b.weight").split(".", maxsplit=1)
            )
            a = weights[name.replace("lora_b", "lora_a")]
            theirs = f"model.layers.{layer}.{THEIR_NAMES[module]}.weight"
            state[theirs] = state[theirs] + (ALPHA / RANK) * (b @ a).detach()
    return dense_loss.llama(state)


@torch.no_grad()
def table(model) -> torch.Tensor:
    """Log-probabilities of all trained tokens, rollout by rollout, fp64."""
    return torch.cat([logp for logp, _ in dense_loss.tables(model, examples())])


def test_the_reference_is_the_warm_started_adapter(model, tmp_path):
    """KL is 0 at the first update; at the second it is that of transformers' merged models."""
    base, warm = table(theirs()), table(theirs(model))
    assert (warm - base).abs().max() > 0.1  # the warm start moved the policy
    masters = MasterWeights(model)
    take = PolicyUpdate(
        model,
        masters,
        torch.optim.SGD(masters.parameters(), lr=1.0),
        objective=Objective(
            loss=GRPOLoss(beta=0.1), aggregation=Aggregation(), importance=Importance()
        ),
        reference=ReferencePolicy(model),
        settings=UpdateSettings(
            temperature=dense_loss.TEMPERATURE, logprob_chunk=8, max_grad_norm=1e9
        ),
        world=World.alone(),
    )
    batches = pack(examples(), tokens_per_batch=40)
    rows = [(batch, MaskPlan.from_tree(batch.tree)) for batch in batches]
    call = {"check_stop": lambda: None, "model_metrics": dict, "dump": tmp_path / "dump.pt"}
    metrics, _ = take(rows, **call)
    assert metrics["loss/kl"] == 0.0
    moved = table(theirs(model))
    metrics, _ = take(rows, **call)
    k3 = {name: (ref - moved).expm1() - (ref - moved) for name, ref in (("w", warm), ("b", base))}
    assert metrics["loss/kl"] == pytest.approx(float(k3["w"].mean()), rel=1e-3)
    assert metrics["loss/kl"] != pytest.approx(float(k3["b"].mean()), rel=0.1)


def test_its_log_probabilities_are_not_the_bases(model):
    reference = ReferencePolicy(model)
    assert reference.tensors().keys() == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }
    warm = table(theirs(model))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    assert not torch.allclose(table(theirs(model)), warm, atol=0.1)
    with reference.swapped_in():
        assert torch.equal(table(theirs(model)), warm)
