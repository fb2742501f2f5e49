"""The study of tools/learning_study.py with the recipes themselves and a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.recipes.runs import ROOT

pytestmark = [pytest.mark.model, pytest.mark.slow]

# A random model gets nothing, so nothing is what its warm start has to reach.
DRIVER = """
import sys
from tools import learning_study as study

study.LOW, study.SEEDS = 0.0, (0,)
study.SETS = {{"held_out": "dialogue_held_out:1:3", "official": "official"}}
study.VALIDATION = "dialogue_held_out:2:2"
folder = {folder!r}
study.SFT, study.EVAL = f"{{folder}}/mock_learn_sft.yaml", f"{{folder}}/mock_learn_eval.yaml"
grpo = f"{{folder}}/mock_learn.yaml"
study.ARMS = {{
    name: (recipe, study.SFT if name == "sft" else grpo, settings)
    for name, (recipe, _, settings) in study.ARMS.items()
}}
sys.exit(study.main())
"""
SMALLER = {
    "mock_learn": {"tasks_per_step": 1, "rollout.group_size": 3},
    "mock_learn_sft": {"num_steps": 2, "save_every": 1, "demonstrations_per_step": 2},
    "mock_learn_eval": {},
}


def smaller_configs(folder):
    for name, settings in SMALLER.items():
        config = yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text(encoding="utf-8"))
        config |= {"device": "cpu", "dtype": "fp32"}
        config["rollout"] |= {"max_turns": 4, "max_turn_tokens": 24, "num_workers": 3}
        for path, value in settings.items():
            section, _, key = path.rpartition(".")
            (config[section] if section else config)[key] = value
        for part in (config["env"], config["dataset"]):
            part["tasks"] = part["tasks"].replace(":7:256", ":7:8")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def test_every_arm_is_trained_for_its_time_and_evaluated(tmp_path, tiny_model_dir):
    smaller_configs(tmp_path)
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(folder=str(tmp_path)), encoding="utf-8")
    results, runs = tmp_path / "results/mock_learn", tmp_path / "runs"
    where = ["--runs", str(runs), "--results", str(results), "--model", str(tiny_model_dir)]
    done = subprocess.run(
        [sys.executable, str(driver), "--minutes", "0.2", "--trials", "1", *where],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    warm = json.loads((results / "warm_start.json").read_text(encoding="utf-8"))
    assert warm["step"] == 1
    for arm in ("grpo", "sft", "reinforce"):
        found = json.loads((results / f"{arm}_0.json").read_text(encoding="utf-8"))
        assert found["train"]["steps"] >= 1
        assert found["train"]["training_s"] < 40  # 12, and a step that took long
        assert len(found["curve"]) >= found["train"]["steps"]
        assert len(found["evals"]["held_out"]["tasks"]) == 3
        assert len(found["evals"]["official"]["tasks"]) == 9
        config = yaml.safe_load((runs / f"{arm}_0/config.yaml").read_text(encoding="utf-8"))
        assert config["model_dir"] == str(runs / "warm/step_1")
    config = yaml.safe_load((runs / "reinforce_0/config.yaml").read_text(encoding="utf-8"))
    assert config["advantages"]["baseline"] == "none"
    whole = json.loads((results.parent / "mock_learn.json").read_text(encoding="utf-8"))
    assert whole["seeds"] == [0]
    assert set(whole["sets"]["official"]["comparison"]) == {"grpo-sft", "grpo-reinforce"}
