"""The GRPO recipe on two domains at once, as in configs/mixed.yaml, with a tiny random model."""

from __future__ import annotations

import re
import shutil
from collections import Counter

import pytest

from components.data.dataset import task_loader
from components.models.paths import model_dir
from components.training.config import instantiate, load_config
from tests.recipes import tiny_model
from tests.recipes.runs import Tune, played, rows, steps

pytestmark = pytest.mark.model

SETTINGS = {
    "config": "configs/mixed.yaml",
    "eval": "null",
    "num_steps": 1,
    "save_every": 1,
    "tasks_per_step": 4,
    "rollout__group_size": 2,
    "rollout__max_turns": 3,
    "rollout__num_workers": 2,
    "rollout__max_tokens": 3072,  # the prompt of a retail task has 2,500
    "warm_start__max_tokens": 3072,
    "warm_start__num_demonstrations": 6,
}


@pytest.fixture(scope="module")
def tune(tmp_path_factory):
    source = model_dir("smollm2-135m-instruct")
    tiny = tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", source, context=4096)
    return Tune(tmp_path_factory.mktemp("home"), tiny)


@pytest.fixture(scope="module")
def run(tune, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("mixed") / "run"
    return output_dir, tune.train(output_dir, **SETTINGS)


def expected_tasks(seed=42):
    """Of each step: (domain, task id) of its groups, from the config's dataset alone."""
    dataset = instantiate(load_config("mixed").dataset)
    loader = iter(task_loader(dataset, tasks_per_step=4, seed=seed))
    return {step: [(task.domain, task.id) for task in next(loader)] for step in (1, 2)}


def groups(records, step):
    """(domain, task id) of a step's groups as they were recorded, in order."""
    specs = [record["spec"] for record in records if record["step"] == step]
    found = {spec["group"]: (spec["domain"], spec["task_id"]) for spec in specs}
    return [found[group] for group in sorted(found)]


def test_both_domains_are_played_in_their_shares(run):
    output_dir, _ = run
    assert steps(output_dir) == [1]
    records = played(output_dir)
    assert groups(records, 1) == expected_tasks()[1]
    assert Counter(r["spec"]["domain"] for r in records) == {"retail": 6, "mock": 2}
    assert not [record["error"] for record in records if record["status"].startswith("error")]
    prompts = {
        d: {r["stats"]["prompt_tokens"] for r in records if r["spec"]["domain"] == d}
        for d in ("retail", "mock")
    }
    assert max(prompts["mock"]) < 1000 < 2000 < min(prompts["retail"])
    (row,) = rows(output_dir)
    assert row["pack/trained_tokens"] > 0
    assert row["reward/mean"] == pytest.approx(
        (3 * row["reward/mean_retail"] + row["reward/mean_mock"]) / 4
    )


def test_every_domain_is_demonstrated_by_its_own_oracle(run):
    _, done = run
    line = re.search(r"warm start: 6 demonstrations .* (\d+) to (\d+) tokens(.*)", done.stdout)
    assert line is not None, done.stdout
    assert int(line[1]) < 1500 < 2500 < int(line[2])  # of mock, of retail
    assert "dropped" not in line[3]


@pytest.mark.slow
def test_two_ranks_go_on_from_the_state_of_one(run, tune, tmp_path):
    output_dir = shutil.copytree(run[0], tmp_path / "run")
    launcher = ("--nproc_per_node", "2")
    settings = {**SETTINGS, "num_steps": 2, "resume": "true"}
    done = tune.train(output_dir, launcher=launcher, **settings)
    assert "resuming from step_1" in done.stdout
    records = played(output_dir)
    assert {step: groups(records, step) for step in (1, 2)} == expected_tasks()
    assert Counter(r["spec"]["domain"] for r in records) == {"retail": 12, "mock": 4}
