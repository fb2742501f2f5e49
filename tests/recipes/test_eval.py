"""The evaluation recipe, run by the real command on a checkpoint of the tiny model."""

import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest

from components.envs.baselines import baseline
from components.rollout.compare import compare
from components.rollout.recorder import read_rollouts
from components.safety.report import safety_report
from tests.recipes.runs import arguments, assert_no_orphans, kill_group, wait_for

pytestmark = pytest.mark.model

TASKS = ("create_task_1", "create_task_1_nl_eval", "impossible_task_1")


def evaluation(model_dir, output_dir, **keys):
    keys = {
        "device": "cpu",
        "dtype": "fp32",
        "model_dir": model_dir,
        "output_dir": output_dir,
        "dataset__include": f"[{', '.join(TASKS)}]",
        "num_trials": 2,
        "rollout__max_turns": 6,
        "rollout__max_turn_tokens": 32,
        "rollout__max_tokens": 1024,
        "rollout__num_workers": 3,
        **keys,
    }
    return arguments("recipes/eval_agentic.py", config="configs/mock_eval.yaml", **keys)


@pytest.fixture(scope="module")
def evaluated(tune, straight, tmp_path_factory):
    """A checkpoint of a training run, three tasks, two trials each."""
    output_dir = tmp_path_factory.mktemp("eval") / "run"
    done = tune.run(*evaluation(straight.output_dir / "step_4", output_dir))
    result = json.loads((output_dir / "eval.json").read_text())
    return SimpleNamespace(output_dir=output_dir, done=done, result=result)


def test_results_are_those_of_the_recorded_rollouts(evaluated):
    rollouts = [r.rollout for r in read_rollouts(evaluated.output_dir / "rollouts.jsonl")]
    assert sorted(r.spec.task_id for r in rollouts) == sorted(TASKS * 2)
    rows = {row["task_id"]: row for row in evaluated.result["tasks"]}
    assert list(rows) == list(TASKS)
    assert {row["domain"] for row in rows.values()} == {"mock"}
    assert len({r.spec.env_seed for r in rollouts}) == 6  # each trial has a start of its own
    for task_id, row in rows.items():
        mine = sorted(
            (r for r in rollouts if r.spec.task_id == task_id), key=lambda r: r.spec.member
        )
        assert row["status"] == [r.status for r in mine]
        assert row["official"] == [r.reward_breakdown["official"] for r in mine]
        assert row["strict"] == [r.reward_breakdown["strict"] for r in mine]
        assert row["tool_calls"] == [r.stats["tool_calls"] for r in mine] == [0, 0]
    metrics = evaluated.result["metrics"]
    official = [value for row in rows.values() for value in row["official"]]
    assert metrics["eval/official_mean"] == pytest.approx(sum(official) / 6)
    assert metrics["eval/error_frac"] == 0
    assert evaluated.result["num_trials"] == 2


def test_the_do_nothing_agent_stands_beside(evaluated):
    expected = [baseline("mock", task_id, "do_nothing").breakdown for task_id in TASKS]
    rows = evaluated.result["tasks"]
    assert [row["do_nothing"] for row in rows] == [parts["official"] for parts in expected]
    assert [row["do_nothing_strict"] for row in rows] == [parts["strict"] for parts in expected]
    assert {row["do_nothing"] for row in rows} == {0.0, 1.0}  # one task checks words alone
    metrics = evaluated.result["metrics"]
    assert metrics["eval/do_nothing_mean"] == pytest.approx(1 / 3)
    assert [row["transfer"] for row in rows] == [0.0, 1.0, 1.0]
    assert metrics["eval/transfer_mean"] == metrics["eval/transfer_strict_mean"]
    assert metrics["eval/transfer_mean"] == pytest.approx(2 / 3)
    assert metrics["eval/do_nothing_strict_mean"] == pytest.approx(
        sum(parts["strict"] for parts in expected) / 3
    )


def test_the_console_has_a_table_by_task_and_the_means(evaluated):
    assert evaluated.done.stderr == ""
    out = evaluated.done.stdout
    head = next(line for line in out.splitlines() if "official" in line)
    for column in ("task", "strict", "do-nothing", "transfer", "calls", "ended"):
        assert column in head
    for row in evaluated.result["tasks"]:
        (line,) = (line for line in out.splitlines() if line.split()[:1] == [row["task_id"]])
        assert re.search(rf"{sum(row['official']) / 2:.2f}\D", line)
        assert row["status"][0].partition("_")[0] in line
    for name, value in evaluated.result["metrics"].items():
        interval = evaluated.result["intervals"].get(name)
        shown = re.escape(f"  95 % [{interval[0]:.3f}, {interval[1]:.3f}]") if interval else ""
        line = rf"^{re.escape(name)} +{value:.3f}{shown}$"
        assert re.search(line, out, re.MULTILINE), name


def test_the_safety_report_stands_at_the_end(evaluated):
    rollouts = [r.rollout for r in read_rollouts(evaluated.output_dir / "rollouts.jsonl")]
    assert evaluated.result["safety"] == json.loads(json.dumps(safety_report(rollouts)))
    last = evaluated.done.stdout.rstrip().splitlines()[-1]
    assert last.startswith("any ")  # the tiny model makes no call: no check applies
    assert f"{evaluated.output_dir.name} (n=6)" in evaluated.done.stdout
    assert evaluated.result["settings"]["env"]["paraphrases"] == "train"
    assert "output_dir" not in evaluated.result["settings"]


def test_the_same_evaluation_writes_the_same_bytes(tune, straight, evaluated, tmp_path):
    tune.run(*evaluation(straight.output_dir / "step_4", tmp_path / "again"))
    again = (tmp_path / "again/eval.json").read_bytes()
    assert again == (evaluated.output_dir / "eval.json").read_bytes()


def test_a_killed_evaluation_goes_on_where_it_was(tune, straight, evaluated, tmp_path):
    """Two rollouts and half of a third are in the file, and no result."""
    output_dir = tmp_path / "run"
    shutil.copytree(evaluated.output_dir, output_dir)
    (output_dir / "eval.json").unlink()
    lines = (output_dir / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    left = b"".join(lines[:2])
    (output_dir / "rollouts.jsonl").write_bytes(left + lines[2][:100])
    done = tune.run(*evaluation(straight.output_dir / "step_4", output_dir, resume="true"))
    assert "resuming: 2 of 6 rollouts were played before" in done.stdout
    assert (output_dir / "rollouts.jsonl").read_bytes().startswith(left)
    names = [r.rollout.spec.rollout_id for r in read_rollouts(output_dir / "rollouts.jsonl")]
    assert len(names) == len(set(names)) == 6
    assert json.loads((output_dir / "eval.json").read_text()) == evaluated.result


def test_an_evaluation_goes_on_under_the_same_settings_alone(
    tune, straight, evaluated, monkeypatch, capsys
):
    from components import cli
    from tests.recipes.runs import ROOT

    monkeypatch.chdir(ROOT)
    keys = {"resume": "true", "rollout__temperature": 0.5}
    args = evaluation(straight.output_dir / "step_4", evaluated.output_dir, **keys)
    monkeypatch.setattr("sys.argv", ["tune", *args])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    message = "rollouts played with other settings: rollout.temperature was 1.0, is 0.5"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_several_seeds_are_pooled_and_told_apart(tune, straight, evaluated, tmp_path):
    keys = {"num_seeds": 2, "num_trials": 1}
    tune.run(*evaluation(straight.output_dir / "step_4", tmp_path / "run", **keys))
    result = json.loads((tmp_path / "run/eval.json").read_text())
    rollouts = [r.rollout for r in read_rollouts(tmp_path / "run/rollouts.jsonl")]
    assert list(result["seeds"]) == ["0", "1"]
    for seed, means in result["seeds"].items():
        some = [r for r in rollouts if r.spec.rollout_id.startswith(f"eval/{seed}/")]
        assert sorted(r.spec.task_id for r in some) == sorted(TASKS)
        official = [r.reward_breakdown["official"] for r in some]
        assert means["official_mean"] == pytest.approx(sum(official) / 3)
    assert len({r.spec.env_seed for r in rollouts if r.spec.task_id == TASKS[0]}) == 2
    assert len({r.spec.seed for r in rollouts}) == 6
    assert result["num_trials"] == 2
    assert "eval/pass^2" in result["metrics"]


@pytest.mark.slow
def test_the_same_checkpoint_under_other_paraphrases(tune, straight, evaluated, tmp_path):
    """Only the user's words differ, and the comparison says so."""
    args = evaluation(straight.output_dir / "step_4", tmp_path / "run", env__paraphrases="held_out")
    tune.run(*args)
    result = json.loads((tmp_path / "run/eval.json").read_text())
    found = compare(evaluated.result, result)
    assert found["settings"] == {"env.paraphrases": ["train", "held_out"]}
    assert found["num_tasks"] == len(TASKS)
    said = [
        {m["content"] for r in read_rollouts(d / "rollouts.jsonl") for m in r.rollout.messages[1:2]}
        for d in (evaluated.output_dir, tmp_path / "run")
    ]
    assert not said[0] & said[1]


def test_what_is_written(evaluated):
    names = sorted(path.name for path in evaluated.output_dir.iterdir())
    assert names == ["config.yaml", "eval.json", "rollouts.jsonl", "run.json", "versions.json"]
    assert json.loads((evaluated.output_dir / "run.json").read_text()) == {"recipe": "eval_agentic"}


@pytest.mark.slow
def test_greedy_decoding_plays_a_trial_alike_beside_other_tasks(tune, tmp_path):
    """The draws of a rollout depend on its place, its user on task and trial alone."""
    found = []
    for include in ("[create_task_1]", "[impossible_task_1, create_task_1]"):
        output_dir = tmp_path / str(len(found))
        keys = {"rollout__temperature": 0, "dataset__include": include}
        tune.run(*evaluation(tune.model_dir, output_dir, **keys))
        records = [record.rollout for record in read_rollouts(output_dir / "rollouts.jsonl")]
        mine = [rollout for rollout in records if rollout.spec.task_id == "create_task_1"]
        found.append({rollout.spec.member: rollout for rollout in mine})
    for member in (0, 1):
        first, second = (of_run[member] for of_run in found)
        assert first.spec.seed != second.spec.seed
        assert first.spec.env_seed == second.spec.env_seed
        assert first.messages == second.messages


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "already holds a run of eval_agentic"),
        ({"model_dir": "no_such_model"}, "model 'no_such_model' not found"),
        ({"dataset__include": "[create_task_99]"}, "['create_task_99'] are not in mock/test"),
        ({"num_trails": 2}, "num_trails: unknown key; did you mean 'num_trials'?"),
        ({"rollout__temperature": -1}, "rollout.temperature = -1: must be a number >= 0"),
    ],
)
def test_mistakes_are_named_and_touch_nothing(
    tune, evaluated, tmp_path, monkeypatch, capsys, keys, message
):
    from components import cli
    from tests.recipes.runs import ROOT

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SINKFLEX_HOME", str(tmp_path / "home"))
    output_dir = tmp_path / "run" if keys else evaluated.output_dir
    before = sorted(evaluated.output_dir.rglob("*"))
    args = evaluation(**({"model_dir": tune.model_dir, "output_dir": output_dir} | keys))
    monkeypatch.setattr("sys.argv", ["tune", *args])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert sorted(evaluated.output_dir.rglob("*")) == before


def test_ctrl_c_keeps_what_was_played(tune, tmp_path):
    output_dir = tmp_path / "eval"
    arguments = evaluation(tune.model_dir, output_dir, num_trials=200, rollout__num_workers=2)
    process = tune.start(*arguments)
    recorded = output_dir / "rollouts.jsonl"
    try:
        wait_for(lambda: recorded.exists() and recorded.stat().st_size > 0, process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert_no_orphans(process)
    finally:
        kill_group(process)
    assert process.returncode == 130
    assert "stopped: " in out
    assert "Traceback" not in err
    assert len(list(read_rollouts(recorded))) > 0
    assert not (output_dir / "eval.json").exists()


@pytest.mark.slow
def test_two_ranks_share_the_rollouts(tune, evaluated, tmp_path):
    """Every rollout is played once, and one result is written."""
    output_dir = tmp_path / "eval"
    done = tune.run(*evaluation(tune.model_dir, output_dir, launcher=("--nproc_per_node", "2")))
    rollouts = [r.rollout for r in read_rollouts(output_dir / "rollouts.jsonl")]
    alone = [r.rollout for r in read_rollouts(evaluated.output_dir / "rollouts.jsonl")]
    names = [r.spec.rollout_id for r in rollouts]
    assert sorted(names) == sorted({r.spec.rollout_id for r in alone})
    result = json.loads((output_dir / "eval.json").read_text())
    assert [row["task_id"] for row in result["tasks"]] == list(TASKS)
    assert done.stdout.count("eval/official_mean") == 1
