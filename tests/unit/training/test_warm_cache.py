"""Cached warm starts: found again when nothing changed, never when something did."""

import resource
import shutil
import signal

import pytest
import torch

from components.training import warm_cache
from components.training.warm_cache import cache_file, cache_key, read_cache, write_cache

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(50_000)}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SINKFLEX_HOME", str(tmp_path / "home"))


def settings(**changed):
    return {name: name for name in (*warm_cache.SETTINGS, "num_steps", "loss")} | changed


def place(folder, *, device="cpu", num_ranks=1, **changed):
    return cache_file(
        cache_key(settings(**changed), model_dir=folder, device=device), num_ranks=num_ranks
    )


def test_the_place_is_a_function_of_what_the_result_depends_on(model, tmp_path):
    first = place(model)
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert place(copy) == first  # what the files hold counts, not where they are
    assert place(model, num_steps=9, loss="x") == first  # of the training after it
    others = {place(model, **{name: "x"}) for name in warm_cache.SETTINGS}
    others |= {place(model, device="cuda"), place(model, num_ranks=2)}
    (copy / "model.safetensors").write_bytes(b"Weights")
    others.add(place(copy))
    assert len(others) == len(warm_cache.SETTINGS) + 3
    assert first not in others


def test_what_is_kept_is_found(model):
    path = place(model)
    assert read_cache(path) is None
    assert write_cache(path, WEIGHTS, {"x": 1}) == ""
    found = read_cache(path)
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".json", ".safetensors"]


def test_a_damaged_file_says_so(model):
    path = place(model)
    write_cache(path, WEIGHTS, {})
    path.write_bytes(path.read_bytes()[:1000])
    problem = read_cache(path)
    assert isinstance(problem, str)
    assert problem


def test_a_full_disk_costs_the_cache_only(model):
    path = place(model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        problem = write_cache(path, WEIGHTS, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert problem == "File too large"
    assert read_cache(path) is None
    assert list(path.parent.glob("*.tmp")) == []
