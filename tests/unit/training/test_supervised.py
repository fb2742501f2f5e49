"""Supervised steps against a plain loop over whole demonstrations."""

import random

import pytest
import torch

from components.rollout.types import Ledger, Rollout, RolloutSpec
from components.training.parallelize import World
from components.training.precision import MasterWeights
from components.training.stop import StopRequested
from components.training.supervised import (
    SupervisedSettings,
    SupervisedUpdate,
    supervised_steps,
)
from tests.unit.policy.tiny import VOCAB, plain_logits, tiny_model

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def demonstration(number):
    rng = random.Random(number)
    ledger = Ledger()
    ledger.append_rendered([5, 6, 7, 8 + number], [1] * 4)  # a shared start
    for _ in range(2):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        ledger.append_sampled(ids, [0.0] * len(ids), policy_version=0)
        ledger.append_rendered([rng.randrange(VOCAB), 3], [2, 2])
    spec = RolloutSpec(
        rollout_id=f"demo/{number}",
        task_id=str(number),
        domain="mock",
        group=number,
        member=0,
        seed=0,
        env_seed=0,
    )
    return Rollout(spec=spec, tokens=ledger.freeze(), status="completed", reward=1.0)


DEMONSTRATIONS = [demonstration(number) for number in range(5)]


def settings(**changes):
    values = {
        "num_steps": 4,
        "demonstrations_per_step": 2,
        "tokens_per_batch": 24,
        "logprob_chunk": 3,
        "max_grad_norm": 0.5,
        "seed": 7,
    }
    return SupervisedSettings(**(values | changes))


def train(model, *, demonstrations=DEMONSTRATIONS, world=ALONE, lr=0.1, **changes):
    masters = MasterWeights(model)
    optimizer = torch.optim.SGD(masters.parameters(), lr=lr)
    seen = []
    rates = []

    def on_step(step, loss, norm):
        seen.append((step, loss, norm))
        rates.append(optimizer.param_groups[0]["lr"])

    supervised_steps(
        model,
        masters,
        optimizer,
        demonstrations,
        settings=settings(**changes),
        world=world,
        check_stop=lambda: None,
        on_step=on_step,
    )
    return seen, rates


def plain_training(model, chosen_by_step, rates, *, max_grad_norm):
    """One demonstration at a time, dense, torch's own cross entropy and clipping."""
    seen = []
    for chosen, rate in zip(chosen_by_step, rates, strict=True):
        total, count = torch.zeros(()), 0
        for rollout in chosen:
            ids, mask = rollout.tokens.ids, rollout.tokens.loss_mask
            logits = differentiable_logits(model, list(ids))
            for t in range(1, len(ids)):
                if mask[t]:
                    target = torch.tensor([ids[t]])
                    total = total + torch.nn.functional.cross_entropy(logits[t - 1][None], target)
                    count += 1
        model.zero_grad()
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
        seen.append((total.item() / count, norm.item()))
    return seen


differentiable_logits = plain_logits.__wrapped__


def test_steps_equal_a_plain_loop():
    found, rates = train(tiny_model())
    order = list(range(5))
    generator = random.Random("7/warm_start")
    generator.shuffle(order)
    again = list(range(5))
    generator.shuffle(again)
    draws = [*order, *again]
    chosen = [[DEMONSTRATIONS[i] for i in draws[2 * n : 2 * n + 2]] for n in range(4)]
    model = tiny_model()
    expected = plain_training(model, chosen, rates, max_grad_norm=0.5)
    assert [step for step, _, _ in found] == [1, 2, 3, 4]
    for (_, loss, norm), (plain_loss, plain_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-4)
        assert norm == pytest.approx(plain_norm, rel=1e-3)
    trained = tiny_model()
    train(trained)
    for a, b in zip(trained.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_the_rate_falls_linearly_to_a_tenth():
    _, rates = train(tiny_model(), lr=0.4)
    assert rates == pytest.approx([0.4, 0.28, 0.16, 0.04])
    _, rates = train(tiny_model(), lr=0.4, num_steps=1)
    assert rates == pytest.approx([0.4])


@pytest.mark.parametrize("tokens_per_batch", [16, 200])
def test_rows_do_not_matter(tokens_per_batch):
    one, _ = train(tiny_model(), demonstrations_per_step=5)
    other, _ = train(tiny_model(), demonstrations_per_step=5, tokens_per_batch=tokens_per_batch)
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_every_demonstration_is_seen_before_one_is_seen_again():
    from components.training.supervised import _draws

    draws = _draws(5, seed=1)
    passes = [[next(draws) for _ in range(5)] for _ in range(4)]
    assert all(sorted(p) == list(range(5)) for p in passes)
    assert len({tuple(p) for p in passes}) > 1
    again = _draws(5, seed=1)
    assert [next(again) for _ in range(20)] == [i for p in passes for i in p]


def test_a_small_model_learns_its_demonstrations():
    seen, _ = train(tiny_model(), num_steps=30, demonstrations_per_step=5, max_grad_norm=5.0)
    assert seen[-1][1] < 0.5 * seen[0][1]


def test_a_loss_that_is_not_finite_stops_before_the_weights_change():
    model = tiny_model()
    with torch.no_grad():
        model.norm.scale.fill_(float("nan"))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FloatingPointError, match="supervised step 1: loss nan"):
        train(model)
    assert all(
        torch.equal(
            a,
            b,
        )
        or a.isnan().all()
        for a, b in zip(before, model.parameters(), strict=True)
    )


def test_without_demonstrations_there_is_nothing_to_learn():
    with pytest.raises(ValueError, match="no demonstration succeeded"):
        train(tiny_model(), demonstrations=[])


def test_steps_taken_from_the_middle_are_those_of_the_whole_run():
    """What a step draws and its rate depend on its number alone."""
    whole = tiny_model()
    found, _ = train(whole, num_steps=5)
    model = tiny_model()
    train_some(model, range(3), num_steps=5)
    losses = train_some(model, range(3, 5), num_steps=5)  # another object, as after a resume
    assert losses == [loss for _, loss, _ in found[3:]]
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


def train_some(model, numbers, **changes):
    masters = MasterWeights(model)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    update = SupervisedUpdate(
        model, masters, optimizer, DEMONSTRATIONS, settings=settings(**changes), world=ALONE
    )
    return [update.step(number, check_stop=lambda: None)["loss/total"] for number in numbers]


def stop_at(number):
    calls = []

    def check_stop():
        calls.append(1)
        if len(calls) == number:
            raise StopRequested

    return check_stop


@pytest.mark.parametrize("at", [1, 2, 3])  # before either row, and before the optimizer's step
def test_a_stop_gives_the_step_up_and_leaves_nothing_of_it(at):
    """Weights, moments and rate are those of step 1; step 2 is then what it would have been."""
    (update, state), (whole, expected) = with_momentum(), with_momentum()
    assert update.step(0, check_stop=stop_at(4))["pack/num_batches"] == 2
    whole.step(0, check_stop=stop_at(4))
    with pytest.raises(StopRequested):
        update.step(1, check_stop=stop_at(at))
    assert same(state(), expected())
    assert update.step(1, check_stop=stop_at(4)) == whole.step(1, check_stop=stop_at(4))
    assert same(state(), expected())


def with_momentum():
    """An update whose steps have two rows; all that it changes."""
    model = tiny_model()
    masters = MasterWeights(model)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, momentum=0.9)
    changes = settings(tokens_per_batch=16)
    update = SupervisedUpdate(
        model, masters, optimizer, DEMONSTRATIONS, settings=changes, world=ALONE
    )

    def state():
        rate = torch.tensor(optimizer.param_groups[0]["lr"])
        moments = [optimizer.state[p]["momentum_buffer"] for p in masters.parameters()]
        tensors = (rate, *moments, *masters.parameters(), *model.parameters())
        return [tensor.detach().clone() for tensor in tensors]

    return update, state


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_loss_of_held_out_demonstrations_is_torchs_and_changes_nothing():
    model = tiny_model()
    masters = MasterWeights(model)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    update = SupervisedUpdate(
        model, masters, optimizer, DEMONSTRATIONS[:3], settings=settings(), world=ALONE
    )
    total, count = 0.0, 0
    for rollout in DEMONSTRATIONS[3:]:
        ids, mask = rollout.tokens.ids, rollout.tokens.loss_mask
        logits = plain_logits(model, list(ids))
        places = [t for t in range(1, len(ids)) if mask[t]]
        targets = torch.tensor([ids[t] for t in places])
        before = torch.stack([logits[t - 1] for t in places])
        total += float(torch.nn.functional.cross_entropy(before, targets, reduction="sum"))
        count += len(places)
    weights = [p.detach().clone() for p in model.parameters()]
    assert update.loss_of(DEMONSTRATIONS[3:]) == pytest.approx(total / count, rel=1e-4)
    assert all(p.grad is None for p in masters.parameters())
    for a, b in zip(weights, model.parameters(), strict=True):
        assert torch.equal(a, b)
