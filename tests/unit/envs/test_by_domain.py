"""One environment for several domains: each episode is its own environment's."""

import functools
import warnings

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check

from components.envs.base import Message, Reward, ToolCall
from components.envs.by_domain import ByDomain
from components.envs.check import check_env
from components.envs.tau2 import Tau2Env
from components.rollout.agent_loop import Limits
from components.rollout.specs import group_specs
from components.rollout.workers import WorkerPool, WorkerRefused
from components.safety.gate import SafetyGated
from components.training.component import build, check_component
from tests.parity.tau2_scripts import TextUser
from tests.unit.rollout.fakes import make_renderer

TASKS = {"mock": "generated-7-3", "retail": "5"}
DOMAINS = sorted(TASKS)


def text_user(task):
    return TextUser(3)


def half(trajectory):
    return Reward(value=0.5, breakdown={"official": 0.0, "strict": 0.0})


def make(domain, **settings):
    return functools.partial(Tau2Env, **{"domain": domain, "user": text_user, **settings})


def by_domain(**settings):
    return ByDomain(envs={domain: make(domain) for domain in DOMAINS}, **settings)


@pytest.mark.parametrize("domain", DOMAINS)
def test_both_checkers_pass(domain):
    check_env(by_domain(), task_id=TASKS[domain], domain=domain, turns=("Hm.", "So?"))
    env = by_domain()
    reset = functools.partial(env.reset)
    env.reset = lambda *, seed=None, options=None: reset(  # each domain in turn, not a drawn one
        seed=seed, options={"domain": domain, **(options or {})}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts have no shape
        gymnasium_check(env, skip_render_check=True)


def test_gymnasium_passes_with_drawn_domains():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gymnasium_check(by_domain(), skip_render_check=True)
    env = by_domain()
    drawn = [env.reset(seed=seed)[1]["task"] for seed in range(12)]
    assert {task.domain for task in drawn} == set(DOMAINS)
    assert [env.reset(seed=seed)[1]["task"] for seed in range(12)] == drawn


TURNS = (
    "Hello.",
    Message(role="assistant", tool_calls=(ToolCall(id="c", name="no_such_tool", arguments={}),)),
    "",
    "Anything else?",
    "Goodbye.",
)


def episode(env, options):
    answers = [env.reset(seed=11, options=options)]
    while len(answers) == 1 or not any(answers[-1][2:4]):
        answers.append(env.step(TURNS[(len(answers) - 1) % len(TURNS)]))
    return [
        (a[:-1], {k: v for k, v in a[-1].items() if k not in ("trajectory", "reward")})
        for a in answers
    ], answers[-1][-1]["reward"]


def test_episodes_in_any_order_are_those_of_the_environments():
    env = by_domain()
    for domain in ("mock", "retail", "retail", "mock"):
        options = {"domain": domain, "task_id": TASKS[domain]}
        alone, reward = episode(make(domain)(), {"task_id": TASKS[domain]})
        assert episode(env, options) == (alone, reward)
        assert len(alone) > 3


def test_the_checker_reaches_every_environment():
    env = by_domain(checker=half)
    for domain in DOMAINS:
        assert episode(env, {"domain": domain, "task_id": TASKS[domain]})[1].value == 0.5
    with pytest.raises(ValueError, match="checks: 'S1' is not a check of domain 'mock'"):
        by_domain(checker=SafetyGated(checks=["S1"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domain": "airline"}, r"domain: 'airline' has no environment \(there are: mock, retail"),
        ({"task_id": "5"}, "task '5' needs its domain, one of mock, retail"),
        ({"domain": "mock", "task_id": "5"}, "'5' is not a task of mock"),
    ],
)
def test_what_cannot_be_reset(options, message):
    env = by_domain()
    env.reset(options={"domain": "mock"})
    with pytest.raises(ValueError, match=message):
        env.reset(options=options)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello.")  # not in the episode before


def test_one_domain_needs_no_name():
    env = ByDomain(envs={"mock": make("mock")})
    assert env.reset(options={"task_id": TASKS["mock"]})[1]["task"].domain == "mock"


@pytest.mark.parametrize(
    ("envs", "message"),
    [
        ({}, "envs: at least one domain is needed"),
        ({"mock": {"domain": "mock"}}, "envs.mock: .* makes no environment"),
        ({"retail": make("mock")}, "envs.retail: its environment is of domain 'mock'"),
        ({"mock": make("mock", max_steps=0)}, "max_steps: 0 must be above 0"),
    ],
)
def test_what_it_cannot_be_made_of(envs, message):
    with pytest.raises(ValueError, match=message):
        ByDomain(envs=envs)


def test_close_closes_all():
    closed = []

    class Watched(Tau2Env):
        def close(self):
            closed.append(self.domain)
            super().close()

    env = ByDomain(envs={d: functools.partial(Watched, domain=d) for d in DOMAINS})
    env.reset(options={"domain": "mock"})
    env.close()
    assert sorted(closed) == DOMAINS
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("Hello.")


# ---- in a config

NODE = {
    "_component_": "components.envs.by_domain.ByDomain",
    "envs": {
        "mock": {"_component_": "components.envs.tau2.Tau2Env", "domain": "mock"},
        "retail": {"_component_": "components.envs.tau2.Tau2Env", "domain": "retail"},
    },
}


def test_a_config_makes_it_and_the_checker_is_passed_on():
    assert check_component(NODE, "env", provided=("checker",)) == []
    env = build(NODE, checker=half)
    assert episode(env, {"domain": "mock", "task_id": TASKS["mock"]})[1].value == 0.5


def test_mistakes_inside_are_found_without_making_anything():
    bad = {**NODE, "envs": {**NODE["envs"], "mock": {**NODE["envs"]["mock"], "max_step": 3}}}
    (problem,) = check_component(bad, "env", provided=("checker",))
    assert problem.startswith("env.envs.mock.max_step: components.envs.tau2.Tau2Env takes no")
    assert problem.endswith("did you mean 'max_steps'?")
    bad["envs"]["mock"] = {**NODE["envs"]["mock"], "checker": None}
    assert "env.envs.mock.checker" in check_component(bad, "env", provided=("checker",))[0]
    bad["envs"]["mock"] = {"_component_": "components.envs.tau2.Tau2Envy", "domain": "mock"}
    assert "did you mean 'Tau2Env'" in check_component(bad, "env", provided=("checker",))[0]


def test_a_task_without_an_environment_is_refused_before_anything_is_played():
    """Also one of a dataset that the checks of a config know nothing of."""
    pool = WorkerPool(
        make_env=functools.partial(build, NODE),
        make_renderer=make_renderer,
        limits=Limits(max_turns=3, max_turn_tokens=32, max_tokens=30_000, max_refused=1),
        temperature=1.0,
        num_workers=1,
        env_timeout_s=60,
    )
    with pool:
        known, unknown = (
            group_specs([(domain, TASKS["mock"])], group_size=1, seed=0, phase="prompts")
            for domain in ("mock", "airline")
        )
        pool.check_prompts(known)
        with pytest.raises(WorkerRefused) as refused:
            pool.check_prompts(unknown)
    assert str(refused.value) == (
        "env: it refuses task 'generated-7-3' of 'airline': domain: 'airline' has no environment "
        "(there are: mock, retail)"
    )
