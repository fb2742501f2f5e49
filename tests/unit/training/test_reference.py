"""The reference policy: a snapshot that is swapped in."""

import pytest
import torch
from torch import nn

from components.training.reference import PastPolicies, ReferencePolicy


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def move(layer):
    with torch.no_grad():
        for p in layer.parameters():
            p += 1.0


def test_it_stays_what_the_model_was(layer):
    data = torch.randn(5, 4)
    before = layer(data)
    reference = ReferencePolicy(layer)
    move(layer)
    after = layer(data)
    with reference.swapped_in():
        found = layer(data)
    assert torch.equal(found, before)
    assert not found.requires_grad
    assert torch.equal(layer(data), after)
    assert not torch.equal(before, after)


def test_the_policy_comes_back_after_an_error(layer):
    reference = ReferencePolicy(layer)
    move(layer)
    current = layer.weight.detach().clone()
    with pytest.raises(RuntimeError), reference.swapped_in():
        raise RuntimeError
    assert torch.equal(layer.weight, current)


def test_gradients_that_are_there_stay(layer):
    reference = ReferencePolicy(layer)
    layer(torch.ones(4)).sum().backward()
    grad = layer.weight.grad.clone()
    with reference.swapped_in():
        layer(torch.ones(4))
    assert torch.equal(layer.weight.grad, grad)


def test_only_trainable_parameters_are_kept(layer):
    layer.weight.requires_grad_(False)
    assert ReferencePolicy(layer).tensors().keys() == {"bias"}


def test_a_resumed_run_has_the_first_runs_reference(layer):
    saved = {name: w.clone() for name, w in ReferencePolicy(layer).tensors().items()}
    first = layer.weight.detach().clone()
    move(layer)
    reference = ReferencePolicy(layer)  # as a resumed run makes it, of the wrong weights
    for name, tensor in reference.tensors().items():
        tensor.copy_(saved[name])  # as a checkpoint is read
    with reference.swapped_in():
        assert torch.equal(layer.weight, first)


def test_it_is_reset_when_a_period_ends(layer):
    reference = ReferencePolicy(layer, reset_every=3)
    first = layer.weight.detach().clone()
    for step in (1, 2, 3, 4):
        move(layer)
        reference.reset_if_due(step)
        with reference.swapped_in():
            # the reset after step 3 took the weights after 3 moves
            assert torch.equal(layer.weight, first if step < 3 else first + 1.0 + 1.0 + 1.0)
    never = ReferencePolicy(layer)
    move(layer)
    never.reset_if_due(3)
    with never.swapped_in():
        assert not torch.equal(layer.weight, first + 5.0)


@pytest.mark.parametrize("offload", [False, True])
def test_its_weights_are_its_own(layer, offload):
    """A snapshot that shares memory with the policy would follow it."""
    reference = ReferencePolicy(layer, offload=offload)
    assert {t.device.type for t in reference.tensors().values()} == {"cpu"}
    addresses = {p.data_ptr() for p in layer.parameters()}
    assert not addresses & {t.data_ptr() for t in reference.tensors().values()}


def test_past_policies_are_kept_for_as_long_as_a_batch_of_theirs_may_come(layer):
    past = PastPolicies(layer, max_staleness=2, offload=False)
    first = layer.weight.detach().clone()
    for version in range(5):
        past.keep(version)
        move(layer)
    assert past.of(4, now=4) is None  # the model itself
    for version in (2, 3, 4):
        policy = past.of(version, now=5)
        assert policy is not None
        with policy.swapped_in():
            assert torch.allclose(layer.weight, first + version)
    with pytest.raises(KeyError):
        past.of(1, now=5)
    never = PastPolicies(layer, max_staleness=0, offload=False)
    never.keep(0)
    assert never.of(0, now=1) is None
