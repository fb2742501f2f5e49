"""Mistakes of a user: what is said, with which exit code, and what is left behind (nothing).

The command runs in this process, which has imported everything.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components import cli
from tests.recipes.runs import ROOT, training

pytestmark = pytest.mark.model


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, tiny_model_dir):
    """Runs the recipe; returns exit code and stderr. ``output_dir`` is tmp_path / "run"."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SINKFLEX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [str(Path(sys.executable).parent), *sys.path])

    def run(**keys):
        keys = {"model_dir": tiny_model_dir, "output_dir": tmp_path / "run", "num_steps": 1, **keys}
        monkeypatch.setattr(sys, "argv", ["tune", *training(**keys)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "step " not in out  # no compute was paid for
        return exit.value.code, err

    return run


def assert_nothing_left(tmp_path):
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rollout__grup_size": 4},
            "rollout.grup_size: unknown key; did you mean 'rollout.group_size'?",
        ),
        ({"group_size": 4}, "group_size: unknown key; did you mean 'rollout.group_size'?"),
        ({"num_steps": "four"}, "num_steps = 'four': must be an integer >= 0"),
        ({"num_steps": 1.5}, "num_steps = 1.5: must be an integer >= 0"),
        ({"resume": "yes_please"}, "resume = 'yes_please': must be true or false"),
        ({"rollout__temperature": 0}, "rollout.temperature = 0: must be a number > 0"),
        ({"rollout__group_size": 0}, "rollout.group_size = 0: must be an integer >= 1"),
        ({"keep_resume_states": 2}, "keep_resume_states: unknown key"),
        (
            {"checkpoints__export": "peft"},
            "checkpoints.export = 'peft': must be one of full, adapter",
        ),
        (
            {"checkpoints__export": "adapter"},
            "checkpoints.export: adapter: the model has no adapters; use full, or a lora_ model",
        ),
        (
            {"checkpoints__keep_best": "{metric: eval/official_mean}", "eval": "null"},
            "checkpoints.keep_best.metric = eval/official_mean: needs an evaluation, and eval is",
        ),
        (
            {"checkpoints__keep_best": "{metric: reward/mean, mode: most}"},
            "checkpoints.keep_best.mode = 'most': must be one of max, min",
        ),
        ({"dtype": "fp16"}, "dtype = 'fp16': must be one of auto, bf16, fp32"),
        (
            {"optimizer__lrr": 1},
            "optimizer.lrr: torch.optim.AdamW takes no 'lrr'; did you mean 'lr'?",
        ),
        (
            {"optimizer": "torch.optim.AdamV"},
            "optimizer._component_ = 'torch.optim.AdamV': 'torch.optim' has no 'AdamV'; did you "
            "mean 'Adam",
        ),
        (
            {"tokens_per_batch": 512},
            "rollout.max_tokens = 1024: must be at most tokens_per_batch = 512",
        ),
        (
            {"rollout__max_turn_tokens": 2000},
            "rollout.max_turn_tokens = 2000: must be at most rollout.max_tokens = 1024",
        ),
        (
            {"env__paraphrases": "held_out"},
            "env.paraphrases = held_out: these are for evaluation alone and never trained on",
        ),
        (
            {"tokens_per_batch": 7000},
            "tokens_per_batch = 7000: the rollouts of a step have 6144 tokens at most",
        ),
        (
            {"rollout__group_size": 1},
            "rollout.group_size = 1: an advantage compares rollouts of one task",
        ),
        (
            {"warm_start__max_tokens": 9000},
            "warm_start.max_tokens = 9000: must be at most tokens_per_batch = 6144",
        ),
    ],
)
def test_a_config_that_is_wrong_in_itself(run, tmp_path, keys, message):
    code, err = run(**keys)
    assert code == 2
    assert message in err
    assert_nothing_left(tmp_path)


def test_every_problem_is_named_at_once(run, tmp_path):
    _, err = run(num_steps=-1, rollout__group_size="x", seeed=3)
    assert "3 problems in the config" in err
    for name in ("num_steps = -1", "rollout.group_size = 'x'", "seeed: unknown key"):
        assert name in err
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("name", ["no_such_model", "/no/such/dir"])
def test_a_model_that_is_not_there(run, tmp_path, name):
    code, err = run(model_dir=name)
    assert code == 2
    assert f"model {name!r} not found" in err
    assert "tools/get_model.py" in err
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("setting", ["include", "exclude"])
def test_a_task_that_is_not_there(run, tmp_path, setting):
    code, err = run(**{f"dataset__{setting}": "[create_task_99]"})
    assert code == 2
    assert f"{setting}: task ids ['create_task_99'] are not in mock/train" in err
    assert_nothing_left(tmp_path)


def test_a_held_out_task_is_not_a_training_task(run, tmp_path):
    code, err = run(dataset__include="[create_task_1]")
    assert code == 2
    assert "task ids ['create_task_1'] are not in mock/train" in err
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss__eps_low": 1.5}, "eps_low = 1.5: must be in [0, 1)"),
        ({"loss__kl_estimator": "k4"}, "k4"),
        ({"rollout__max_tokens": 4096}, "rollout.max_tokens = 4096: the model's context is 2048"),
        ({"dataset__split": "tr4in"}, "tr4in"),
        ({"env__domain": "airlines"}, "airlines"),
        ({"env__paraphrases": "heldout"}, "paraphrases: 'heldout' is none of train, held_out"),
        ({"env__user": "scriptd"}, "user: 'scriptd' is neither 'scripted' nor a callable"),
        ({"dataset__exclude": "wrong_glod"}, "task ids ['wrong_glod'] are not in mock/train"),
        (
            {"checker": "components.safety.gate.SafetyGated"},
            "checks: 'S1' is not a check of domain 'mock' (allowed: S7, S12)",
        ),
        (
            {"checker": "components.safety.gate.SafetyGated", "checker__checks": "[S77]"},
            "checks: 'S77' is not a check of a safety gate",
        ),
    ],
)
def test_a_value_that_a_component_refuses(run, tmp_path, keys, message):
    code, err = run(**keys)
    assert code == 2
    assert message in err
    assert_nothing_left(tmp_path)


def test_a_context_that_the_prompt_does_not_fit(run, tmp_path):
    code, err = run(rollout__max_tokens=128, tokens_per_batch=768, warm_start__num_steps=0)
    assert code == 2
    assert re.search(
        r"max_tokens=128 is too small for task 'generated-\S+' of 'mock': its prompt has \d+ "
        r"tokens and one turn may take max_turn_tokens=32, together \d+",
        err,
    )
    assert_nothing_left(tmp_path)


def copy_with(tiny_model_dir, folder, change):
    folder.mkdir()
    for path in tiny_model_dir.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tiny_model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def drop(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)


def reshape(tensors):
    tensors["model.norm.weight"] = torch.zeros(63)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "1 missing: model.layers.1.mlp.up_proj.weight"),
        (add, "1 not in the model: model.layers.2.mlp.up_proj.weight"),
        (reshape, "1 of another shape: model.norm.weight [63], the model has [64]"),
    ],
)
def test_a_model_whose_tensors_do_not_fit(run, tmp_path, tiny_model_dir, change, message):
    folder = copy_with(tiny_model_dir, tmp_path / "model", change)
    code, err = run(model_dir=folder)
    assert code == 2
    assert str(folder) in err
    assert message in err
    assert_nothing_left(tmp_path)


def test_a_model_directory_without_weights(run, tmp_path, tiny_model_dir):
    folder = copy_with(tiny_model_dir, tmp_path / "model", drop)
    (folder / "model.safetensors").unlink()
    code, err = run(model_dir=folder)
    assert code == 2
    assert f"{folder} has no model.safetensors" in err
    assert_nothing_left(tmp_path)


def test_a_model_of_another_architecture(run, tmp_path, tiny_model_dir):
    folder = copy_with(tiny_model_dir, tmp_path / "model", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    code, err = run(model_dir=folder)
    assert code == 2
    assert "model_type is 'gpt2'; smollm2 builds 'llama' only" in err
    assert_nothing_left(tmp_path)


def test_an_output_directory_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("x")
    code, err = run(output_dir=tmp_path / "file/run")
    assert code == 2
    assert f"output_dir: {tmp_path}/file/run cannot be written: Not a directory" in err
    code, err = run(output_dir=tmp_path / "file")
    assert code == 2
    assert "is a file, not a directory" in err
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("resume", ["true", "false"])
def test_an_output_directory_with_foreign_files(run, tmp_path, resume):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("x")
    code, err = run(resume=resume)
    assert code == 2
    assert "is not empty and holds no run of ours" in err
    assert os.listdir(tmp_path / "run") == ["thesis.tex"]


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "already holds a run of grpo_agentic"),
        ({"resume": "true", "seed": 43}, "seed: 43, but"),
        (
            {"resume": "true", "model": "components.models.smollm2.lora_smollm2",
             "model__lora_rank": 2, "model__lora_alpha": 2, "model__lora_modules": "[q_proj]"},
            "another model, or other lora_modules?",
        ),
    ],
)  # fmt: skip
def test_a_directory_that_holds_another_run(run, straight, keys, message):
    before = contents(straight.output_dir)
    code, err = run(output_dir=straight.output_dir, **keys)
    assert code == 2
    assert message in err
    assert contents(straight.output_dir) == before
