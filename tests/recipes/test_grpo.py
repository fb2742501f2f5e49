"""The GRPO recipe, run by the real command on a tiny random model."""

import csv
import json
import os
import re
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from components.cpu import multiplies_bf16
from components.models.smollm2 import smollm2
from components.rollout.recorder import read_rollouts
from components.rollout.specs import trial_specs
from components.training import checkpoint
from components.training.metrics import read_metrics
from tests.recipes.runs import (
    ROOT,
    assert_no_orphans,
    kill_group,
    played,
    rows,
    steps,
    training,
    wait_for,
    without_timings,
)

pytestmark = pytest.mark.model

NUMBER = r" +(-?\d+\.\d+|\d+|-)"
STEP = re.compile(
    rf"step +(\d+)/4  reward{NUMBER}  official{NUMBER}  strict{NUMBER}  loss{NUMBER}  kl{NUMBER}  "
    rf"gnorm{NUMBER}  calls{NUMBER}  errors{NUMBER}  tok{NUMBER}  s{NUMBER}"
)
WARM_START = re.compile(
    r"warm start: \d+ demonstrations of training tasks, \d+ to \d+ tokens.*"
    r"|warm start +\d+/\d+  loss +\d+\.\d+  gnorm +\d+\.\d+"
    r"|warm start: loaded .+\.safetensors"
)
EVALUATION = re.compile(r"eval +(\d+)/4(  [a-z^@_0-9]+ \d+\.\d+)+")
NOTHING_LEARNT = "nothing to learn from in this step and the weights did not change"


def weights(folder):
    return load_file(folder / "model.safetensors")


def same_weights(left, right):
    left, right = weights(left), weights(right)
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


# ---- killed and resumed


def test_a_killed_run_goes_on_as_if_it_had_never_stopped(straight, resumed):
    assert "step_2" in resumed.at_kill
    assert "step_4" not in resumed.at_kill
    assert "resuming from step_2" in resumed.done.stdout
    assert STEP.findall(resumed.done.stdout)[0][0] == "3"
    left, right = rows(straight.output_dir), rows(resumed.output_dir)
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for a, b in zip(left, right, strict=True):
        assert without_timings(a) == without_timings(b)  # losses, rewards, lengths: every bit
    assert played(straight.output_dir) == played(resumed.output_dir)  # order, ids, log-probs


def test_its_weights_and_optimizer_state_are_the_same_bytes(straight, resumed):
    left, right = (run.output_dir / "step_4" for run in (straight, resumed))
    names = sorted(str(p.relative_to(left)) for p in left.rglob("*.*") if p.name != "manifest.json")
    assert [name for name in names if name.endswith(".safetensors")] == [
        "model.safetensors",
        "resume/shard-00001-model-00001-of-00001.safetensors",
    ]
    for name in names:  # state.json: loader, optimizer's settings, random generators
        if "shard" not in name:  # safetensors writes what describes a file in no fixed order
            assert (left / name).read_bytes() == (right / name).read_bytes(), name
    saved, again = checkpoint.load(left), checkpoint.load(right)
    for part in ("weights", "optimizer", "reference"):
        a, b = getattr(saved, part), getattr(again, part)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), part
    assert {name.rpartition("/")[0] for name in saved.optimizer} == saved.weights.keys()
    assert saved.reference.keys() == saved.weights.keys()


def test_a_torn_checkpoint_is_said_and_the_one_before_is_used(tune, straight, tmp_path):
    output_dir = tmp_path / "run"
    shutil.copytree(straight.output_dir, output_dir)
    state = straight.output_dir / "step_4/resume"
    shutil.copytree(state, output_dir / "step_5/resume")  # no manifest: torn
    (output_dir / "step_6.tmp").mkdir()
    done = tune.train(output_dir, resume="true", num_steps=4)
    assert "step_5 is not whole: ignored" in done.stderr
    assert "step_6.tmp was being written when the run stopped: ignored" in done.stderr
    assert "resuming from step_4" in done.stdout
    assert rows(output_dir) == rows(straight.output_dir)  # all four steps are done


# ---- Ctrl-C


@pytest.fixture(scope="module")
def interrupted(tune, tmp_path_factory):
    """Ctrl-C in a terminal: SIGINT to the whole process group, while step 2 is played."""
    output_dir = tmp_path_factory.mktemp("interrupted") / "run"
    keys = {"model_dir": tune.model_dir, "output_dir": output_dir, "eval": "null", "save_every": 50}
    process = tune.start(*training(**keys, num_steps=50))
    try:
        wait_for(lambda: 1 in steps(output_dir), process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert_no_orphans(process)
    finally:
        kill_group(process)
    return process.returncode, out, err, output_dir


def test_ctrl_c_saves_and_says_how_to_go_on(interrupted):
    code, out, err, output_dir = interrupted
    (last,) = {max(steps(output_dir))}
    assert f"stopped after step {last}; go on with resume=true" in out
    assert code in (0, 130)
    assert "Traceback" not in err
    found = checkpoint.last_whole(output_dir)
    assert found == output_dir / f"step_{last}"
    assert checkpoint.load(found).state["step"] == last
    recorded = {record.step for record in read_rollouts(output_dir / "rollouts.jsonl")}
    assert recorded == set(range(1, last + 1))
    assert (output_dir / "run.png").is_file()


def test_an_interrupted_evaluation_is_made_up_for(tune, straight, tmp_path):
    """Step 2 was saved, the evaluation after it was not finished: the resumed run makes it."""
    output_dir = tmp_path / "run"
    tune.train(output_dir, num_steps=2)
    log = output_dir / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    assert "eval/official_mean" in lines[-1]
    log.write_text("".join(lines[:-1]))
    tune.train(output_dir, num_steps=2, resume="true")
    expected = [row for row in rows(straight.output_dir) if row["step"] <= 2]
    assert [without_timings(row) for row in rows(output_dir)] == [
        without_timings(row) for row in expected
    ]


def test_no_steps_leave_the_model_that_a_run_starts_from(tune, tmp_path):
    output_dir = tmp_path / "run"
    tune.train(output_dir, num_steps=0, eval="null", dtype="auto")
    assert checkpoint.last_whole(output_dir) == output_dir / "step_0"
    chosen = "bf16" if multiplies_bf16() else "fp32"
    assert f"\ndtype: {chosen}\n" in (output_dir / "config.yaml").read_text()


def test_a_resumed_run_says_what_was_changed(tune, tmp_path):
    output_dir = tmp_path / "run"
    tune.train(output_dir, num_steps=1, eval="null", loss__beta=0)
    done = tune.train(
        output_dir, num_steps=2, eval="null", loss__beta=0, resume="true", max_grad_norm=0.5
    )
    assert "changed since: max_grad_norm was 1.0, is 0.5" in done.stdout
    assert done.stdout.count("changed since") == 1
    failed = tune.train(output_dir, num_steps=3, eval="null", resume="true", code=2)
    assert "loss.beta: a KL term needs the reference policy" in failed.stderr


def test_a_full_disk_costs_the_step_under_way_only(tune, straight, tmp_path):
    """A limit on the size of files stands for the disk: the checkpoint of step 4 does not fit."""
    output_dir = tmp_path / "run"
    tune.train(output_dir, num_steps=2)
    before = {p: p.stat().st_mtime_ns for p in (output_dir / "step_2").rglob("*")}
    biggest = max(p.stat().st_size for p in output_dir.rglob("*"))
    failed = tune.train(output_dir, resume="true", code=1, largest_file=biggest - 1)
    (line,) = [line for line in failed.stderr.splitlines() if "cannot be written" in line]
    assert "File too large" in line
    assert "resume=true" in line
    assert "Traceback" not in failed.stderr
    assert {p: p.stat().st_mtime_ns for p in (output_dir / "step_2").rglob("*")} == before
    assert list(output_dir.glob("*.tmp*")) == []
    tune.train(output_dir, resume="true")
    same_weights(output_dir / "step_4", straight.output_dir / "step_4")


@pytest.mark.slow
def test_ctrl_c_stops_two_ranks_while_they_play(tune, tmp_path):
    output_dir = tmp_path / "run"
    keys = {"model_dir": tune.model_dir, "output_dir": output_dir, "eval": "null", "save_every": 50}
    launcher = ("--nproc_per_node", "2")
    process = tune.start(*training(**keys, num_steps=50, launcher=launcher))
    try:
        wait_for(lambda: 1 in steps(output_dir), process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert_no_orphans(process)
    finally:
        kill_group(process)
    last = max(steps(output_dir))
    assert out.count(f"stopped after step {last}; go on with resume=true") == 1
    assert "Traceback" not in err
    assert checkpoint.last_whole(output_dir) == output_dir / f"step_{last}"
    assert process.returncode == 128 + signal.SIGINT


# ---- what a run writes and prints


def test_console_has_one_line_for_each_step_and_no_banners(straight):
    assert straight.done.stderr == ""
    lines = straight.done.stdout.splitlines()
    found = [match[1] for line in lines if (match := STEP.fullmatch(line))]
    assert found == ["1", "2", "3", "4"]
    evaluated = [match[1] for line in lines if (match := EVALUATION.fullmatch(line))]
    assert evaluated == ["0", "2", "4"]
    odd = [
        line
        for line in lines
        if not any(p.fullmatch(line) for p in (STEP, WARM_START, EVALUATION))
        and NOTHING_LEARNT not in line
    ]
    assert odd == []


def documented():
    """Metrics that recipes/grpo_agentic.md has a row for."""
    text = (ROOT / "recipes/grpo_agentic.md").read_text().partition("## Metrics")[2]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    groups = {name.partition("/")[0] for name in names}
    return names, groups


def test_metrics_are_those_of_the_documentation(straight):
    names, _ = documented()
    free = [re.compile(name.replace("*", ".+")) for name in names if "*" in name]
    by_step = [row for row in rows(straight.output_dir) if "time/step_s" in row]
    assert [row["step"] for row in by_step] == [1, 2, 3, 4]
    for row in by_step:
        missing = [
            name
            for name in names - row.keys()
            if "*" not in name
            # components of checkers and of experts that this run does not have
            and not re.match(r"reward/(writes|reads|db|safe|ungated|mean_)", name)
            and not re.match(r"eval/|moe/|mismatch/route|sync/|engine/|grad/", name)
        ]
        assert missing == []
        # the breakdown's components are the checker's own
        undocumented = [
            name
            for name in row.keys() - names - {"step", "policy/logprob_gain_positive"}
            if not any(pattern.fullmatch(name) for pattern in free)
        ]
        assert undocumented == []


def test_csv_holds_what_jsonl_holds(straight):
    with (straight.output_dir / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    found = read_metrics(straight.output_dir / "metrics.jsonl")
    assert len(table) == len(found)
    for cells, row in zip(table, found, strict=True):
        assert {k: float(v) for k, v in cells.items() if v} == row


def test_the_policy_moves_where_rewards_differ(straight):
    before = weights(straight.output_dir / "step_2")
    after = weights(straight.output_dir / "step_4")
    assert all(not torch.equal(before[name], after[name]) for name in before)
    for row in rows(straight.output_dir):
        if row.get("pack/trained_tokens"):
            assert row["policy/logprob_gain"] != 0
            assert row["mismatch/kl"] < 1e-6  # one module samples and trains
            assert row["train/grad_norm"] > 0
            assert row["pack/saving"] < 1
    first = next(row for row in rows(straight.output_dir) if row.get("pack/trained_tokens"))
    assert first["loss/kl"] == 0  # the reference is the policy itself
    # AdamW's first step goes along the gradient; in later ones earlier batches have a say.
    assert first["policy/logprob_gain"] > 0
    assert sum(row.get("policy/logprob_gain", 0.0) for row in rows(straight.output_dir)) > 0.02
    assert len([row for row in rows(straight.output_dir) if row.get("pack/trained_tokens")]) >= 2


def test_rollouts_are_recorded_whole(straight):
    records = list(read_rollouts(straight.output_dir / "rollouts.jsonl"))
    ids = [record.rollout.spec.rollout_id for record in records]
    assert len(set(ids)) == len(ids) == 4 * 2 * 3 + 3
    assert [record.step for record in records] == sorted(record.step for record in records)
    by_row = {row["step"]: row for row in rows(straight.output_dir) if "time/step_s" in row}
    for step, row in by_row.items():
        trained = [
            record.rollout
            for record in records
            if record.rollout.spec.rollout_id.startswith(f"train/{step}/")
        ]
        assert len(trained) == 6
        rewards = [rollout.reward for rollout in trained]
        assert sum(rewards) / 6 == pytest.approx(row["reward/mean"])
        assert len({rollout.spec.seed for rollout in trained}) == 6
        assert len({rollout.spec.env_seed for rollout in trained}) == 2
        # sampled by the policy of the step before
        assert {r.policy_version for r in records if r.rollout in trained} == {step - 1}


def test_the_evaluations_trials_have_starts_of_their_own(straight):
    """Those of any evaluation of these tasks under this seed, so that checkpoints are paired."""
    records = read_rollouts(straight.output_dir / "rollouts.jsonl")
    found = [r.rollout.spec for r in records if r.rollout.spec.rollout_id.startswith("eval/")]
    tasks = [(spec.domain, spec.task_id) for spec in sorted(found, key=lambda spec: spec.group)]
    elsewhere = trial_specs(tasks[::-1], group_size=1, seed=42, phase="eval")
    assert len(found) == 3
    assert {spec.task_id: spec.env_seed for spec in found} == {
        spec.task_id: spec.env_seed for spec in elsewhere
    }


def test_tasks_come_in_another_order_each_epoch_and_none_is_official(straight):
    tasks = [
        record.rollout.spec.task_id
        for record in read_rollouts(straight.output_dir / "rollouts.jsonl")
        if record.rollout.spec.rollout_id.startswith("train/")
    ]
    assert len(dict.fromkeys(tasks)) == 8
    assert not [task for task in tasks if task == "create_task_1"]


def test_configuration_and_versions_are_written(straight):
    from omegaconf import OmegaConf

    cfg = OmegaConf.load(straight.output_dir / "config.yaml")
    assert cfg.rollout.group_size == 3
    assert cfg.optimizer._component_ == "torch.optim.AdamW"
    assert cfg.checkpoints.keep_last == 1  # a default that the config leaves out
    versions = json.loads((straight.output_dir / "versions.json").read_text())
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["torchtune"] == "0.6.1"
    assert json.loads((straight.output_dir / "run.json").read_text()) == {"recipe": "grpo_agentic"}


def test_the_picture_is_a_picture(straight):
    from PIL import Image

    with Image.open(straight.output_dir / "run.png") as image:
        image.verify()
        assert image.format == "PNG"
        assert min(image.size) > 400


@pytest.mark.parametrize("step", [2, 4])
def test_saved_directories_load_in_transformers(straight, step):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = straight.output_dir / f"step_{step}"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("Please create a task.<|im_end|>").input_ids])
    ours = smollm2(folder, dtype=torch.float32)
    if step == 4:  # what is written is what was trained
        trained = checkpoint.load(folder).weights
        assert trained.keys() == dict(ours.named_parameters()).keys()
        assert all(torch.equal(p, trained[name]) for name, p in ours.named_parameters())
    from components.attention.plan import MaskPlan

    with torch.no_grad():
        expected = theirs(ids).logits[0]
        length = ids.shape[1]
        found = ours(ids, mask=MaskPlan.causal(length), input_pos=torch.arange(length)[None])
    assert torch.allclose(found.reshape(expected.shape), expected, atol=1e-4)


def test_only_the_newest_checkpoint_keeps_what_resuming_needs(straight):
    assert checkpoint.is_whole(straight.output_dir / "step_4")
    assert not (straight.output_dir / "step_2/resume").exists()
    assert not list(straight.output_dir.glob("*.tmp"))


# ---- other ways to run


@pytest.fixture(scope="module")
def copied(tune, tmp_path_factory):
    """Recipe and config copied into a user's directory and run there; all rewards are equal."""
    here = tmp_path_factory.mktemp("user")
    tune.run("cp", "grpo_agentic", "my/recipe.py", "--make-parents", cwd=here)
    tune.run("cp", "mock", "my/mock.yaml", cwd=here)
    done = tune.train(
        "runs/mine",
        recipe="my/recipe.py",
        config="my/mock.yaml",
        cwd=here,
        num_steps=1,
        save_every=1,
        checker="tests.recipes.checkers.Constant",
        warm_start__num_steps=0,
        eval="null",
    )
    return here, done


def test_copies_run_from_a_users_directory(copied):
    here, done = copied
    assert (here / "my/recipe.py").read_text() == (ROOT / "recipes/grpo_agentic.py").read_text()
    assert steps(here / "runs/mine") == [1]
    assert checkpoint.is_whole(here / "runs/mine/step_1")
    assert done.stderr == ""


def test_a_run_without_variance_says_so_and_changes_nothing(copied, tune):
    here, done = copied
    (row,) = rows(here / "runs/mine")
    assert row["group/zero_std_frac"] == 1
    assert row["pack/trained_tokens"] == 0
    assert NOTHING_LEARNT in " ".join(done.stdout.split())
    assert "nan" not in done.stdout
    assert same_weights(here / "runs/mine/step_1", tune.model_dir)


def test_lora_in_bf16_trains_adapters_and_saves_a_merged_model(tune, tmp_path):
    done = tune.train(
        tmp_path / "run",
        num_steps=1,
        save_every=1,
        dtype="bf16",
        eval="null",
        warm_start__num_steps=0,
        model="components.models.smollm2.lora_smollm2",
        model__lora_rank=4,
        model__lora_alpha=8,
        model__lora_modules="[q_proj, v_proj]",
        optimizer__lr=0.01,
    )
    slow = "dtype: bf16: this CPU has no products in bf16; fp32 or auto is many times faster\n"
    assert done.stderr == ("" if multiplies_bf16() else slow)
    (row,) = rows(tmp_path / "run")
    assert row["policy/logprob_gain"] > 0
    folder = tmp_path / "run/step_1"
    trained = checkpoint.load(folder).weights
    assert {name.split(".")[-2] for name in trained} == {"lora_a", "lora_b"}
    assert len(trained) == 2 * 2 * 2
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.bfloat16
    before, after = weights(tune.model_dir), theirs.state_dict()
    moved = {
        name for name in before if not torch.equal(before[name].to(torch.bfloat16), after[name])
    }
    assert moved == {
        f"model.layers.{i}.self_attn.{name}.weight" for i in (0, 1) for name in ("q_proj", "v_proj")
    }


@pytest.mark.slow
def test_two_ranks_write_one_set_of_outputs(tune, tmp_path):
    done = tune.train(
        tmp_path / "run",
        launcher=["--nproc_per_node", "2"],
        num_steps=1,
        save_every=1,
        eval="null",
        warm_start__num_steps=0,
        rollout__num_workers=2,
    )
    assert len([line for line in done.stdout.splitlines() if line.startswith("step ")]) == 1
    (row,) = rows(tmp_path / "run")
    assert row["policy/logprob_gain"] > 0
    assert row["mismatch/kl"] < 1e-6  # the engine's copy has the weights of the shards
    records = list(read_rollouts(tmp_path / "run/rollouts.jsonl"))
    assert {(r.rollout.spec.group, r.rollout.spec.member) for r in records} == {
        (group, member) for group in (0, 1) for member in (0, 1, 2)
    }
    folder = tmp_path / "run/step_1"
    assert checkpoint.is_whole(folder)
    ours = smollm2(folder, dtype=torch.float32)
    trained = checkpoint.load(folder).weights
    assert all(torch.equal(p, trained[name]) for name, p in ours.named_parameters())
    assert not same_weights(folder, tune.model_dir)


def test_counters_of_a_rollout_agree_with_its_turns(straight):
    for record in read_rollouts(straight.output_dir / "rollouts.jsonl"):
        rollout = record.rollout
        assert rollout.stats["turns"] == len(rollout.turns) > 0
        assert rollout.stats["sampled_tokens"] == sum(end - start for start, end in rollout.turns)
