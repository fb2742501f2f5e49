import math

import pytest
import torch

from components.rl.groups import trained_items
from components.rl.losses import CISPOLoss, GRPOLoss, GSPOLoss, sft_loss
from components.rl.objective import count
from components.rl.packing import pack
from components.rollout.types import Rollout, RolloutSpec
from tests.unit.rl.ledgers import ledger

F64 = torch.float64


def _leaf(values):
    return torch.tensor(values, dtype=F64, requires_grad=True)


def _const(values):
    return torch.tensor(values, dtype=F64)


def _grpo(loss, logprobs, old, advantages, **kwargs):
    kwargs.setdefault("denominator", len(logprobs))
    return loss(logprobs, old_logprobs=_const(old), advantages=_const(advantages), **kwargs)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "term", "gradient"),
    [
        (0.5, 0.9, 1.0, -1.2, 0.0),  # clipped above
        (0.5, 0.9, -1.0, 1.8, 1.8),  # a bad token that became likelier is never let off
        (0.5, 0.1, 1.0, -0.2, -0.2),  # a good token that became rarer is never let off
        (0.5, 0.1, -1.0, 0.8, 0.0),  # clipped below
        (0.5, 0.55, 1.0, -1.1, -1.1),  # inside
        (0.5, 0.5, 2.0, -2.0, -2.0),  # ratio 1
        (0.5, 0.9, 0.0, 0.0, 0.0),
    ],
)
def test_clip_by_hand(old, new, advantage, term, gradient):
    logprobs = _leaf([math.log(new)])
    out = _grpo(GRPOLoss(), logprobs, [math.log(old)], [advantage])
    out.loss.backward()
    assert out.loss.item() == pytest.approx(term, abs=1e-12)
    assert float(logprobs.grad) == pytest.approx(gradient, abs=1e-12)
    assert float(out.ratio_sum) == pytest.approx(new / old)
    assert int(out.num_clipped_high) == (advantage > 0 and new / old > 1.2)
    assert int(out.num_clipped_low) == (advantage < 0 and new / old < 0.8)


def test_clip_sides_are_separate():
    logprobs = _leaf([math.log(1.25), math.log(0.75)])
    out = _grpo(GRPOLoss(eps_low=0.2, eps_high=0.28), logprobs, [0.0, 0.0], [1.0, -1.0])
    # 1.25 is inside 1.28; 0.75 is clipped to 0.8
    assert float(out.policy_sum) == pytest.approx(-1.25 + 0.8)
    assert (int(out.num_clipped_low), int(out.num_clipped_high)) == (1, 0)


def test_one_update_without_staleness_is_policy_gradient():
    logprobs = _leaf([-1.0, -2.0, -0.5])
    out = _grpo(GRPOLoss(), logprobs, logprobs.tolist(), [1.0, -1.0, 0.5])
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.5 / 3)
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, 1 / 3, -0.5 / 3])


@pytest.mark.parametrize(
    "splits", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[], [3], [0, 1, 2]]]
)
def test_global_denominator(splits):
    # Fault 14: losses {4} and {0, 0, 0}: 1.0 for every split; a mean of means is 2.0.
    advantages = [-4.0, 0.0, 0.0, 0.0]
    logprobs = _leaf([-1.0] * 4)
    total = 0.0
    for part in splits:
        old = [-1.0] * len(part)
        out = _grpo(GRPOLoss(), logprobs[part], old, [advantages[i] for i in part], denominator=4)
        out.loss.backward()
        total += float(out.loss.detach())
    assert total == pytest.approx(1.0)
    assert logprobs.grad.tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])


def test_masked_tokens_are_not_in_the_denominator():
    # Two rows of four tokens with loss 1 each, one row masked: 1.0, not 0.5.
    logprobs = _leaf([-1.0] * 4)
    out = _grpo(GRPOLoss(), logprobs, [-1.0] * 4, [-1.0] * 4, denominator=4)
    assert out.loss.item() == pytest.approx(1.0)


def test_stale_data_is_clipped():
    # Fault 15: a second update on old data. logp - logp.detach() would give gradient -1.
    logprobs = _leaf([math.log(0.9)])
    _grpo(GRPOLoss(), logprobs, [math.log(0.5)], [1.0]).loss.backward()
    assert float(logprobs.grad) == 0.0


# p = .5, reference .25: d = ln 2. Values by hand; the gradients are those of the estimators.
@pytest.mark.parametrize(
    ("estimator", "value", "gradient", "gradient_at_reference"),
    [
        ("k1", math.log(2), 1.0, 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2), 0.0),
        ("k3", 0.5 - 1 + math.log(2), 1 - 0.5, 0.0),
    ],
)
def test_kl_by_hand(estimator, value, gradient, gradient_at_reference):
    logprobs = _leaf([math.log(0.5), math.log(0.3)])
    ref = _const([math.log(0.25), math.log(0.3)])
    loss = GRPOLoss(beta=0.1, kl_estimator=estimator)
    out = _grpo(loss, logprobs, [0.0, 0.0], [0.0, 0.0], ref_logprobs=ref, denominator=4)
    out.loss.backward()
    assert float(out.kl_sum) == pytest.approx(value)
    assert out.loss.item() == pytest.approx(0.1 * value / 4)
    expected = [0.1 * gradient / 4, 0.1 * gradient_at_reference / 4]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased(estimator):
    """Summed over all tokens under p, the estimate is KL(p || ref)."""
    p, q = _const([0.5, 0.3, 0.2]), _const([0.2, 0.2, 0.6])
    loss = GRPOLoss(kl_estimator=estimator)
    estimate = 0.0
    for i in range(3):
        out = _grpo(loss, p[i : i + 1].log(), [0.0], [0.0], ref_logprobs=q[i : i + 1].log())
        estimate += float(p[i] * out.kl_sum)
    assert estimate == pytest.approx(float((p * (p / q).log()).sum()))


def test_kl_is_zero_at_the_reference():
    logprobs = _leaf([-0.3, -2.0])
    loss = GRPOLoss(beta=1.0)
    out = _grpo(loss, logprobs, [-0.3, -2.0], [0.0, 0.0], ref_logprobs=logprobs.detach().clone())
    out.loss.backward()
    assert float(out.kl_sum) == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


def _play(group, member, reward, ids):
    """A finished rollout: two tokens of prompt, then the sampled ones."""
    return Rollout(
        spec=RolloutSpec(
            rollout_id=f"{group}/{member}",
            task_id=str(group),
            domain="d",
            group=group,
            member=member,
            seed=0,
            env_seed=0,
        ),
        tokens=ledger([0, 1, *ids], [0, 0, *[1] * len(ids)]),
        status="completed",
        reward=reward,
    )


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 - 1 + math.log(2), 0.5),
    ],
)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_group_of_equal_rewards_has_no_gradient_even_with_kl(reward, estimator, value, gradient):
    """Fault 18: equal rewards drop the group, so none of its tokens reaches the loss.

    Every token has p = .5 and .25 under the reference, so d = ln 2. Kept with advantage 0, those of
    the group of equal rewards (ids 2 to 5) would have the gradient of the KL term, and the others
    half of theirs, because the denominator would count four tokens more.
    """
    equal = [_play(0, 0, reward, [2, 3]), _play(0, 1, reward, [4, 5])]
    unequal = [_play(1, 0, 1.0, [6, 7]), _play(1, 1, 0.0, [8, 9])]
    items, _ = trained_items([*equal, *unequal], normalize_std=True, eps=0.0)
    (row,) = pack(items, tokens_per_batch=16)
    table = _leaf([math.log(0.5)] * 10)  # by token id
    logprobs = table[row.targets]
    loss = GRPOLoss(beta=0.3, kl_estimator=estimator)
    out = loss(
        logprobs,
        old_logprobs=logprobs.detach(),
        advantages=row.advantages,
        denominator=count(row, None)[0],
        ref_logprobs=torch.full_like(logprobs, math.log(0.25)),
    )
    out.loss.backward()
    assert out.num_tokens == 4
    assert out.loss.item() == pytest.approx(0.3 * value)  # the advantages +1 and -1 cancel
    kl = 0.3 * gradient
    expected = [0.0] * 6 + [(-1 + kl) / 4] * 2 + [(1 + kl) / 4] * 2
    assert table.grad.tolist() == pytest.approx(expected)
    assert not table.grad[:6].any()
    # and alone it leaves a step nothing to train
    assert trained_items(equal, normalize_std=True, eps=0.0)[0] == []


def test_without_tokens_backward_still_runs():
    hidden = torch.ones(3, requires_grad=True)
    out = GRPOLoss()(
        hidden[:0], old_logprobs=torch.empty(0), advantages=torch.empty(0), denominator=5
    )
    out.loss.backward()
    assert hidden.grad.tolist() == [0.0, 0.0, 0.0]


def test_reference_only_reports_with_beta_zero():
    logprobs = _leaf([math.log(0.5)])
    out = _grpo(GRPOLoss(), logprobs, [math.log(0.5)], [1.0], ref_logprobs=_const([math.log(0.25)]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.0)
    assert float(out.kl_sum) == pytest.approx(math.log(2) - 0.5)
    assert float(logprobs.grad) == pytest.approx(-1.0)


def test_importance_weights_scale_the_policy_term_only():
    logprobs = _leaf([math.log(0.5)])
    ref = _const([math.log(0.25)])
    loss = GRPOLoss(beta=1.0)
    out = _grpo(loss, logprobs, [math.log(0.5)], [1.0], ref_logprobs=ref, is_weights=_const([0.5]))
    assert float(out.policy_sum) == pytest.approx(-0.5)
    assert float(out.kl_sum) == pytest.approx(math.log(2) - 0.5)


def test_sft_loss():
    logprobs = _leaf([-1.0, -2.0])
    loss = sft_loss(logprobs, denominator=6)
    loss.backward()
    assert loss.item() == pytest.approx(0.5)
    assert logprobs.grad.tolist() == pytest.approx([-1 / 6, -1 / 6])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"eps_low": 1.0}, "eps_low"),
        ({"eps_low": -0.1}, "eps_low"),
        ({"eps_high": -0.1}, "eps_high"),
        ({"eps_high": math.nan}, "eps_high"),
        ({"beta": -1.0}, "beta"),
        ({"beta": math.inf}, "beta"),
        ({"kl_estimator": "k4"}, "k4.*k1.*k2.*k3"),
    ],
)
def test_settings_are_checked(settings, name):
    with pytest.raises(ValueError, match=name):
        GRPOLoss(**settings)


def test_inputs_are_checked():
    logprobs = _leaf([-1.0, -1.0])
    with pytest.raises(ValueError, match=r"beta = 0\.1: needs ref_logprobs"):
        _grpo(GRPOLoss(beta=0.1), logprobs, [-1.0, -1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="denominator = 0"):
        _grpo(GRPOLoss(), logprobs, [-1.0, -1.0], [1.0, 1.0], denominator=0)
    with pytest.raises(ValueError, match="denominator = nan"):
        sft_loss(logprobs, denominator=math.nan)
    with pytest.raises(ValueError, match="advantages"):
        _grpo(GRPOLoss(), logprobs, [-1.0, -1.0], [1.0])
    with pytest.raises(ValueError, match="old_logprobs carries a gradient"):
        GRPOLoss()(logprobs, old_logprobs=logprobs, advantages=_const([1.0, 1.0]), denominator=2)


# ---- GSPO: rollout 0 has ratios 2 and 1/2 (geometric mean 1), rollout 1 has 2 and 2 (mean 2)

GSPO_NEW, GSPO_OLD = [0.8, 0.2, 0.8, 0.6], [0.4, 0.4, 0.4, 0.3]
GSPO_ROLLOUT = torch.tensor([0, 0, 1, 1])


def _logs(values):
    return [math.log(value) for value in values]


def test_gspo_by_hand():
    """Mean over rollouts of min(s A, clip(s) A): s = 1 and 2; the second is clipped to 1.2."""
    logprobs = _leaf(_logs(GSPO_NEW))
    out = _grpo(
        GSPOLoss(eps_low=0.2, eps_high=0.2),
        logprobs,
        _logs(GSPO_OLD),
        [1.0, 1.0, 3.0, 3.0],
        rollout=GSPO_ROLLOUT,
        token_weights=_const([0.5] * 4),
        denominator=2,
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-(1.0 + 1.2 * 3) / 2)
    # d s / d logp_t = s / T_i: -(1/2) * 1 * (1/2) for each token of the first, 0 where clipped
    assert logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0.0, 0.0])
    assert (int(out.num_clipped_low), int(out.num_clipped_high)) == (0, 2)
    assert float(out.ratio_sum) == pytest.approx(1 + 1 + 2 + 2)


def test_gspo_keeps_a_bad_rollout_that_became_likelier():
    logprobs = _leaf(_logs(GSPO_NEW[2:]))
    out = _grpo(GSPOLoss(), logprobs, _logs(GSPO_OLD[2:]), [-1.0] * 2, rollout=torch.tensor([0, 0]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(2.0)
    assert logprobs.grad.tolist() == pytest.approx([1.0, 1.0])


def test_gspo_at_ratio_one_is_policy_gradient():
    logprobs = _leaf([-1.0, -2.0, -0.5])
    out = _grpo(
        GSPOLoss(),
        logprobs,
        logprobs.tolist(),
        [1.0, 1.0, -0.5],
        rollout=torch.tensor([0, 0, 1]),
    )
    out.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 0.5 / 3])


# ---- CISPO


@pytest.mark.parametrize(
    ("old", "new", "advantage", "weight"),
    [
        (0.1, 0.9, 1.0, 5.0),  # ratio 9 is bounded by 1 + 4, and the token keeps its gradient
        (0.1, 0.9, -1.0, 5.0),
        (0.5, 0.9, 2.0, 1.8),
        (0.5, 0.1, 1.0, 0.2),  # no lower bound
        (0.5, 0.5, -1.0, 1.0),
    ],
)
def test_cispo_by_hand(old, new, advantage, weight):
    logprobs = _leaf([math.log(new)])
    out = _grpo(CISPOLoss(), logprobs, [math.log(old)], [advantage])
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-weight * advantage * math.log(new))
    assert float(logprobs.grad) == pytest.approx(-weight * advantage)
    assert int(out.num_clipped_high) == (new / old > 5)
    assert int(out.num_clipped_low) == 0


def test_cispo_with_a_lower_bound():
    logprobs = _leaf([math.log(0.1)])
    out = _grpo(CISPOLoss(eps_low=0.2), logprobs, [math.log(0.5)], [1.0])
    out.loss.backward()
    assert float(logprobs.grad) == pytest.approx(-0.8)
    assert int(out.num_clipped_low) == 1


# ---- weights of tokens


@pytest.mark.parametrize("loss", [GRPOLoss(beta=0.5), GSPOLoss(beta=0.5), CISPOLoss(beta=0.5)])
def test_token_weights_scale_policy_and_kl(loss):
    """A weight of 2 on a token is the token twice, in a rollout of its own."""
    old, ref, advantages = [-1.1, -0.6], _const([-1.5, -0.2]), [1.0, -1.0]
    logprobs = _leaf([-1.0, -0.5])
    weighted = _grpo(
        loss,
        logprobs,
        old,
        advantages,
        ref_logprobs=ref,
        token_weights=_const([2.0, 1.0]),
        rollout=torch.tensor([0, 1]),
    )
    twice = [0, 0, 1]
    repeated = _grpo(
        loss,
        logprobs[twice],
        [old[i] for i in twice],
        [advantages[i] for i in twice],
        ref_logprobs=ref[twice],
        rollout=torch.tensor([0, 1, 2]),
        denominator=2,
    )
    assert weighted.loss.item() == pytest.approx(repeated.loss.item())
    assert float(weighted.kl_sum) == pytest.approx(float(repeated.kl_sum))
    assert float(weighted.policy_sum) == pytest.approx(float(repeated.policy_sum))
    left, right = (torch.autograd.grad(o.loss, logprobs)[0] for o in (weighted, repeated))
    assert left.tolist() == pytest.approx(right.tolist())


def test_bounds_of_gspo_and_cispo_are_checked():
    with pytest.raises(ValueError, match=r"eps_low = 1\.0: must be in \[0, 1\)"):
        GSPOLoss(eps_low=1.0)
    with pytest.raises(ValueError, match=r"eps_low = 1\.5: must be in \[0, 1\]"):
        CISPOLoss(eps_low=1.5)
    with pytest.raises(ValueError, match="rollout"):
        _grpo(GSPOLoss(), _leaf([-1.0, -1.0]), [-1.0] * 2, [1.0] * 2, rollout=torch.tensor([0]))
