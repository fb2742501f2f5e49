"""Configs in folders, as in ``configs/gpt_oss/``: found, listed and copied as the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.training import shipped
from components.training.config import find_config

ROOT = Path(__file__).parents[2]
NAMES = ("gpt_oss/120b_retail", "gpt_oss/20b_retail", "gpt_oss/tiny_mock")


def tune(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "components.cli", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", NAMES)
def test_by_name_and_by_path(name, monkeypatch, tmp_path):
    file = ROOT / "configs" / f"{name}.yaml"
    assert shipped.configs()[name] == file
    assert find_config(str(file)) == file
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == file


def test_ls_and_cp(tmp_path):
    listed = {word for line in tune("ls").stdout.splitlines() for word in line.split()}
    assert set(NAMES) <= listed
    for name in NAMES:
        done = tune("cp", name, f"{name}.yaml", "--make-parents", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        copied = (tmp_path / f"{name}.yaml").read_bytes()
        assert copied == (ROOT / "configs" / f"{name}.yaml").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_how_to_run_it_and_on_what(name):
    text = shipped.configs()[name].read_text(encoding="utf-8")
    header = text.partition("\nrecipe:")[0]
    assert f"tune run recipes/grpo_agentic.py --config configs/{name}.yaml" in header
    assert "Hardware" in header
    plain = yaml.safe_load(text)
    assert plain["renderer"]["_component_"] == "components.chat.harmony.HarmonyRenderer"
    assert (
        plain["output_dir"]
        != yaml.safe_load((ROOT / "configs/retail.yaml").read_text())["output_dir"]
    )
