"""Recorded rollouts delivered again: scored by another checker, and given to tau2's own code."""

import contextlib
import io
import json
from dataclasses import replace

import pytest

from components.chat.hermes import HermesRenderer
from components.data import demonstrations
from components.data.demonstrations import demonstrate
from components.data.oracle_mock import MockOracle
from components.envs.base import Message, ToolCall
from components.envs.rewards import OfficialReward, PartialCredit, StrictReward
from components.envs.tau2 import Tau2Env
from components.rollout.agent_loop import Limits
from components.rollout.episode import failed_rollout
from components.rollout.evaluation import evaluation_metrics
from components.rollout.recorder import Recorder, read_rollouts
from components.rollout.replay import ReplayError, replay, rescored
from components.rollout.specs import group_specs, trial_specs
from tests.tiny import tiny_tokenizer_dir
from tools import export_tau2, rescore

# The last two check words alone or a history; an agent that does nothing gets the first of them.
TASKS = ("create_task_1", "update_task_1", "create_task_1_nl_eval", "impossible_task_1")
ENV = {
    "_component_": "components.envs.tau2.Tau2Env",
    "domain": "mock",
    "user": "scripted",
    "max_steps": 20,
    "max_errors": 2,
    "max_text_chars": 280,
}


class Idle:
    """Says too much once, which is refused, and then that it cannot help."""

    def act(self, messages, tools):
        if len(messages) == 2:
            return Message(role="assistant", content="I am thinking. " * 20)
        return Message(role="assistant", content="I cannot help with that.")


class Wrong:
    """Calls for a user that there is not, until the benchmark ends the run."""

    def act(self, messages, tools):
        arguments = {"user_id": "nobody", "title": "x"}
        return Message(
            role="assistant", tool_calls=(ToolCall(name="create_task", arguments=arguments),)
        )


def make_env(checker=None):
    settings = {key: value for key, value in ENV.items() if key != "_component_"}
    return Tau2Env(**settings, checker=checker)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Four trials of four tasks: solved, not tried, ended by tool errors, cut short or lost."""
    renderer = HermesRenderer(tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer")))
    specs = trial_specs([("mock", task) for task in TASKS], group_size=4, seed=5, phase="eval")
    patch, found = pytest.MonkeyPatch(), []
    unlimited = Limits(max_turns=30, max_turn_tokens=4096, max_tokens=10**6, max_refused=3)
    for spec in specs:
        agent = (MockOracle, Idle, Wrong, MockOracle)[spec.member]
        limits = replace(unlimited, max_turns=1) if spec.member == 3 else unlimited
        patch.setattr(demonstrations, "UNLIMITED", limits)
        rollout = demonstrate(make_env(), agent(), renderer, spec)
        if (spec.member, spec.task_id) == (3, "create_task_1"):
            rollout = failed_rollout(spec, "error_infra", "lost")
        found.append(rollout)
    patch.undo()
    statuses = {rollout.status for rollout in found}
    assert statuses >= {"completed", "truncated_errors", "truncated_max_steps", "error_infra"}
    assert any(m.get("refused") for rollout in found for m in rollout.messages)
    return found


@pytest.fixture
def run(played, tmp_path):
    """The directory of a run that recorded them."""
    (tmp_path / "config.yaml").write_text(
        json.dumps({"env": ENV, "model_dir": "some/model", "seed": 5})
    )
    with Recorder(tmp_path / "rollouts.jsonl") as recorder:
        recorder.write(0, played)
    return tmp_path


def test_the_same_checker_gives_the_same_rewards_exactly(run):
    pairs = rescore.rescore(run, OfficialReward(), only="")
    assert len(pairs) == 16
    for before, after in pairs:
        assert after == before
    rewards = [before["reward"] for before, _ in pairs]
    assert {0.0, 1.0, None} <= set(rewards)


def test_another_checker_gives_what_it_would_have_given_then(played, run):
    """Against playing the same turns with that checker from the start, as a policy would have."""
    checker, changed = PartialCredit(), 0
    for (before, after), rollout in zip(
        rescore.rescore(run, checker, only=""), played, strict=True
    ):
        if rollout.status == "error_infra":
            assert after["reward"] is None
            continue
        env = make_env(checker)
        spec = rollout.spec
        env.reset(seed=spec.env_seed, options={"task_id": spec.task_id})
        info = {}
        for message in rollout.messages:
            if message["role"] == "assistant" and "turn" in message and not message.get("refused"):
                calls = tuple(ToolCall(**call) for call in message.get("tool_calls", ()))
                *_, info = env.step(
                    Message(role="assistant", content=message["content"], tool_calls=calls)
                )
        expected = info["reward"].value if "reward" in info else 0.0
        assert after["reward"] == expected
        changed += after["reward"] != before["reward"]
        rest = {"reward", "breakdown"}
        assert {k: v for k, v in after.items() if k not in rest} == {
            k: v for k, v in before.items() if k not in rest
        }
    assert changed > 0


def test_an_agent_that_did_nothing_loses_its_strict_reward(tmp_path):
    """Retail 10 gives an agent the full reward that cannot help."""
    renderer = HermesRenderer(tiny_tokenizer_dir(tmp_path / "tokenizer"))
    (spec,) = group_specs([("retail", "10")], group_size=1, seed=5, phase="eval")
    env = {**ENV, "domain": "retail", "max_text_chars": 2000}
    settings = {key: value for key, value in env.items() if key != "_component_"}
    rollout = demonstrate(Tau2Env(**settings), Idle(), renderer, spec)
    (tmp_path / "config.yaml").write_text(json.dumps({"env": env}))
    with Recorder(tmp_path / "rollouts.jsonl") as recorder:
        recorder.write(0, [rollout])
    ((before, after),) = rescore.rescore(tmp_path, StrictReward(), only="")
    assert (before["reward"], after["reward"]) == (1.0, 0.0)
    assert after["breakdown"]["official"] == 1.0


def tampered(rollout, place, **changes):
    messages = [dict(message) for message in rollout.messages]
    messages[place] |= changes
    return replace(rollout, messages=tuple(messages))


def test_a_record_that_is_not_what_happens_is_refused(played):
    solved = played[0]
    assert rescored(make_env(), solved).value == 1.0
    place = max(i for i, m in enumerate(solved.messages) if m["role"] == "tool")
    (call,) = solved.messages[place - 1]["tool_calls"]
    other = {**call, "arguments": {**call["arguments"], "title": "something else"}}
    with pytest.raises(ReplayError, match="the replay differs from the record"):
        replay(make_env(), tampered(solved, place, content="{}"))
    with pytest.raises(ReplayError, match=r"eval/0/mock/create_task_1/0: .* differs"):
        replay(make_env(), tampered(solved, place - 1, tool_calls=[other]))
    with pytest.raises(ReplayError, match="with 1 recorded messages left"):
        replay(make_env(), replace(solved, messages=(*solved.messages, solved.messages[-1])))
    with pytest.raises(ReplayError, match=r"official reward was 0\.5 and is 1\.0 now"):
        rescored(make_env(), replace(solved, reward_breakdown={"official": 0.5}))
    with pytest.raises(ReplayError, match="a turn is refused now"):
        rescored(Tau2Env(domain="mock", max_text_chars=20), solved)


def command(monkeypatch, tool, *arguments):
    monkeypatch.setattr("sys.argv", [tool.__name__, *map(str, arguments)])
    return tool.main()


def test_the_command(run, monkeypatch, capsys):
    strict = "components.envs.rewards.StrictReward"
    assert command(monkeypatch, rescore, run, "--checker", strict) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("eval"))
    assert line.replace("│", " ").split()[:3] == ["eval", "16", "1"]
    records = list(read_rollouts(run / "rollouts.rescored.jsonl"))
    assert len(records) == 16
    assert {r.rollout.reward for r in records} == {0.0, 1.0, None}
    assert command(monkeypatch, rescore, run, "--checker", strict) == 2
    assert "rollouts.rescored.jsonl exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checker", "components.envs.rewards.StrictRewrd"], "StrictReward"),
        (["--checker", "components.envs.rewards.PartialCredit", "writes=3"], "add up to 1"),
        (["--checker", "components.envs.rewards.PartialCredit", "writes"], "must be key=value"),
        (["--checker", "components.envs.rewards.StrictReward", "--only", "x"], "begins with 'x'"),
    ],
)
def test_mistakes_are_named(run, monkeypatch, capsys, arguments, message):
    assert command(monkeypatch, rescore, run, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (run / "rollouts.rescored.jsonl").exists()


def test_trials_meet_users_of_different_words_and_checkpoints_the_same(played):
    def first_words(phase):
        env, found = make_env(), []
        for spec in trial_specs([("mock", TASKS[0])], group_size=8, seed=5, phase=phase):
            _, info = env.reset(seed=spec.env_seed, options={"task_id": spec.task_id})
            found.append(next(m.content for m in info["messages"] if m.role == "user"))
        return found

    assert len(set(first_words("eval/0"))) > 1
    assert first_words("eval/8") == first_words("eval/0")


def test_a_language_model_cannot_be_asked_again(run, monkeypatch, capsys):
    config = json.loads((run / "config.yaml").read_text())
    config["env"]["user"] = {"_component_": "components.envs.users_llm.LLMUser"}
    (run / "config.yaml").write_text(json.dumps(config))
    strict = "components.envs.rewards.StrictReward"
    assert command(monkeypatch, rescore, run, "--checker", strict) == 2
    assert "env.user is a language model" in capsys.readouterr().err
    assert command(monkeypatch, export_tau2, run) == 2
    assert "only Tau2Env with user: scripted" in capsys.readouterr().err


def test_nor_can_one_within_another_environment(run, monkeypatch, capsys):
    """One domain's user is a model, the other's is scripted; the model must not even be made."""
    model = {"_component_": "components.envs.users_llm.LLMUser", "model": "x/never-called"}
    config = json.loads((run / "config.yaml").read_text())
    config["env"] = {
        "_component_": "components.envs.by_domain.ByDomain",
        "envs": {"mock": config["env"], "retail": {**ENV, "domain": "retail", "user": model}},
    }
    (run / "config.yaml").write_text(json.dumps(config))
    strict = "components.envs.rewards.StrictReward"
    only = ["--only", "eval/0/"]  # not that no rollout of it is asked for
    assert command(monkeypatch, rescore, run, "--checker", strict, *only) == 2
    assert "env.envs.retail.user is a language model" in capsys.readouterr().err
    config["env"]["envs"]["retail"]["user"] = "scripted"
    (run / "config.yaml").write_text(json.dumps(config))
    assert command(monkeypatch, rescore, run, "--checker", strict, *only) == 0


# ---------------------------------------------------------------- tau2's own code


@pytest.fixture
def results(run, monkeypatch):
    """The exported file, read by tau2."""
    from tau2.data_model.simulation import Results

    assert command(monkeypatch, export_tau2, run) == 0
    return Results.load(run / "tau2_results.json")


def test_tau2s_own_metrics_agree(played, results):
    from tau2.metrics.agent_metrics import compute_metrics

    theirs = compute_metrics(results)
    ours = evaluation_metrics(played, num_trials=4)
    assert theirs.avg_reward == pytest.approx(ours["eval/official_mean"], abs=1e-12)
    assert 0 < theirs.avg_reward < 1
    assert set(theirs.pass_hat_ks) == {1, 2, 3, 4}
    for k, value in theirs.pass_hat_ks.items():
        assert value == pytest.approx(ours[f"eval/pass^{k}"], abs=1e-12), k
    assert theirs.pass_hat_ks[1] > theirs.pass_hat_ks[2]


def test_tau2s_own_viewer_shows_every_simulation(played, results):
    from rich.console import Console
    from tau2.scripts.view_simulations import find_simulation_by_task_id_and_trial, find_task_by_id
    from tau2.utils.display import ConsoleDisplay

    for rollout in played:
        spec = rollout.spec
        found = find_simulation_by_task_id_and_trial(results, spec.task_id, spec.member)
        assert found.id == spec.rollout_id
        text = io.StringIO()
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(ConsoleDisplay, "console", Console(file=text, width=300))
            ConsoleDisplay.display_task(find_task_by_id(results.tasks, spec.task_id))
            ConsoleDisplay.display_simulation(found)
        shown = text.getvalue()
        official = rollout.reward_breakdown.get("official", 0.0)
        assert f"{official:.4f}" in shown
        for message in rollout.messages:
            if message["role"] == "user" and message["content"].isascii():
                assert message["content"].split()[0] in shown


def test_simulations_hold_the_official_record(played, results):
    by_id = {simulation.id: simulation for simulation in results.simulations}
    for rollout in played:
        simulation = by_id[rollout.spec.rollout_id]
        said = [m.content or "" for m in simulation.messages if m.role in ("user", "assistant")]
        delivered = [m for m in rollout.messages if not m.get("refused")]
        assert said == [m["content"] for m in delivered if m["role"] in ("user", "assistant")]
    assert by_id["eval/0/mock/create_task_1/3"].reward_info.info == {"status": "error_infra"}


def test_a_reward_that_the_official_evaluator_does_not_give_is_refused(run, monkeypatch, capsys):
    lines = (run / "rollouts.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["breakdown"]["official"] = 0.0
    (run / "rollouts.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    assert command(monkeypatch, export_tau2, run) == 2
    assert "the official evaluator gives 1.0, recorded is 0.0" in capsys.readouterr().err
