"""The probe: what it computes, and each way in which weights can fail to arrive (faults 19)."""

from __future__ import annotations

import copy

import pytest
import torch

from components.policy.engine import EngineError
from components.policy.probe import WeightProbe, probe_sequences, sequence_logprobs
from components.policy.replay import replay
from tests.unit.policy.tiny import KINDS, VOCAB, plain_logprobs, tiny_model


@torch.no_grad()
def step(model, size: float) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=size)


def served_by(model, probe: WeightProbe) -> list[list[float]]:
    """What the local engine's own kernels make of the batch, a token at a time."""
    answers = []
    for ids in probe.sequences:
        rows = torch.log_softmax(replay(model, ids, num_prompt=1), -1)
        answers.append(rows.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).tolist())
    return answers


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_a_dense_forward(kind):
    model = tiny_model(kind)
    for ids in probe_sequences(model, seed=0):
        expected = plain_logprobs(model, [ids[0]], ids[1:], temperature=1.0)
        assert sequence_logprobs(model, ids).tolist() == pytest.approx(expected, abs=1e-5)


def test_sequences_are_fixed_and_reach_the_last_id():
    model = tiny_model()
    first = probe_sequences(model, seed=0)
    assert first == probe_sequences(model, seed=0) != probe_sequences(model, seed=1)
    assert first[0][0] == VOCAB - 1
    assert {len(ids) for ids in first} == {32}


@pytest.mark.parametrize("size", [0.1, 1e-6])
def test_the_local_engine_passes_after_every_step_and_a_stale_copy_does_not(size):
    model = tiny_model()
    stale = copy.deepcopy(model)
    probe = WeightProbe(model, bound=1e-3)
    probe.weights_changed()
    for name, engine in (("local", model), ("copy", stale)):
        reading = probe.check(name, served_by(engine, probe), noise=0.0)
        assert reading.gap_max < 1e-5
        assert reading.change == reading.trainer_change == 0.0
    step(model, size)
    probe.weights_changed()
    reading = probe.check("local", served_by(model, probe), noise=0.0)
    assert reading.change > 0
    assert reading.trainer_change > 0
    match = "copy does not serve the trainer's weights" if size > 1e-3 else "copy still serves"
    with pytest.raises(EngineError, match=match):
        probe.check("copy", served_by(stale, probe), noise=0.0)


def test_a_change_within_the_noise_of_equal_requests_is_none():
    model = tiny_model()
    probe = WeightProbe(model, bound=0.1)
    probe.weights_changed()
    before = served_by(model, probe)
    probe.check("e", before, noise=0.0)
    step(model, 1e-6)
    probe.weights_changed()
    jittered = [[value + 1e-3 for value in values] for values in before]
    with pytest.raises(EngineError, match="old weights"):
        probe.check("e", jittered, noise=2e-3)
    assert probe.check("e", jittered, noise=5e-4).change == pytest.approx(1e-3, rel=1e-3)


def test_weights_that_stay_need_not_move_and_numbers_must_be_numbers():
    model = tiny_model()
    probe = WeightProbe(model, bound=0.1, hint="Look there.")
    for _ in range(2):
        probe.weights_changed()
        reading = probe.check("e", served_by(model, probe), noise=0.0)
        assert reading.change == reading.trainer_change == 0.0
    broken = served_by(model, probe)
    broken[1][2] = float("nan")
    with pytest.raises(EngineError, match=r"probe_bound is 0.1. Look there\."):
        probe.check("e", broken, noise=0.0)
    with torch.no_grad():
        model.head_weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        probe.weights_changed()
    with pytest.raises(ValueError, match="probe_bound"):
        WeightProbe(tiny_model(), bound=0.0)
