from pathlib import Path

import pytest

from components.models.paths import model_dir, sinkflex_home


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SINKFLEX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_a_name_is_found_in_the_cache_from_anywhere(home):
    made = make(home / "models" / "tiny")
    assert model_dir("tiny") == made


def test_a_path_is_taken_as_it_is(home, tmp_path):
    made = make(tmp_path / "some" / "model")
    assert model_dir(made) == made
    assert model_dir("some/model") == made


def test_the_default_home_is_in_the_users_cache(monkeypatch):
    monkeypatch.delenv("SINKFLEX_HOME", raising=False)
    assert sinkflex_home() == Path.home() / ".cache" / "sinkflex"


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "/nowhere/at/all", "no/such/model"])
def test_a_missing_model_names_the_command_and_the_place(home, name):
    with pytest.raises(FileNotFoundError) as error:
        model_dir(name)
    assert "python tools/get_model.py" in str(error.value)
    looked = home / "models" / name if "/" not in name else Path(name).absolute()
    assert str(looked) in str(error.value)


def test_a_directory_without_config_is_not_a_model(home):
    (home / "models" / "half").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"half has no config\.json"):
        model_dir("half")
