"""The optimizer steps on a batch: how many, on what, and when they are given up."""

from __future__ import annotations

import math

import pytest
import torch

from components.attention.plan import MaskPlan
from components.models.smollm2 import smollm2
from components.rl.aggregate import Aggregation
from components.rl.importance import Importance
from components.rl.losses import GRPOLoss
from components.rl.objective import Objective
from components.rl.packing import pack
from components.training.guards import Guards, GuardStop, MismatchLimit
from components.training.parallelize import World
from components.training.policy_update import PolicyUpdate
from components.training.precision import MasterWeights
from components.training.stop import StopRequested
from components.training.update import UpdateSettings
from tests.unit.models import tiny
from tests.unit.rl.ledgers import item


@pytest.fixture
def model(tmp_path):
    return smollm2(tiny.write(tmp_path / "policy"), dtype=torch.float32)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def rows(model, *, logprob=-4.0):
    """Three rollouts in rows of their own, sampled with one log-probability."""
    items = [
        item(f"{i}", [1, 2], [3 + i, 4, 5], advantage=1.0 - i, logprobs=[logprob] * 5)
        for i in range(3)
    ]
    batches = pack(items, tokens_per_batch=5)
    assert len(batches) == 3
    return [(batch, MaskPlan.from_tree(batch.tree)) for batch in batches]


def update(model, *, importance=None, lr=0.1, guards=None, **settings):
    masters = MasterWeights(model)
    return PolicyUpdate(
        model,
        masters,
        torch.optim.SGD(masters.parameters(), lr=lr),
        objective=Objective(
            loss=GRPOLoss(),
            aggregation=Aggregation(),
            importance=importance or Importance(),
        ),
        reference=None,
        settings=UpdateSettings(temperature=1.0, logprob_chunk=8, max_grad_norm=100.0, **settings),
        world=World.alone(),
        guards=guards,
    )


def take(policy_update, rows, tmp_path, *, check_stop=lambda: None, model_metrics=dict):
    return policy_update(
        rows, check_stop=check_stop, model_metrics=model_metrics, dump=tmp_path / "dump.pt"
    )


def test_one_update_has_ratio_one_and_later_ones_are_clipped(model, tmp_path):
    """Fault 15: with the ratio to the detached current value no clip would ever act."""
    metrics, _ = take(update(model, lr=1.0), rows(model), tmp_path)
    assert metrics["policy/clip_frac_low"] == metrics["policy/clip_frac_high"] == 0
    assert metrics["loss/policy"] == pytest.approx(0.0, abs=1e-6)  # the advantages add up to 0
    metrics, _ = take(update(model, lr=1.0, updates_per_batch=3), rows(model), tmp_path)
    assert metrics["policy/clip_frac_low"] > 0
    assert metrics["policy/clip_frac_high"] > 0


def test_the_probe_is_from_before_the_first_update(model, tmp_path):
    policy_update, batch_rows = update(model, updates_per_batch=2), rows(model)
    with torch.no_grad():
        expected = policy_update.logprobs(*batch_rows[0])[0]
    _, first = take(policy_update, batch_rows, tmp_path)
    assert first is not None
    assert first[0] is batch_rows[0][0]
    assert torch.equal(first[2], expected)
    with torch.no_grad():
        assert not torch.equal(policy_update.logprobs(*batch_rows[0])[0], expected)


def test_the_models_metrics_are_taken_once_before_the_weights_change(model, tmp_path):
    before, seen = weights(model), []

    def model_metrics():
        seen.append(same(before, weights(model)))
        return {"moe/x": 3.0}

    metrics, _ = take(
        update(model, updates_per_batch=2), rows(model), tmp_path, model_metrics=model_metrics
    )
    assert seen == [True]
    assert metrics["moe/x"] == 3.0
    assert not same(before, weights(model))


@pytest.mark.parametrize("masked", [False, True])
def test_a_stop_gives_the_batch_up_before_the_first_step_and_never_after(model, tmp_path, masked):
    importance = Importance(mask_above=1e6) if masked else None
    before, calls = weights(model), []

    def stop_at(number):
        def check():
            calls.append(number)
            if len(calls) == number:
                raise StopRequested

        return check

    policy_update = update(model, updates_per_batch=3, importance=importance)
    num_checks = 6 if masked else 3  # one for each row of each pass before the first step
    with pytest.raises(StopRequested):
        take(policy_update, rows(model), tmp_path, check_stop=stop_at(num_checks))
    assert same(before, weights(model))
    calls.clear()
    take(policy_update, rows(model), tmp_path, check_stop=stop_at(num_checks + 1))
    assert len(calls) == num_checks
    assert not same(before, weights(model))


def test_what_a_stop_gave_up_is_not_in_the_next_gradient(model, tmp_path):
    """The backward passes before the stop have left gradients behind."""
    policy_update = update(model)
    calls = []

    def stop():
        calls.append(1)
        if len(calls) == 3:
            raise StopRequested

    with pytest.raises(StopRequested):
        take(policy_update, rows(model), tmp_path, check_stop=stop)
    again, _ = take(policy_update, rows(model), tmp_path)
    fresh = smollm2(tiny.write(tmp_path / "fresh"), dtype=torch.float32)
    expected, _ = take(update(fresh), rows(fresh), tmp_path)
    assert again["train/grad_norm"] == expected["train/grad_norm"]


def test_masked_tokens_are_counted_and_when_all_are_nothing_changes(model, tmp_path):
    before = weights(model)
    # trainer about e^-4, generator e^-12: ratios about e^8
    metrics, first = take(
        update(model, importance=Importance(mask_above=5.0)),
        rows(model, logprob=-12.0),
        tmp_path,
    )
    assert metrics["importance/masked_frac"] == 1.0
    assert first is None
    assert same(before, weights(model))
    wide = Importance(mask_above=1e6, cap=2.0)
    metrics, first = take(update(model, importance=wide), rows(model, logprob=-12.0), tmp_path)
    assert metrics["importance/masked_frac"] == 0.0
    assert metrics["importance/capped_frac"] == 1.0
    assert first is not None


def test_a_part_that_is_masked(model, tmp_path):
    """One of three tokens of each rollout was sampled with e^-12: a third is masked."""
    items = [
        item(f"{i}", [1, 2], [3, 4, 5], advantage=a, logprobs=[-4, -4, -4, -12, -4])
        for i, a in enumerate((1.0, -1.0))
    ]
    (batch,) = pack(items, tokens_per_batch=16)
    metrics, _ = take(
        update(model, importance=Importance(mask_above=100.0)),
        [(batch, MaskPlan.from_tree(batch.tree))],
        tmp_path,
    )
    assert metrics["importance/masked_frac"] == pytest.approx(1 / 3)
    assert metrics["mismatch/logprob_diff_max"] > 5  # of all tokens: a fault stays in sight


def test_numbers_that_are_not_finite_stop_the_run(model, tmp_path):
    with torch.no_grad():
        model.norm.scale[0] = math.nan
    before = weights(model)
    with pytest.raises(GuardStop, match="loss/total"):
        take(update(model), rows(model), tmp_path)
    assert (tmp_path / "dump.pt").is_file()
    assert torch.equal(before["layers.0.attn.q_proj.weight"], model.layers[0].attn.q_proj.weight)


def test_a_row_that_is_not_finite_ends_the_run_or_is_left_out(model, tmp_path):
    batch_rows = rows(model)
    good = weights(model)
    with torch.no_grad():
        model.tok_embeddings.weight[5] = math.nan
    poisoned = weights(model)

    def unchanged():
        now = weights(model)
        return all(torch.equal(now[n].nan_to_num(9), poisoned[n].nan_to_num(9)) for n in good)

    with pytest.raises(GuardStop, match=r"not finite: the weights .*; its batch is in .*dump.pt"):
        take(update(model), batch_rows, tmp_path)
    assert unchanged()
    assert (tmp_path / "dump.pt").exists()
    lines = []
    skipping = update(model, guards=Guards(non_finite="skip", max_skips=1, say=lines.append))
    metrics, _ = take(skipping, batch_rows, tmp_path)
    assert metrics["guard/skipped"] == 1.0
    assert math.isnan(metrics["loss/total"])
    assert unchanged()
    assert "loss/total" in lines[0]
    with pytest.raises(GuardStop, match="max_skips"):
        take(skipping, batch_rows, tmp_path)
    assert unchanged()
    with torch.no_grad():
        model.tok_embeddings.weight.copy_(good["tok_embeddings.weight"])
    model.zero_grad()
    fresh = update(model, guards=Guards(non_finite="skip"))
    metrics, _ = take(fresh, batch_rows, tmp_path)
    assert metrics["guard/skipped"] == 0.0
    assert not same(good, weights(model))


def test_a_skipped_update_leaves_weights_and_gradients_clean(model, tmp_path):
    good, lines = weights(model), []
    limit = MismatchLimit(above=1e-9, action="skip")
    metrics, _ = take(
        update(model, guards=Guards(mismatch=limit, say=lines.append)), rows(model), tmp_path
    )
    assert metrics["guard/skipped"] == 1.0
    assert same(good, weights(model))
    assert all(p.grad is None for p in model.parameters())
    assert len(lines) == 1
    stop = MismatchLimit(above=1e-9, action="stop")
    stopping = update(model, guards=Guards(mismatch=stop))
    with pytest.raises(GuardStop, match="mismatch/kl"):
        take(stopping, rows(model), tmp_path)
    assert same(good, weights(model))


def test_a_later_update_that_is_refused_stops_the_run_after_the_step(model, tmp_path):
    """The first has changed the weights: a checkpoint of the step before would not be one."""
    guards = Guards(mismatch=MismatchLimit(above=1e9, action="stop"))
    policy_update = update(model, lr=1e3, updates_per_batch=3, guards=guards)
    before, batch_rows = weights(model), rows(model)
    seen = []

    def refuse_the_second(metrics):
        seen.append(metrics["train/grad_norm"])
        if len(seen) == 2:
            raise GuardStop("the second")
        return True

    guards.allow = refuse_the_second
    metrics, first = take(policy_update, batch_rows, tmp_path)
    assert len(seen) == 2
    assert metrics["train/grad_norm"] == seen[0]
    assert first is not None
    assert not same(before, weights(model))
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(GuardStop, match="the second"):
        guards.after_step({"reward/mean": 0.0})


def test_a_batch_that_is_masked_as_a_whole_is_seen_by_the_guards(model, tmp_path):
    """The worst mismatch leaves no token in the loss."""
    importance = Importance(cap=None, mask_below=0.5, mask_above=2.0)
    batch_rows = rows(model, logprob=-0.001)
    before = weights(model)
    metrics, first = take(update(model, importance=importance), batch_rows, tmp_path)
    assert first is None
    with torch.no_grad():
        trainer = torch.cat([update(model).logprobs(*row)[0] for row in batch_rows]).double()
    gap = trainer + 0.001
    assert metrics["mismatch/kl"] == pytest.approx(float((gap.expm1() - gap).mean()), rel=1e-5)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(float(gap.abs().max()), rel=1e-5)
    guards = Guards(mismatch=MismatchLimit(above=0.05, action="stop"))
    with pytest.raises(GuardStop, match="mismatch/kl"):
        take(update(model, importance=importance, guards=guards), batch_rows, tmp_path)
    assert same(before, weights(model))


def clipped_gain(logprob, old, advantage, eps=0.2):
    """One token's term of the clipped objective, written out."""
    ratio = torch.exp(logprob - old)
    clipped = torch.clamp(ratio, 1 - eps, 1 + eps)
    return torch.minimum(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("masks", [{}, {"mask_below": 1e-9}])
def test_stale_rows_are_clipped_against_the_weights_that_sampled_them(model, tmp_path, masks):
    """Fault 15: the first update on stale data has a ratio, importance compares like with like."""
    cap = 1.5
    policy_update = update(model, lr=0.0, importance=Importance(cap=cap, **masks), max_staleness=1)
    batch_rows = rows(model, logprob=-4.2)
    policy_update.remember(0)
    with torch.no_grad():
        old = [policy_update.logprobs(*row)[0].double() for row in batch_rows]
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
        new = [policy_update.logprobs(*row)[0].double() for row in batch_rows]
    now = weights(model)
    expected, clipped, gaps = 0.0, 0, []
    for (batch, _), before, after in zip(batch_rows, old, new, strict=True):
        generator = batch.generator_logprobs.double()
        weight = torch.exp(before - generator).clamp(max=cap)
        gain = clipped_gain(after, before, batch.advantages.double())
        expected -= float((weight * gain).sum()) / 9
        ratio = torch.exp(after - before)
        sign = batch.advantages.double()
        clipped += int(((ratio > 1.2) & (sign > 0) | (ratio < 0.8) & (sign < 0)).sum())
        gaps.append((before - generator).abs())
    assert clipped > 0  # the clip acts
    metrics, first = policy_update(
        batch_rows,
        check_stop=lambda: None,
        model_metrics=dict,
        dump=tmp_path / "dump.pt",
        versions=(0, 1),
    )
    assert metrics["loss/policy"] == pytest.approx(expected, abs=1e-5)
    found = 9 * (metrics["policy/clip_frac_low"] + metrics["policy/clip_frac_high"])
    assert found == pytest.approx(clipped)
    # trainer and generator on the same weights: what the policy has moved is no mismatch
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(float(torch.cat(gaps).max()))
    assert same(weights(model), now)  # the snapshot is swapped out again
    assert first is not None
    assert torch.allclose(first[2].double(), new[0], atol=1e-5)  # the probe: from before the step


def test_a_token_beyond_the_clip_has_no_gradient(model, tmp_path):
    """Fault 15 with its numbers' signs: raised too far, advantage 1: gradient 0."""
    policy_update = update(model, lr=1.0, max_staleness=1)
    items = [item("a", [1, 2], [3], advantage=1.0, logprobs=[-4.0] * 3)]
    (batch,) = pack(items, tokens_per_batch=5)
    row = [(batch, MaskPlan.from_tree(batch.tree))]
    policy_update.remember(0)
    for _ in range(4):  # as other steps would: the token becomes ever more likely
        take(update(model, lr=1.0), row, tmp_path)
    before = weights(model)
    metrics, _ = policy_update(
        row, check_stop=lambda: None, model_metrics=dict, dump=tmp_path / "d.pt", versions=(0, 4)
    )
    assert metrics["policy/clip_frac_high"] == 1.0
    assert metrics["train/grad_norm"] == 0.0
    assert same(weights(model), before)


def test_the_noise_is_measured_on_request_and_changes_nothing(model, tmp_path):
    before = weights(model)
    metrics, _ = take(update(model), rows(model), tmp_path)
    assert not [name for name in metrics if name.startswith("grad/")]
    plain = weights(model)
    model.load_state_dict(before)
    probed = update(model, probe_noise=True, updates_per_batch=2, lr=0.0)
    found, _ = take(probed, rows(model), tmp_path)
    # The norm is a mean over both updates, equal ones here; the parts are those of the first.
    assert found["grad/signal"] + found["grad/noise"] == pytest.approx(
        found["train/grad_norm"] ** 2, rel=1e-4
    )
    take(update(model, probe_noise=True), rows(model), tmp_path)
    assert same(weights(model), plain)


def test_a_masked_batch_has_no_noise(model, tmp_path):
    everything = Importance(mask_above=1.001, mask_below=0.999)
    probed = update(model, probe_noise=True, importance=everything)
    metrics, first = take(probed, rows(model, logprob=-1.0), tmp_path)
    assert first is None
    assert not [name for name in metrics if name.startswith("grad/")]
