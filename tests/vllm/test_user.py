"""A language model behind a real vLLM server plays the user of tau2-bench.

SmolLM2 is too weak to play it well, so these tests hold what must be true of any user: who said
what, how episodes end, and what happens to them when the server dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml

from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data
from components.rollout.agent_loop import Limits, run_episode
from components.rollout.stats import rollout_metrics
from components.rollout.types import Rollout, RolloutSpec, Status
from components.rollout.workers import WorkerPool
from components.training.component import partial as component
from tests.unit.rollout.fakes import FakeEngine, make_renderer
from tests.vllm.serving import (
    REQUEST,
    Witness,
    one_sentence_model,
    template_with_examples,
    user_server,
)
from tools.serve_vllm import VllmServer

pytestmark = pytest.mark.vllm

LIMITS = Limits(max_turns=3, max_turn_tokens=400, max_tokens=100_000, max_refused=1)
TIMEOUT_S = 240.0
CALL = '<tool_call>\n{"name": "get_users", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    directory = tmp_path_factory.mktemp("vllm")
    template = template_with_examples(directory / "template.jinja")
    model = one_sentence_model(directory / "smollm2")
    with user_server(model, template=template, log=directory / "log") as running:
        print(f"{running.url} after {running.start_s:.0f} s")
        yield running


def env_node(url: str, domain: str) -> dict[str, Any]:
    """The environment as the page describes it in YAML."""
    text = f"""
    _component_: components.envs.tau2.Tau2Env
    domain: {domain}
    user:
      _component_: components.envs.users_llm.LLMUser
      base_url: {url}
      model: smollm2
      temperature: 0.25
      timeout_s: {TIMEOUT_S}
      retries: 1
    """
    return yaml.safe_load(text)


def order(task_id: str, name: str, *, domain: str = "mock", seed: int = 5) -> RolloutSpec:
    return RolloutSpec(
        rollout_id=name, task_id=task_id, domain=domain, group=0, member=0, seed=1, env_seed=seed
    )


def play(env: Tau2Env, spec: RolloutSpec, turns: tuple[str, ...]) -> Rollout:
    """One episode with a scripted agent."""
    engine = FakeEngine({spec.rollout_id: turns})
    loop = run_episode(env, make_renderer(), spec, limits=LIMITS, temperature=1.0)
    try:
        request = next(loop)
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as stop:
        return stop.value


def check_ended(rollout: Rollout) -> None:
    """One status, and a reward exactly where the user did its part."""
    assert rollout.status in get_args(Status)
    assert (rollout.reward is None) == rollout.status.startswith("error_")
    assert bool(rollout.error) == (not rollout.valid)


def said_by_user(rollout: Rollout) -> list[str]:
    return [m["content"] for m in rollout.messages if m["role"] == "user"]


def test_mock_hears_the_server_and_the_server_what_the_yaml_says(server):
    with Witness(server) as witness:
        env = component(env_node(witness.url, "mock"))()
        turns = ("What shall I do?", CALL, "Who are you?")
        rollout = play(env, order("create_task_1", "r", seed=5), turns)
    check_ended(rollout)
    assert rollout.valid, rollout.error
    assert len(said_by_user(rollout)) >= 2
    assert said_by_user(rollout) == witness.said()
    for body, headers, answer in witness.seen:
        assert (body["model"], body["temperature"], body["seed"]) == ("smollm2", 0.25, 5)
        assert TIMEOUT_S - 60 < float(headers["x-stainless-read-timeout"]) <= TIMEOUT_S
        assert answer["model"] == "smollm2"
        assert answer["usage"]["completion_tokens"] > 0
    (first, _, _), (second, _, _) = witness.seen[:2]
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    # The user remembers what it said, and is not told of the agent's call.
    assert second["messages"][2] == {"role": "assistant", "content": witness.said()[0]} | {
        k: v for k, v in second["messages"][2].items() if v is None
    }
    assert second["messages"][3]["content"] == "What shall I do?"


def test_telecoms_user_is_offered_its_phone_and_what_it_calls_is_done(server):
    task_id = next(iter(domain_data("telecom").tasks))
    with Witness(server) as witness:
        env = component(env_node(witness.url, "telecom"))()
        rollout = play(env, order(task_id, "t", domain="telecom"), (REQUEST, "Thank you."))
    check_ended(rollout)
    assert rollout.valid, rollout.error
    assert said_by_user(rollout) == witness.said()
    (first, _, greeting), (asked, _, call), (told, _, report) = witness.seen[:3]
    for body in (first, asked, told):
        names = {tool["function"]["name"] for tool in body["tools"]}
        assert names == {tool.name for tool in domain_data("telecom").user_tools}
    # 2,900 tokens of it are the tools: the server's template shows them to the model.
    assert greeting["usage"]["prompt_tokens"] > 3500
    assert asked["messages"][-1]["content"] == REQUEST
    (called,) = call["choices"][0]["message"]["tool_calls"]
    assert called["function"] == {"name": "check_status_bar", "arguments": "{}"}
    assistant, tool = told["messages"][-2:]
    assert [c["id"] for c in assistant["tool_calls"]] == [called["id"]] == [tool["tool_call_id"]]
    assert tool["content"] == env.tau2_environment.use_user_tool("check_status_bar")
    assert report["usage"]["prompt_tokens"] > greeting["usage"]["prompt_tokens"]
    # The agent hears what its user says, never what it does.
    assert "check_status_bar" not in str(rollout.messages)


def test_a_server_that_dies_costs_its_episodes_and_no_more(server):
    """In a pool: sound before, error_user while it is dead, sound again once it is back."""
    make_env = component(env_node(server.url, "mock"))
    specs = [order("create_task_1", f"r{i}", seed=i) for i in range(5)]
    engine = FakeEngine({spec.rollout_id: ("What is it?",) * 3 for spec in specs})
    done: list[Rollout] = []
    sound: list[str] = []

    def kill_once() -> None:
        if done and not sound:
            sound.extend(rollout.spec.rollout_id for rollout in done)
            server.kill()

    with WorkerPool(
        make_env=make_env,
        make_renderer=make_renderer,
        limits=LIMITS,
        temperature=1.0,
        num_workers=2,
        env_timeout_s=2 * TIMEOUT_S,
        preload=("components.envs.tau2_data:preload:mock",),
    ) as pool:
        rollouts = pool.run(specs, engine, on_done=done.append, on_round=kill_once)
        server.start()
        again = [order("create_task_1", f"again{i}", seed=i) for i in range(2)]
        script = FakeEngine({spec.rollout_id: ("What is it?",) * 3 for spec in again})
        restarted = pool.run(again, script)
    assert [rollout.spec for rollout in rollouts] == specs
    for rollout in (*rollouts, *restarted):
        check_ended(rollout)
    assert sound
    for rollout in rollouts:
        if rollout.spec.rollout_id in sound:
            assert rollout.valid, rollout.error
        else:
            assert rollout.status == "error_user"
            assert rollout.reward is None
            assert server.url in rollout.error
    lost = [rollout for rollout in rollouts if not rollout.valid]
    assert any(rollout.turns for rollout in lost), "none was in the middle of its episode"
    assert any(not rollout.turns for rollout in lost), "none was about to begin"
    metrics = rollout_metrics(rollouts)
    assert metrics["rollout/error_frac"] == pytest.approx(len(lost) / 5)
    assert all(rollout.valid for rollout in restarted), [r.error for r in restarted]
