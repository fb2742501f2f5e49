"""Checks across settings: datasets and environments of one domain and of several."""

import pytest

from components.training.config import ConfigError, load_config
from components.training.sections import same_tasks, train_split, whole_distribution
from recipes.grpo_agentic import recipe_main


def mixed(*overrides):
    cfg = load_config("mixed", overrides)
    cfg.train_on_any_split = cfg.get("train_on_any_split", False)
    return cfg


def problems(cfg):
    return train_split(cfg) + same_tasks(cfg, "dataset") + same_tasks(cfg, "eval.dataset")


def test_the_shipped_mix_is_sound():
    assert problems(mixed()) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "dataset.datasets.mock.split=test",
            "dataset.datasets.mock.split = test: training is on the train split; "
            "train_on_any_split=true allows another",
        ),
        (
            "env.envs.retail.paraphrases=held_out",
            "env.envs.retail.paraphrases = held_out: these are for evaluation alone and never "
            "trained on",
        ),
        (
            "dataset.datasets.mock.domain=airline",
            "dataset.datasets.mock.domain = airline: must be one of env.envs: retail, mock",
        ),
        (
            "dataset.datasets.mock.tasks=generated:8:64",
            "dataset.datasets.mock.tasks = generated:8:64: must be env.envs.mock.tasks = "
            "generated:7:64",
        ),
        (
            "env.envs.retail.domain=airline",
            "dataset.datasets.retail.domain = retail: must be env.envs.retail.domain = airline",
        ),
        (
            "eval={dataset: {domain: telecom, split: test}}",
            "eval.dataset.domain = telecom: must be one of env.envs: retail, mock",
        ),
        (
            "eval={dataset: {datasets: {x: {domain: mock}, y: {datasets: {z: {domain: e}}}}}}",
            "eval.dataset.datasets.y.datasets.z.domain = e: must be one of env.envs: retail, mock",
        ),
    ],
)
def test_every_part_is_checked(override, expected):
    assert problems(mixed(override)) == [expected]


def test_the_recipe_asks_for_these_checks():
    with pytest.raises(ConfigError) as error:
        recipe_main.validate(load_config("mixed", ["dataset.datasets.mock.domain=airline"]))
    assert "dataset.datasets.mock.domain = airline: must be one of env.envs" in str(error.value)


def test_a_held_out_split_may_be_asked_for():
    assert problems(mixed("dataset.datasets.retail.split=all", "train_on_any_split=true")) == []


def test_datasets_of_one_environment_must_be_of_its_domain():
    env = "env={_component_: components.envs.tau2.Tau2Env, domain: mock, tasks: 'generated:7:64'}"
    assert problems(mixed(env)) == [
        "dataset.datasets.retail.domain = retail: must be env.domain = mock"
    ]


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=40"])
def test_training_samples_from_the_whole_distribution(setting):
    assert whole_distribution(load_config("mock", ["engine.top_p=1.0", "engine.top_k=null"])) == []
    cfg = load_config("mock", [f"engine.{setting}"])
    [problem] = whole_distribution(cfg)
    assert problem.startswith(f"engine.{setting.replace('=', ' = ')}: training samples from")
    with pytest.raises(ConfigError, match="training samples from the whole distribution"):
        recipe_main.validate(cfg)
