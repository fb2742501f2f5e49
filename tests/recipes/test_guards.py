"""Guards through the real command: what stops a run, and that it can go on."""

import pytest

from components.training import checkpoint
from tests.recipes.runs import rows, steps


def test_a_guard_stops_the_run_with_the_last_good_weights(tune, tmp_path):
    output_dir = tmp_path / "run"
    stopped = tune.train(
        output_dir,
        code=2,
        eval="null",
        save_every=50,
        guards="{grad_spike: {factor: 1.001, window: 2, action: stop}}",
        num_steps=30,
    )
    last = max(steps(output_dir))
    assert f"stopped after step {last}; go on with resume=true" in stopped.stdout
    assert f"step {last + 1}/" not in stopped.stdout
    assert "train/grad_norm" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert checkpoint.last_whole(output_dir) == output_dir / f"step_{last}"
    again = tune.train(
        output_dir,
        eval="null",
        save_every=50,
        guards="{grad_spike: {factor: 1.001, window: 2, action: skip}}",
        num_steps=last + 1,
        resume="true",
    )
    assert "guard (skip): train/grad_norm" in again.stdout  # the guard's memory came back
    assert rows(output_dir)[-1]["guard/skipped"] == 1.0
    assert "changed since: guards.grad_spike.action" in again.stdout


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("guards.mismatch={above: 1}", "guards.mismatch.action: missing"),
        ("guards.flat_reward={steps: 3, action: skip}", "guards.flat_reward.action = 'skip'"),
        ("guards.non_finite=warn", "guards.non_finite = 'warn': must be one of stop, skip"),
        ("guards.spike={factor: 2}", "guards.spike: unknown key"),
        ("compile=always", "compile = 'always': must be one of auto, true, false"),
    ],
)
def test_mistakes_are_said(tune, tmp_path, setting, expected):
    name, _, value = setting.partition("=")
    done = tune.train(tmp_path / "run", code=2, **{name: value})
    assert expected in done.stderr


def test_a_sharding_that_does_not_fit_is_said(tune, tmp_path):
    done = tune.train(tmp_path / "run", code=2, eval="null", sharding__shard_size=2)
    assert "sharding.shard_size = 2: nothing is sharded on one rank" in done.stderr
