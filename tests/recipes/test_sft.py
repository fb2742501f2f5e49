"""The SFT recipe and the tool that makes its demonstrations, run as a user runs them."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from components import cli
from components.rollout.recorder import read_rollouts
from components.rollout.specs import trial_specs
from components.safety.report import safety_report
from components.training import checkpoint
from tests.recipes.runs import ROOT, arguments, played, rows, without_timings

pytestmark = pytest.mark.model

TASKS = "[" + ", ".join(f"generated-7-{i}" for i in range(8)) + "]"
TINY = {
    "device": "cpu",
    "dtype": "fp32",
    "dataset__include": TASKS,
    "num_steps": 4,
    "save_every": 1,
    "checkpoints__keep_last": 0,
    "demonstrations_per_step": 2,
    "held_out_frac": 0.25,
    "held_out_every": 2,
    "max_tokens": 1024,
    "optimizer__lr": 1e-3,
    "rollout__max_turns": 6,
    "rollout__max_turn_tokens": 32,
    "rollout__max_tokens": 1024,
    "rollout__num_workers": 2,
    "eval__dataset__include": "[create_task_1]",
    "eval__every": 4,
}


def sft(tune, made, output_dir, **keys):
    keys = {"demonstrations__path": made, "output_dir": output_dir, **keys}
    keys = {"model_dir": tune.model_dir, **TINY, **keys}
    return arguments("recipes/sft_agentic.py", config="configs/mock_sft.yaml", **keys)


def without_evaluation(tune, made, output_dir, **keys):
    given = sft(tune, made, output_dir, eval="null", **keys)
    return [argument for argument in given if not argument.startswith("eval.")]


def make(tune, path, *overrides):
    """Run the tool."""
    config = ["--config", "configs/mock_sft.yaml", f"dataset.include={TASKS}"]
    given = ["rollout.num_workers=2", f"model_dir={tune.model_dir}", f"demonstrations.path={path}"]
    return subprocess.run(
        [sys.executable, "tools/make_demonstrations.py", *config, *given, *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def made(tune, tmp_path_factory):
    path = tmp_path_factory.mktemp("demonstrations") / "mock"
    done = make(tune, path, "demonstrations.per_task=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "16 demonstrations of 8 tasks" in done.stdout
    return path


@pytest.fixture(scope="module")
def straight(tune, made, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("sft") / "run"
    done = tune.run(*sft(tune, made, output_dir))
    return SimpleNamespace(output_dir=output_dir, done=done)


def test_demonstrations_are_rollouts_that_keep_the_rules(made):
    rollouts = [record.rollout for record in read_rollouts(made / "rollouts.jsonl")]
    assert len({r.spec.rollout_id for r in rollouts}) == 16
    assert len({r.tokens.ids for r in rollouts}) > 8  # the two of a task are not the same
    for rollout in rollouts:
        assert rollout.status == "completed"
        assert rollout.reward_breakdown["official"] == 1.0
        assert sum(rollout.tokens.loss_mask) == sum(end - start for start, end in rollout.turns)
    report = safety_report(rollouts)["checks"]
    assert report["S7"]["applied"] == 16
    assert report["S7"]["violated"] == 0
    manifest = json.loads((made / "demonstrations.json").read_text())
    assert manifest["num_demonstrations"] == 16
    assert manifest["made_with"]["env"]["tasks"] == "generated:7:64"


def test_the_loss_falls_on_demonstrations_of_tasks_that_were_not_trained_on(straight):
    of_run = rows(straight.output_dir)
    held_out = {row["step"]: row["loss/held_out"] for row in of_run if "loss/held_out" in row}
    assert list(held_out) == [0, 2, 4]
    assert held_out[4] < held_out[2] < held_out[0] - 0.1
    trained = [row for row in of_run if "loss/total" in row]
    assert [row["step"] for row in trained] == [1, 2, 3, 4]
    assert [row["train/lr"] for row in trained] == pytest.approx([1e-3, 7e-4, 4e-4, 1e-4])
    assert all(row["pack/saving"] < 1 for row in trained)
    assert "12 demonstrations, 4 of held-out tasks" in straight.done.stdout
    (evaluated,) = (row for row in of_run if "eval/official_mean" in row)
    assert evaluated["step"] == 4
    (spec,) = (r["spec"] for r in played(straight.output_dir))
    assert spec["task_id"] == "create_task_1"
    # the trial of any evaluation of this task under this seed, so that checkpoints are paired
    (other,) = trial_specs([("mock", "create_task_1")], group_size=1, seed=42, phase="eval")
    assert spec["env_seed"] == other.env_seed


def test_a_checkpoint_is_a_model_that_transformers_loads(straight):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(straight.output_dir / "step_4")
    assert model.config.num_hidden_layers == 2


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tune, made, straight, tmp_path):
    """Killed after step 4 was logged, and the last checkpoint that was written is step_2."""
    output_dir = tmp_path / "run"
    shutil.copytree(straight.output_dir, output_dir)
    for name in ("step_3", "step_4"):
        shutil.rmtree(output_dir / name)
    done = tune.run(*sft(tune, made, output_dir, resume="true"))
    assert "resuming from step_2" in done.stdout
    assert "changed since" not in done.stdout
    assert [*map(without_timings, rows(output_dir))] == [
        *map(without_timings, rows(straight.output_dir))
    ]
    assert played(output_dir) == played(straight.output_dir)
    same_checkpoints(output_dir / "step_4", straight.output_dir / "step_4")


def same_checkpoints(left, right):
    files = sorted(p for p in right.rglob("*") if p.is_file())
    assert {"model.safetensors", "state.json"} <= {p.name for p in files}
    for file in files:
        other = left / file.relative_to(right)
        if "shard" not in file.name and file.name != "manifest.json":
            # safetensors writes what describes a shard in no fixed order
            assert other.read_bytes() == file.read_bytes(), file.name
    saved, again = checkpoint.load(right), checkpoint.load(left)
    for part in ("weights", "optimizer"):
        a, b = getattr(saved, part), getattr(again, part)
        assert a.keys() == b.keys()
        assert a
        assert all(torch.equal(a[name], b[name]) for name in a), part


STOPPING = {"model___component_": "tests.recipes.stopping.stopping_smollm2"}


def stop_in_step_4(tune, made, output_dir, **keys):
    """SIGINT in the forward pass of the last step; no checkpoint is due before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGINT_AT_FORWARD", "4")
        args = without_evaluation(tune, made, output_dir, save_every=50, **STOPPING, **keys)
        done = tune.run(*args)
    assert done.stdout.count("stopped after step 3; go on with resume=true") == 1
    trained = [row for row in rows(output_dir) if "loss/total" in row]
    assert [row["step"] for row in trained] == [1, 2, 3]
    # Of one row each: the signal came after the only check before a row.
    assert [row["pack/num_batches"] for row in trained] == [1, 1, 1]
    assert [path.name for path in output_dir.glob("step_*")] == ["step_3"]


@pytest.fixture(scope="module")
def stopped(tune, made, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("stopped") / "run"
    stop_in_step_4(tune, made, output_dir)
    return output_dir


def test_a_step_under_way_is_given_up(stopped, straight):
    """What is saved is what the uninterrupted run had after step 3."""
    same_checkpoints(stopped / "step_3", straight.output_dir / "step_3")


@pytest.mark.slow
def test_the_step_that_was_given_up_is_made_by_the_resumed_run(
    tune, made, stopped, straight, tmp_path
):
    output_dir = tmp_path / "run"
    shutil.copytree(stopped, output_dir)
    done = tune.run(*without_evaluation(tune, made, output_dir, resume="true", **STOPPING))
    assert "resuming from step_3" in done.stdout
    assert "changed since" not in done.stdout
    of_straight = [row for row in rows(straight.output_dir) if "eval/official_mean" not in row]
    assert [*map(without_timings, rows(output_dir))] == [*map(without_timings, of_straight)]
    same_checkpoints(output_dir / "step_4", straight.output_dir / "step_4")


@pytest.mark.slow
def test_a_stop_of_one_rank_gives_the_step_up_on_all(tune, made, tmp_path, monkeypatch):
    monkeypatch.setenv("SIGINT_ON_RANK", "1")
    stop_in_step_4(tune, made, tmp_path / "run", launcher=("--nproc_per_node", "2"))


@pytest.mark.slow
def test_two_ranks_take_the_same_steps(tune, made, straight, tmp_path):
    launcher = ("--nproc_per_node", "2")
    tune.run(*without_evaluation(tune, made, tmp_path / "run", launcher=launcher))
    alone = [row for row in rows(straight.output_dir) if "loss/total" in row]
    both = [row for row in rows(tmp_path / "run") if "loss/total" in row]
    for a, b in zip(alone, both, strict=True):
        assert b["loss/total"] == pytest.approx(a["loss/total"], rel=1e-4)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-3)


def refused(monkeypatch, capsys, tmp_path, args):
    """Run the recipe in this process; what it says."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["tune", *args])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    out, err = capsys.readouterr()
    assert exit.value.code == 2, err
    assert "step " not in out
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
    return err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"demonstrations__path": "no/such"}, "holds no demonstrations; python tools/make_demon"),
        ({"dataset__split": "test"}, "dataset.split = test: training is on the train split"),
        ({"env__paraphrases": "held_out"}, "env.paraphrases = held_out: these are for evaluation"),
        ({"dataset__include": "[generated-7-0]"}, "is not among the training tasks of dataset"),
        ({"renderer__tool_format": "json"}, "renderer.tool_format was signatures, is json"),
        ({"env__max_steps": 30}, "env.max_steps was 40, is 30"),
        ({"max_tokens": 100}, "max_tokens = 100: no demonstration's first turn ends before it"),
        ({"held_out_frac": 0.99}, "held_out_frac = 0.99: of 8 demonstrated tasks none is left"),
        ({"max_tokens": 9000}, "max_tokens = 9000: must be at most tokens_per_batch = 8192"),
        ({"demonstrations_per_stp": 2}, "did you mean 'demonstrations_per_step'?"),
        ({"checkpoints__keep_best": "{metric: eval/x}", "eval": "null"}, "needs an evaluation"),
    ],
)
def test_mistakes_are_named_and_touch_nothing(
    tune, made, tmp_path, monkeypatch, capsys, keys, message
):
    args = sft(tune, made, tmp_path / "run", **keys)
    if "eval" in keys:
        args = [a for a in args if not a.startswith("eval.")]
    assert message in refused(monkeypatch, capsys, tmp_path, args)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "demonstrations.json").write_text("{}"), "demonstrations.json is damaged"),
        (lambda d: drop_line(d / "rollouts.jsonl"), "rollouts.jsonl holds 15 of 16 rollouts"),
        (lambda d: edit(d, lambda r: r.pop("tokens")), "was written without its tokens"),
        (lambda d: edit(d, lambda r: r["breakdown"].update(official=0.5)), "official reward 0.5"),
        (lambda d: edit(d, lambda r: r.update(schema=9)), "schema 9, this version reads 1"),
    ],
)
def test_damaged_demonstrations_are_refused(
    tune, made, tmp_path, monkeypatch, capsys, damage, message
):
    shutil.copytree(made, tmp_path / "made")
    damage(tmp_path / "made")
    args = sft(tune, tmp_path / "made", tmp_path / "run")
    assert message in refused(monkeypatch, capsys, tmp_path, args)


def drop_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def edit(folder, change):
    path = folder / "rollouts.jsonl"
    first, *others = path.read_text().splitlines()
    record = json.loads(first)
    change(record)
    path.write_text("\n".join([json.dumps(record), *others]) + "\n")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.split=test"], "dataset.split = test: training is on the train split"),
        (["demonstrations.path={made}"], "exists and is not an empty directory"),
        (
            ["demonstrations.oracle=components.data.oracles.retail_oracle"],
            "oracle: none of 8 demonstrations could be played",
        ),
        (["model_dir=no_such_model"], "model 'no_such_model' not found"),
    ],
)
def test_the_tool_names_mistakes(tune, made, tmp_path, monkeypatch, capsys, overrides, message):
    from tools import make_demonstrations as tool

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tool.StopSignal, "install", lambda self: None)  # pytest's own Ctrl-C
    given = [f"demonstrations.path={tmp_path / 'made'}", f"model_dir={tune.model_dir}"]
    given += [f"dataset.include={TASKS}"] if "split" not in overrides[0] else []
    given += ["rollout.num_workers=1", *(text.format(made=made) for text in overrides)]
    monkeypatch.setattr(
        "sys.argv", ["make_demonstrations", "--config", "configs/mock_sft.yaml", *given]
    )
    assert tool.main() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
