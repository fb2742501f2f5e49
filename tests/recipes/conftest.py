"""A tiny model, and runs that several tests look at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from components.models.paths import model_dir
from tests.recipes import tiny_model
from tests.recipes.runs import (
    Tune,
    assert_no_orphans,
    kill_group,
    steps,
    training,
    wait_for,
)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A random Llama with SmolLM2's tokenizer. Tests that use it are marked ``model``."""
    source = model_dir("smollm2-135m-instruct")
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", source)


@pytest.fixture(scope="session")
def tune(tmp_path_factory, tiny_model_dir):
    return Tune(tmp_path_factory.mktemp("home"), tiny_model_dir)


@pytest.fixture(scope="session")
def straight(tune, tmp_path_factory):
    """Four steps in one go, with a warm start and an evaluation."""
    output_dir = tmp_path_factory.mktemp("straight") / "run"
    done = tune.train(output_dir)
    return SimpleNamespace(output_dir=output_dir, done=done)


@pytest.fixture(scope="session")
def resumed(tune, straight, tmp_path_factory):
    """The same run, killed after its third step (the last checkpoint is step_2), and resumed."""
    output_dir = tmp_path_factory.mktemp("resumed") / "run"
    keys = {"model_dir": tune.model_dir, "output_dir": output_dir}
    process = tune.start(*training(**keys))
    try:
        wait_for(lambda: 3 in steps(output_dir), process)
        process.kill()
        process.wait()
        at_kill = sorted(path.name for path in output_dir.iterdir())
        assert_no_orphans(process)
    finally:
        kill_group(process)
    done = tune.train(output_dir, resume="true")
    return SimpleNamespace(output_dir=output_dir, done=done, at_kill=at_kill)
