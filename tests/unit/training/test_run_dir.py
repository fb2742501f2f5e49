"""One directory, one run: what is refused, and that a refusal touches nothing."""

import errno
import json
import os

import pytest
import torch
import yaml

from components.training import run_dir
from components.training.parallelize import World


def claim(path, **settings):
    return run_dir.claim(path, **({"resume": False, "recipe": "grpo"} | settings))


def names(path):
    return sorted(p.name for p in path.iterdir())


@pytest.mark.parametrize("made_before", [False, True])
def test_a_new_or_empty_directory_is_claimed(tmp_path, made_before):
    path = tmp_path / "a/b"
    if made_before:
        path.mkdir(parents=True)
    assert claim(path) == path
    assert names(path) == ["run.json"]
    assert json.loads((path / "run.json").read_text()) == {"recipe": "grpo"}


def test_a_check_writes_nothing(tmp_path):
    path = run_dir.check(tmp_path / "a/b", resume=False, recipe="grpo")
    assert path == tmp_path / "a/b"
    assert names(tmp_path) == []


def test_a_check_sees_what_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ValueError, match=f"/a/b cannot be written: Permission denied: {tmp_path}"):
        run_dir.check(tmp_path / "a/b", resume=False, recipe="grpo")


def test_relative_and_home_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert claim("runs/x") == tmp_path / "runs/x"
    assert claim("~/runs/x") == tmp_path / "home/runs/x"


def test_a_second_run_is_refused_and_told_what_to_do(tmp_path):
    claim(tmp_path / "run")
    with pytest.raises(ValueError, match=r"already holds a run of grpo.*resume=true"):
        claim(tmp_path / "run")
    assert claim(tmp_path / "run", resume=True) == tmp_path / "run"
    with pytest.raises(ValueError, match="holds a run of grpo, not of evaluation"):
        claim(tmp_path / "run", resume=True, recipe="evaluation")


@pytest.mark.parametrize("resume", [False, True])
def test_foreign_files_are_left_alone(tmp_path, resume):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="not empty and holds no run of ours"):
        claim(tmp_path, resume=resume)
    assert names(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"name": "x"}'])
@pytest.mark.parametrize("resume", [False, True])
def test_a_foreign_run_json_is_refused(tmp_path, text, resume):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"output_dir: .*run\.json was not written by a run of"):
        claim(tmp_path, resume=resume)
    assert (tmp_path / "run.json").read_text() == text
    assert names(tmp_path) == ["run.json"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file, not a directory"):
        claim(tmp_path / "file")
    with pytest.raises(ValueError, match=r"cannot be written: Not a directory: .*/file"):
        claim(tmp_path / "file/deeper/run")


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(ValueError, match=r"output_dir: .*/run cannot be written: Read-only"):
        claim(tmp_path / "run")


SETTINGS = {"resume": False, "recipe": "grpo", "config_yaml": "seed: 1\n"}


class SecondOfTwo(World):
    def gather(self, items):
        assert not items  # it has claimed nothing itself
        return ["output_dir: no"] if self.device.type == "meta" else []


def test_other_ranks_hear_of_a_refusal_and_claim_nothing(tmp_path):
    refused = SecondOfTwo(rank=1, size=2, device=torch.device("meta"))
    with pytest.raises(ValueError, match="output_dir: no"):
        run_dir.claim_together(tmp_path / "run", refused, **SETTINGS)
    accepted = SecondOfTwo(rank=1, size=2, device=torch.device("cpu"))
    path = run_dir.claim_together(tmp_path / "run", accepted, **SETTINGS)
    assert path == tmp_path / "run"
    assert not path.exists()


def test_the_main_rank_claims(tmp_path):
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    path = run_dir.claim_together(tmp_path / "run", alone, **SETTINGS)
    assert names(path) == ["config.yaml", "run.json", "versions.json"]
    with pytest.raises(ValueError, match="already holds a run"):
        run_dir.claim_together(tmp_path / "run", alone, **SETTINGS)


def test_configuration_and_versions_are_described(tmp_path):
    run_dir.describe(tmp_path, "seed: 1\n")
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert set(versions) == {*run_dir.PACKAGES, "python"} - {"tau2"}
    assert versions["torchtune"] == "0.6.1"
    assert names(tmp_path) == ["config.yaml", "versions.json"]


def test_a_resumed_run_keeps_the_configuration_it_had(tmp_path):
    for text in ("seed: 1\n", "seed: 1\n", "seed: 2\n", "seed: 3\n"):
        run_dir.describe(tmp_path, text)
    texts = {path.name: path.read_text() for path in tmp_path.glob("*.yaml")}
    assert texts == {
        "config.1.yaml": "seed: 1\n",
        "config.2.yaml": "seed: 2\n",
        "config.yaml": "seed: 3\n",
    }


def test_settings_that_a_resume_changes_are_named(tmp_path):
    before = {"num_steps": 2, "loss": {"beta": 0.0, "eps": [1, 2]}, "gone": 1, "eval": {"every": 1}}
    assert run_dir.changed_settings(tmp_path, before) == []  # nothing is known
    run_dir.describe(tmp_path, yaml.safe_dump(before, sort_keys=False))
    assert run_dir.changed_settings(tmp_path, before) == []
    now = {"num_steps": 4, "loss": {"beta": 0.1, "eps": [1, 2], "new": None}, "eval": {"every": 2}}
    assert run_dir.changed_settings(tmp_path, now) == [
        "loss.beta was 0.0, is 0.1",
        "gone was 1, is not set",
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_full_disk_is_one_clear_line(tmp_path, capsys, number):
    with pytest.raises(SystemExit) as caught, run_dir.disk_errors(tmp_path):
        raise OSError(number, f"{os.strerror(number)} (while writing step_4)")
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path} cannot be written: {os.strerror(number)} (while writing")
    assert "resume=true" in line


def test_other_errors_pass(tmp_path):
    with pytest.raises(ConnectionError), run_dir.disk_errors(tmp_path):
        raise ConnectionError("worker")
    with run_dir.disk_errors(tmp_path):
        pass
