"""One loss, every layout: value and gradients of an update however its rollouts are laid out."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.attention.plan import MaskPlan
from components.models.conversion import from_hf
from components.models.smollm2 import smollm2
from components.rl.aggregate import Aggregation
from components.rl.importance import Importance
from components.rl.losses import CISPOLoss, GRPOLoss, GSPOLoss
from components.rl.objective import Objective
from components.rl.packing import PackItem, empty_batch, pack
from components.training.parallelize import World, full_tensor, shard, shard_like
from components.training.policy_update import PolicyUpdate
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from components.training.update import UpdateSettings, packed_rows
from tests.unit.models import tiny
from tests.unit.rl.ledgers import item
from tests.unit.training import dense_loss
from tests.unit.training.dense_loss import DEFAULTS, TEMPERATURE

LOSSES = {"grpo": GRPOLoss, "gspo": GSPOLoss, "cispo": CISPOLoss}


def perturbed() -> dict[str, Tensor]:
    """Weights of a reference policy that is not the policy."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: w + 0.05 * torch.randn(w.shape, generator=generator)
        for name, w in tiny.tensors().items()
    }


class Recorded(torch.optim.SGD):
    """SGD that keeps the gradients of its last step."""

    def step(self, closure=None):
        self.seen = [full_tensor(p.grad).clone() for p in self.param_groups[0]["params"]]
        return super().step(closure)


def objective(options: dict[str, Any]) -> Objective:
    o = {**DEFAULTS, **options}
    loss = LOSSES[o["loss"]](
        eps_low=1 - o["low"], eps_high=o["high"] - 1, beta=o["beta"], kl_estimator=o["kl"]
    )
    importance = {name: o[name] for name in ("level", "cap", "mask_below", "mask_above")}
    return Objective(
        loss=loss,
        aggregation=Aggregation(over=o["over"], divisor=o["divisor"]),
        importance=Importance(**importance),
        ratio=o["ratio"],
        entropy_bonus=o["bonus"],
    )


def update(
    model, reference, options, *, world, rows, chunk=3, num=1, lr=0.0
) -> tuple[float, dict[str, Tensor]] | None:
    """Loss (mean of ``num`` updates) and gradients (of the last) by the code of the recipe."""
    masters = MasterWeights(model)
    optimizer = Recorded(masters.parameters(), lr=lr)
    take = PolicyUpdate(
        model,
        masters,
        optimizer,
        objective=objective(options),
        reference=reference,
        settings=UpdateSettings(
            temperature=TEMPERATURE, logprob_chunk=chunk, max_grad_norm=1e9, updates_per_batch=num
        ),
        world=world,
    )
    metrics, first = take(
        rows, check_stop=lambda: None, model_metrics=dict, dump=Path("/nonexistent")
    )
    if first is None:
        assert metrics["importance/masked_frac"] == 1.0
        return None
    names = [name for name, _ in masters.named_parameters()]
    return metrics["loss/total"], dict(zip(names, optimizer.seen, strict=True))


def with_plans(batches):
    return [(batch, MaskPlan.from_tree(batch.tree)) for batch in batches]


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Ours (layers kept, layers computed again), our reference weights, and transformers' two."""
    folder = tmp_path_factory.mktemp("layouts")
    directory = tiny.write(folder / "policy")
    ours = {
        again: smollm2(directory, dtype=torch.float32, checkpoint_activations=again)
        for again in (False, True)
    }
    other = smollm2(tiny.write(folder / "ref", state=perturbed()), dtype=torch.float32)
    weights = {name: p.detach() for name, p in other.named_parameters()}
    return ours, weights, dense_loss.llama(tiny.tensors()), dense_loss.llama(perturbed())


def reference_of(model, weights) -> ReferencePolicy:
    reference = ReferencePolicy(model)
    for name, tensor in reference.tensors().items():
        tensor.copy_(shard_like(tensor, weights[name]))
    return reference


def dense(policies, items, options) -> tuple[float, dict[str, Tensor]] | None:
    ours, _, theirs, their_reference = policies
    theirs.zero_grad()
    new = dense_loss.tables(theirs, items)
    before = [logp.detach() for logp, _ in new]
    with torch.no_grad():
        reference = [logp for logp, _ in dense_loss.tables(their_reference, items)]
    loss = dense_loss.dense_loss(new, before, reference, items, options)
    if loss is None:
        return None
    loss.backward()
    grads = {n: p.grad for n, p in theirs.named_parameters() if n != "lm_head.weight"}
    return loss.item(), from_hf(grads, ours[False].config)


def assert_equal(found, expected) -> None:
    """To 1e-5 in fp32, of the largest entry of a gradient where that is above 1."""
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        difference = (grad.double() - expected[1][name]).abs().max()
        assert difference <= 1e-5 * max(1.0, float(expected[1][name].abs().max())), name


ids = st.integers(0, 49)


@st.composite
def rollouts(draw: st.DrawFn) -> list[PackItem]:
    """Groups of tasks under one system prompt, of one to three turns, up to 30 tokens long."""
    items = []
    system = draw(st.lists(ids, min_size=1, max_size=6))
    for t in range(draw(st.integers(1, 2))):
        task = draw(st.lists(ids, min_size=1, max_size=3))
        for g in range(draw(st.integers(1, 3))):
            turns = draw(st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=5))
            length = len(system) + len(task) + sum(map(len, turns))
            # Around log(50): some ratios are clipped, capped or out of bounds, some are not.
            logprobs = draw(st.lists(st.integers(150, 350), min_size=length, max_size=length))
            items.append(
                item(
                    f"{t}/{g}",
                    [*system, *task],
                    *turns,
                    advantage=draw(st.sampled_from([-1.5, -0.5, 0.25, 1.0])),
                    logprobs=[-x / 64 - 1e-3 for x in logprobs],
                )
            )
    return items


@st.composite
def any_options(draw: st.DrawFn) -> dict[str, Any]:
    loss = draw(st.sampled_from(sorted(LOSSES)))
    ratio = draw(st.sampled_from(["proximal", "generator"]))
    over = draw(st.sampled_from(["token", "sequence", "constant"]))
    masked = draw(st.booleans())
    return {
        "loss": loss,
        "ratio": ratio,
        "low": 0.8,
        "high": draw(st.sampled_from([1.2, 1.5])),
        "over": over,
        "divisor": 7.0 if over == "constant" else None,
        "level": draw(st.sampled_from(["token", "sequence"])),
        "cap": draw(st.sampled_from([None, 2.0])) if ratio == "proximal" else None,
        "mask_below": 0.3 if masked else None,
        "mask_above": draw(st.sampled_from([None, 4.0])) if masked else None,
        "beta": draw(st.sampled_from([0.0, 0.3])),
        "kl": draw(st.sampled_from(["k1", "k2", "k3"])),
        "bonus": draw(st.sampled_from([0.0, 0.2])),
    }


@given(
    items=rollouts(),
    options=any_options(),
    room=st.floats(1.0, 4.0),
    share=st.booleans(),
    padding=st.sampled_from([1, 4]),
    num_empty=st.integers(0, 1),
    chunk=st.integers(1, 9),
    again=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_layout_equals_each_rollout_alone(
    policies, items, options, room, share, padding, num_empty, chunk, again, shuffle
):
    expected = dense(policies, items, options)
    ours, weights, *_ = policies
    longest = max(len(i.tokens) for i in items)
    size = -int(-longest * room // padding) * padding
    shuffle.shuffle(items)
    batches = pack(items, tokens_per_batch=size, share=share, pad_to_multiple=padding)
    batches += [empty_batch()] * num_empty
    found = update(
        ours[again],
        reference_of(ours[again], weights) if options["beta"] > 0 else None,
        options,
        world=World.alone(),
        rows=with_plans(batches),
        chunk=chunk,
    )
    assert_equal(found, expected)


def examples() -> list[PackItem]:
    """Two groups of three; every rollout has two sampled turns."""
    generator = torch.Generator().manual_seed(3)

    def draw(num: int) -> list[int]:
        return torch.randint(50, (num,), generator=generator).tolist()

    system, items = draw(5), []
    for t in range(2):
        task = draw(3)
        for g in range(3):
            turns = [draw(2 + g), draw(2), draw(3)]
            noise = torch.randn(8 + sum(map(len, turns)), generator=generator)
            logprobs = (-4 + 1.5 * noise).clamp(max=-0.01).tolist()
            advantage = [1.5, -1.0, -0.5][(g + t) % 3]
            items.append(
                item(f"{t}/{g}", [*system, *task], *turns, advantage=advantage, logprobs=logprobs)
            )
    return items


SEVERAL = {
    "grpo": {"beta": 0.1},
    "gspo": {"loss": "gspo", "low": 0.99, "high": 1.01, "over": "sequence"},
    "cispo": {"loss": "cispo", "low": 0.0, "high": 1.1, "over": "constant", "divisor": 7.0},
    "masked": {"mask_below": 0.3, "mask_above": 4.0, "level": "token", "bonus": 0.2},
    "sequence": {"level": "sequence", "cap": 2.0, "over": "sequence"},
}


@pytest.mark.parametrize("name", SEVERAL)
def test_later_updates_are_against_the_first_log_probabilities(policies, tmp_path, name):
    """Fault 15: three steps of SGD on the same rollouts, the ratio against those before them."""
    options, lr, num, items = SEVERAL[name], 0.3, 3, examples()
    _, weights, theirs, their_reference = policies
    theirs = copy.deepcopy(theirs)
    losses, before = [], None
    with torch.no_grad():
        reference = [logp for logp, _ in dense_loss.tables(their_reference, items)]
    for _ in range(num):
        theirs.zero_grad()
        new = dense_loss.tables(theirs, items)
        before = before or [logp.detach() for logp, _ in new]
        loss = dense_loss.dense_loss(new, before, reference, items, options)
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in theirs.parameters():
                p -= lr * p.grad
    model = smollm2(tiny.write(tmp_path / "policy"), dtype=torch.float32)
    grads = {n: p.grad for n, p in theirs.named_parameters() if n != "lm_head.weight"}
    expected = sum(losses) / num, from_hf(grads, model.config)
    found = update(
        model,
        reference_of(model, weights) if options.get("beta") else None,
        options,
        world=World.alone(),
        rows=with_plans(pack(items, tokens_per_batch=40)),
        num=num,
        lr=lr,
    )
    assert_equal(found, expected)
    assert before is not None
    moved = [(a.detach() - b).exp() for (a, _), b in zip(new, before, strict=True)]
    assert max(float(ratio.max()) for ratio in moved) > 1.2  # the clip of tokens acts


def run_rank(rank: int, directory: Path, reference_directory: Path, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(rank=rank, size=2, device=torch.device("cpu"))
    other = smollm2(reference_directory, dtype=torch.float32)
    weights = {name: p.detach() for name, p in other.named_parameters()}
    items = examples()
    for shares in (items[:2], []):  # the second rank has the rest: more rows, or all of them
        mine = shares if rank == 0 else items[len(shares) :]
        for name, options in SEVERAL.items():
            alone = smollm2(directory, dtype=torch.float32)
            model = smollm2(directory, dtype=torch.float32)
            shard(model, world, dtype=torch.float32)
            found = []
            for policy, place, part in ((alone, World.alone(), items), (model, world, mine)):
                rows, _ = packed_rows(part, tokens_per_batch=40, world=place)
                reference = reference_of(policy, weights) if options.get("beta") else None
                found.append(
                    update(policy, reference, options, world=place, rows=rows, num=2, lr=0.3)
                )
            assert found[0] is not None, name
            assert_equal(found[1], (found[0][0], {n: g.double() for n, g in found[0][1].items()}))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    """FSDP2 over gloo, rollouts dealt out unevenly, one rank perhaps without any."""
    directory = tiny.write(tmp_path / "policy")
    reference = tiny.write(tmp_path / "reference", state=perturbed())
    mp.spawn(run_rank, args=(directory, reference, str(tmp_path / "store")), nprocs=2)
