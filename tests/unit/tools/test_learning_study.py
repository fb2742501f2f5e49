"""A study of commands that take no time: what is run, what is gone on with, what is written.

The commands are stand-ins that keep the recipes' promises: rows in metrics.jsonl, a checkpoint at
``save_every`` and at a stop, ``resume=true`` from the last checkpoint. tests/recipes/test_study.py
runs the recipes themselves.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml

from components.safety.report import wilson
from tools.study_runs import is_over, shown, tune

ROOT = Path(__file__).parents[3]

STAND_IN = r"""
import json, signal, sys, time
from pathlib import Path

recipe, _, _, *pairs = sys.argv[1:]
settings = dict(pair.split("=", 1) for pair in pairs)
out = Path(settings["output_dir"])
resume = settings.get("resume") == "true"
assert resume == (out / "run.json").exists(), (out, resume)
if Path("broken").exists() and out.name == Path("broken").read_text():
    sys.exit("guard: loss is nan")
out.mkdir(parents=True, exist_ok=True)
(out / "run.json").write_text("{}")
(out / "versions.json").write_text('{"torch": "2.13"}')
stopped = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stopped.append(1))

def save(step):
    (out / f"step_{step}").mkdir(exist_ok=True)
    (out / f"step_{step}" / "model.safetensors").write_text(f"{out.name} {step}")

if recipe == "eval_agentic":
    model = Path(settings["model_dir"])
    assert (model / "model.safetensors").exists(), model
    step = int(model.name.removeprefix("step_"))
    reward = {"warm": step / 20, "grpo": 1.0, "sft": 0.75}.get(model.parent.name.split("_")[0], 0.5)
    trials = [reward] * int(settings["num_trials"])
    (out / "eval.json").write_text(json.dumps({
        "metrics": dict.fromkeys(["eval/do_nothing_mean", "eval/error_frac"], 0.0)
        | {"eval/official_mean": reward},
        "intervals": {"eval/official_mean": [0.0, 1.0]},
        "tasks": [
            {"task_id": f"{settings['env.tasks']}-{i}", "official": trials} for i in range(2)
        ],
    }))
else:
    num_steps = int(settings.get("num_steps", 10 if out.name == "warm" else 1000))
    every = 2 if out.name == "warm" else 4
    metrics = out / "metrics.jsonl"
    saved = [int(p.name.removeprefix("step_")) for p in out.glob("step_*")] if resume else []
    step = max(saved, default=0)
    rows = metrics.read_text().splitlines()[:step] if metrics.exists() else []
    metrics.write_text("".join(row + "\n" for row in rows))
    while step < num_steps and not stopped:
        time.sleep(0.03)
        step += 1
        took = 25.0 if out.name == "warm" and step > 4 else 5.0  # beside other work
        with metrics.open("a") as file:
            row = {"step": step, "time/step_s": took, "reward/mean": 0.5, "not/kept": 1.0}
            file.write(json.dumps(row) + "\n")
        if step % every == 0:
            save(step)
    save(step)
"""
DRIVER = """
import sys
from tools import learning_study as study, study_runs

study_runs.POLL_S = 0.01
study.SEEDS = (0, 1)

def tune(recipe, config, **settings):
    pairs = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return [sys.executable, "stand_in.py", recipe, "--config", config, *pairs]

study.tune = tune
sys.exit(study.main())
"""
MAKE = """
import sys
from pathlib import Path

path = next(word for word in sys.argv if word.startswith("demonstrations.path="))
Path(path.partition("=")[2]).mkdir()
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "make_demonstrations.py").write_text(MAKE)
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def start(place, *arguments):
    command = [sys.executable, str(place / "driver.py"), "--minutes", "1.7", *arguments]
    return subprocess.Popen(
        [*command, "--trials", "2"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(place, *arguments, code=0):
    process = start(place, *arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    return out, err


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def read(place, name):
    return json.loads((place / "recipes/results" / name).read_text())


def test_a_killed_study_goes_on_and_repeats_nothing(place):
    process = start(place)
    metrics = place / "runs/mock_learn/grpo_0/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 6)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # The command is asked to stop when the study is gone, and leaves a checkpoint.
    before = read(place, "mock_learn/before_0.json")
    assert not (place / "recipes/results/mock_learn/grpo_0.json").exists()
    out, _ = run(place)
    assert "before_0" not in out
    assert "demonstrations:" not in out
    assert read(place, "mock_learn/before_0.json") == before
    assert "resume=true" in (place / "runs/mock_learn/grpo_0.log").read_text()
    for arm in ("grpo", "sft", "reinforce"):
        for seed in (0, 1):
            found = read(place, f"mock_learn/{arm}_{seed}.json")
            # 1.7 minutes are 102 s, and 20 steps of 5 s; one more may end before the stop comes.
            assert 20 <= found["train"]["steps"] <= 22
            assert [row["step"] for row in found["curve"]] == [
                *range(1, found["train"]["steps"] + 1)
            ]
            assert "not/kept" not in found["curve"][0]
            assert f"seed={seed}" in found["evals"]["held_out"]["command"]
            assert "resume" not in found["train"]["command"]
    assert read(place, "mock_learn/sft_0.json")["train"]["steps"] == 20  # as many as fit
    summary = read(place, "mock_learn.json")
    # The warm start is step 6 of the stand-in: 6 / 20.
    assert read(place, "mock_learn/warm_start.json")["measured"] == {"2": 0.1, "4": 0.2, "6": 0.3}
    keys = ("seeds", "reward_before", "reward_after", "delta", "ci_low", "ci_high")
    # Two tasks that both gain 0.7: Wilson's of the gain, and of a loss of 0, over two trials.
    gain, loss = wilson(1.4, 2), wilson(0, 2)
    interval = (0.7 - math.hypot(0.7 - gain[0], loss[1]), gain[1])
    expected = ([0, 1], 0.3, 1.0, *map(pytest.approx, (0.7, *interval)))
    assert tuple(summary[key] for key in keys) == expected
    against = summary["sets"]["held_out"]["comparison"]
    assert {name: entry["delta"] for name, entry in against.items()} == {
        "grpo-sft": 0.25,
        "grpo-reinforce": 0.5,
    }
    assert run(place)[0].count("tune") == 0  # nothing is left to do
    listed, _ = run(place, "--list")
    assert listed.count("done") == 9
    assert "missing" not in listed


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_stops_cleanly_and_only_names_one(place, ignored):
    # A job that a script has put in the background is started with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    process = start(place, "--only", "reinforce_1")
    if ignored:
        signal.signal(signal.SIGINT, before)
    metrics = place / "runs/mock_learn/reinforce_1/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in err
    steps = len(metrics.read_text().splitlines())
    assert (metrics.parent / f"step_{steps}" / "model.safetensors").exists()
    out, _ = run(place, "--only", "reinforce_1")
    assert "advantages.baseline=none advantages.normalize_std=false" in out
    results = place / "recipes/results/mock_learn"
    assert {path.name for path in results.iterdir()} == {"warm_start.json", "reinforce_1.json"}


def test_two_at_once_share_the_work(place):
    jobs = ("--only", *(f"{arm}_{seed}" for arm in ("before", "grpo", "sft") for seed in (0, 1)))
    both = [start(place, *jobs) for _ in range(2)]
    outs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    launched = [line for out, _ in outs for line in out.splitlines() if "stand_in.py" in line]
    names = [line.partition(":")[0] for line in launched]
    assert len(names) == len(set(names))  # nothing was made twice
    assert all("stand_in.py" in out for out, _ in outs)
    assert names.count("warm") == 1
    assert read(place, "mock_learn.json")["seeds"] == [0, 1]  # whoever ended last has seen all


def test_another_warm_start_is_refused(place):
    run(place, "--only", "before_0")
    weights = place / "runs/mock_learn/warm/step_6/model.safetensors"
    weights.write_text("something else")
    _, err = run(place, "--only", "before_1", code=2)
    assert "is not the warm start of" in err


def test_another_study_is_not_taken_for_this_one(place):
    run(place, "--only", "before_0", "grpo_0")
    _, err = run(place, "--only", "before_0", "--minutes", "3", code=2)
    assert "before_0.json was made with minutes = 1.7, now 3.0; give the same" in err
    _, err = run(place, "--set", "seed=1", code=2)
    assert "settings = [], now ['seed=1']" in err
    # Without its results the runs are still those of the other study.
    shutil.rmtree(place / "recipes/results")
    _, err = run(place, "--only", "grpo_0", "--minutes", "3", code=2)
    assert "runs/mock_learn/grpo_0 was made with minutes = 1.7, now 3.0; delete it" in err
    # An evaluation of other weights is not the one of these.
    shutil.rmtree(place / "runs/mock_learn/grpo_0")
    (place / "runs/mock_learn/grpo_0.json").unlink()
    _, err = run(place, "--only", "grpo_0", "--minutes", "3", code=2)
    assert "eval_grpo_0/held_out was made with command = " in err
    assert "weights = " in err


def test_a_warm_start_of_other_threads_or_settings_is_refused(place, monkeypatch):
    """Its times say how many steps of SFT fit."""
    run(place, "--only", "warm_start")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, err = run(place, "--only", "sft_0", code=2)
    assert "warm_start.json was made with machine = " in err
    assert "'OMP_NUM_THREADS': '7'" in err
    monkeypatch.undo()
    (place / "configs").unlink()
    shutil.copytree(ROOT / "configs", place / "configs")
    config = place / "configs/mock_learn_sft.yaml"
    config.write_text("# A comment changes nothing.\n" + config.read_text())
    run(place, "--only", "warm_start")
    config.write_text(config.read_text().replace("lr: ", "lr: 1"))
    _, err = run(place, "--only", "sft_0", code=2)
    assert "warm_start.json was made with configs = " in err


def test_one_arm_that_fails_keeps_no_other_from_being_run(place):
    (place / "broken").write_text("reinforce_0")
    _, err = run(place, code=2)
    assert "guard: loss is nan" in err
    assert "learning_study: failed: reinforce_0; see above" in err
    listed, _ = run(place, "--list")
    assert [line.split()[0] for line in listed.splitlines() if "missing" in line] == ["reinforce_0"]
    (place / "broken").unlink()
    run(place)
    assert read(place, "mock_learn.json")["sets"]["held_out"]["change"]["reinforce"]["seeds"] == [
        0,
        1,
    ]


def test_a_study_goes_on_without_its_runs(place):
    run(place, "--only", "before_0")
    made = read(place, "mock_learn/warm_start.json")
    shutil.rmtree(place / "runs")
    run(place, "--only", "before_1")
    assert read(place, "mock_learn/warm_start.json") == made
    assert (
        read(place, "mock_learn/before_1.json")["same"]
        == read(place, "mock_learn/before_0.json")["same"]
    )
    shutil.rmtree(place / "runs")
    out, _ = run(place, "--only", "before_0", "before_1")  # all is there: only the summary is made
    assert "stand_in.py" not in out


def test_the_tasks_of_the_results_are_those_of_the_config_and_of_no_choice():
    from tools.learning_study import EVAL, SETS, VALIDATION

    config = yaml.safe_load((ROOT / EVAL).read_text(encoding="utf-8"))
    assert config["env"]["tasks"] == config["dataset"]["tasks"] == SETS["held_out"]
    seeds = {tasks.split(":")[1] for tasks in (SETS["held_out"], VALIDATION, "x:1")}
    assert len(seeds) == 3  # seed 1 was used while the settings were being looked for


def test_a_failing_command_is_shown(place):
    (place / "stand_in.py").write_text("raise SystemExit('the disk is on fire')")
    _, err = run(place, "--only", "grpo_0", code=2)
    assert "ended with code 1" in err
    assert "the disk is on fire" in err


def test_time_is_over_when_no_further_step_fits():
    assert not is_over([], 10.0)
    assert not is_over([4.0], 10.0)
    assert not is_over([5.0], 10.0)
    assert is_over([4.0, 4.0], 10.0)


def test_commands_are_shown_as_typed():
    command = tune("eval_agentic", "configs/mock_learn_eval.yaml", env__tasks="official", seed=1)
    assert shown(command) == (
        "tune run recipes/eval_agentic.py --config configs/mock_learn_eval.yaml "
        "env.tasks=official seed=1"
    )
