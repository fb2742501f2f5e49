"""The ids of Gymnasium, and the command that checks one."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import components.envs
from components.envs.ids import SETTINGS

ROOT = Path(__file__).parents[3]


def test_every_domain_has_an_id_and_makes():
    assert components.envs.register() == tuple(SETTINGS)
    for name, settings in SETTINGS.items():
        env = gymnasium.make(f"components.envs.ids:{name}", disable_env_checker=True, max_steps=9)
        assert env.unwrapped.domain == settings["domain"]
        _, info = env.reset(seed=0)
        assert ("<ticket>" in info["system_prompt"]) == settings.get("solo", False)
        env.close()


def test_ids_are_known_after_one_import_and_tau2_only_when_made():
    script = """
import sys, components.envs, components.envs.base
assert "gymnasium" not in sys.modules
import gymnasium, components.envs.ids
env = gymnasium.spec("sinkflex/tau2-telecom-solo-v0")
assert env.kwargs == {"domain": "telecom", "solo": True}, env.kwargs
assert "tau2" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


check = runpy.run_path(str(ROOT / "tools/check_env.py"))["main"]


def test_check_env_names_an_unknown_id(capsys):
    assert check(["sinkflex/tau2-retial-v0"]) == 1
    out, err = capsys.readouterr()
    assert "Did you mean: `tau2-retail`?" in err
    assert out == ""


@pytest.mark.tau2
@pytest.mark.parametrize("name", SETTINGS)
def test_every_environment_passes_both_checkers(name, capsys):
    assert check([name]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "gymnasium.utils.env_checker",
        "components.envs.check",
    ]


def test_mock_passes_both_checkers(capsys):
    assert check(["sinkflex/tau2-mock-solo-v0", "--task", "create_task_1"]) == 0
    assert capsys.readouterr().out.count("passes") == 2


@pytest.mark.slow
def test_the_benchmark_reaches_its_goals(tmp_path):
    command = [sys.executable, "tools/bench_envs.py", "--quick", "--json", "figures.json"]
    subprocess.run(
        [command[0], str(ROOT / command[1]), *command[2:]], check=True, cwd=tmp_path, timeout=180
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures) == [
        "retail_reset_ratio",
        "evaluation_ratio",
        "telecom_reset_ratio",
        "episodes_per_s_1",
        "episodes_per_s_2",
        "rss_mb_256_retail",
    ]
    assert figures["retail_reset_ratio"] >= 10
    assert figures["evaluation_ratio"] >= 5
    assert figures["telecom_reset_ratio"] >= 50
    assert figures["rss_mb_256_retail"] < 600
