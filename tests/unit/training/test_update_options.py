"""Options of the update, as a config has them."""

from pathlib import Path

import pytest

from components.rl.objective import objective_from
from components.training.component import ConfigError
from components.training.config import as_dict, instantiate, load_config, validate
from components.training.update_checks import engine_apart
from recipes.grpo_agentic import SCHEMA, check

ADDRESSES = "engine.addresses=[http://127.0.0.1:1]"
MOCK = Path(__file__).parents[3] / "configs/mock.yaml"


def config(*overrides):
    return validate(load_config(MOCK, list(overrides)), SCHEMA, check=check)


def test_the_default_is_the_papers_loss():
    """Token mean over the whole step, symmetric clip, ratio to the trainer's own, one update."""
    cfg = config("importance.cap=null")
    objective = objective_from(as_dict(cfg), loss=instantiate(cfg.loss))
    assert type(objective.loss).__name__ == "GRPOLoss"
    assert (objective.aggregation.over, objective.ratio) == ("token", "proximal")
    assert objective.importance.weights.__self__.cap is None
    assert not objective.importance.masks
    assert objective.entropy_bonus == 0
    assert cfg.updates_per_batch == 1
    assert not cfg.mask_overlong
    assert cfg.dynamic_sampling.max_refills == 0
    assert as_dict(cfg.advantages) == {
        "normalize_std": True,
        "leave_one_out": False,
        "baseline": "group",
        "eps": 1e-6,
        "num_trained": None,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.max_staleness=2"], "rollout.max_staleness = 2: must be at most 1 with 2 ranks"),
        (
            ["rollout.max_staleness=1", "dynamic_sampling.max_refills=2"],
            "dynamic_sampling.max_refills = 2: with 2 ranks",
        ),
    ],
)
def test_what_ranks_cannot_do_ahead_of_training(overrides, message, monkeypatch):
    overrides = [*overrides, "engine=components.policy.vllm.VLLMEngine", ADDRESSES]
    config(*overrides)  # one rank can
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=message):
        config(*overrides)
    config(overrides[0].replace("2", "1"), *overrides[-2:])


PAGE = (Path(__file__).parents[3] / "recipes/grpo_agentic.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("### Other losses")[2].partition("###")[0]
RECIPES = {
    line.split("|")[1].strip(): line.split("|")[2].strip(" `").split()
    for line in TABLE.splitlines()
    if "https://" in line
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_of_the_page_are_accepted(name):
    cfg = config(*RECIPES[name])
    objective_from(as_dict(cfg), loss=instantiate(cfg.loss))


def test_all_losses_of_the_page_are_found():
    names = [name.partition(",")[0] for name in RECIPES]
    assert names == ["DAPO", "Dr. GRPO", "RLOO", "PODS", "REINFORCE", "GSPO", "CISPO", "IcePop"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["aggregation.over=constant"], r"aggregation\.divisor = None: aggregation\.over = const"),
        (["aggregation.divisor=8"], r"aggregation\.divisor = 8\.0: aggregation\.over = token has"),
        (["aggregation.over=tokens"], r"aggregation\.over = 'tokens'.*did you mean 'token'"),
        (["ratio=generator"], r"importance\.cap = 2\.0: ratio = generator"),
        (["ratio=old"], r"ratio = 'old': must be one of proximal, generator"),
        (["importance.cap=0.5"], r"importance\.cap = 0\.5"),
        (["importance.mask_below=1"], r"importance\.mask_below = 1: must be a number > 0 and < 1"),
        (["importance.mask_above=1"], r"importance\.mask_above = 1: must be a number > 1"),
        (["importance.level=rollout"], r"importance\.level = 'rollout'"),
        (["entropy_bonus=-1"], "entropy_bonus = -1"),
        (["updates_per_batch=0"], "updates_per_batch = 0"),
        (["advantages.baseline=none"], r"advantages\.normalize_std = true: .* must be false"),
        (
            ["advantages.baseline=none", "dynamic_sampling.max_refills=2"],
            r"dynamic_sampling\.max_refills = 2: .*baseline = none trains on",
        ),
        (["advantages.baseline=mean"], r"advantages\.baseline = 'mean'.*group, none"),
        (["advantages.num_trained=1"], r"advantages\.num_trained = 1: must be"),
        (["dynamic_sampling.max_refills=-1"], r"dynamic_sampling\.max_refills = -1"),
        (["importance_cap=2"], "importance_cap: unknown key"),
        # Fault 16: a cut distribution is renormalised, and its ratio would be wrong: no such key.
        (["rollout.top_p=0.75"], r"rollout\.top_p: unknown key"),
        (["engine.top_p=0.75"], r"engine\.top_p = 0\.75: training samples from the whole"),
        (["loss.eps_hi=0.3"], r"loss\.eps_hi.*did you mean '?(loss\.)?eps_hi"),
    ],
)
def test_what_cannot_be_is_said(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_older_weights_are_not_taken_for_a_fault():
    stale = ("rollout.max_staleness=1", "guards.mismatch={above: 0.05, action: stop}")
    generator = ("ratio=generator", "importance.cap=null")
    config(*stale)  # against the weights that sampled: what is left is a fault
    config(*stale[:1], *generator)
    config(*stale[1:], *generator)
    with pytest.raises(ConfigError, match=r"guards.mismatch: with ratio = generator and rollout"):
        config(*stale, *generator)


def test_who_reads_the_model_at_a_sync_only_needs_no_copy():
    assert not engine_apart(config())
    assert engine_apart(config("rollout.max_staleness=1"))
    own = f"engine={__name__}.OwnWeights"
    assert not engine_apart(config("rollout.max_staleness=1", own))
    servers = "engine=components.policy.vllm.VLLMEngine"
    assert not engine_apart(config("rollout.max_staleness=1", servers, ADDRESSES))


class OwnWeights:
    """An engine on servers."""

    own_weights = True

    def __init__(self, model, *, max_tokens, max_batch_size):
        raise NotImplementedError
