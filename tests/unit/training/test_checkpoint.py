"""Checkpoints are whole or absent, whatever interrupts the writing."""

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from components.training import checkpoint
from components.training.checkpoint import MANIFEST, ResumeState
from components.training.parallelize import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def resume_state(step, *, reference=False):
    generator = torch.Generator().manual_seed(step)
    weights = {"a": torch.randn(4, 3, generator=generator), "b": torch.full((2,), float(step))}
    return ResumeState(
        weights=weights,
        optimizer={"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": []},
        reference={"a": torch.ones(4, 3)} if reference else {},
        state={"step": step, "loader": {"index": 3}, "seed": 1},
    )


def write_model(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"x" * 5000)


def save(folder, step, *, keep=1, save_model=write_model, **settings):
    return checkpoint.save(
        folder,
        step,
        resume_state(step, **settings),
        save_model=save_model,
        world=ALONE,
        keep_resume_states=keep,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("reference", [False, True])
def test_what_is_saved_comes_back(tmp_path, reference):
    path = save(tmp_path, 2, reference=reference)
    assert names(tmp_path) == ["step_2"]
    assert checkpoint.last_whole(tmp_path) == path
    found, wanted = checkpoint.load(path), resume_state(2, reference=reference)
    assert found.state == wanted.state
    for tensors in ("weights", "reference"):
        left, right = getattr(found, tensors), getattr(wanted, tensors)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert found.optimizer["state"][0]["step"] == 2.0


def test_the_newest_whole_checkpoint_is_found_by_number_not_by_name(tmp_path):
    for step in (2, 9, 10):
        save(tmp_path, step, keep=0)
    assert checkpoint.last_whole(tmp_path).name == "step_10"


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    assert checkpoint.last_whole(tmp_path) is None
    assert checkpoint.last_whole(tmp_path / "absent") is None


def cut_file(path):
    os.truncate(path / "resume/optimizer.pt", 10)


def remove_file(path):
    (path / "resume/weights.safetensors").unlink()


def remove_model(path):
    (path / "model.safetensors").unlink()


def remove_manifest(path):
    (path / MANIFEST).unlink()


def cut_manifest(path):
    os.truncate(path / MANIFEST, (path / MANIFEST).stat().st_size // 2)


def empty_manifest(path):
    os.truncate(path / MANIFEST, 0)


def still_being_written(path):
    path.rename(path.with_name(path.name + ".tmp"))


@pytest.mark.parametrize(
    ("tear", "said"),
    [
        (cut_file, "step_4 is not whole: ignored"),
        (remove_file, "step_4 is not whole: ignored"),
        (remove_model, "step_4 is not whole: ignored"),
        (remove_manifest, "step_4 is not whole: ignored"),
        (cut_manifest, "step_4 is not whole: ignored"),
        (empty_manifest, "step_4 is not whole: ignored"),
        (still_being_written, "step_4.tmp was being written when the run stopped: ignored"),
    ],
)
def test_a_torn_checkpoint_is_ignored_and_named(tmp_path, caplog, tear, said):
    save(tmp_path, 2, keep=0)
    tear(save(tmp_path, 4, keep=0))
    with caplog.at_level(logging.WARNING):
        found = checkpoint.last_whole(tmp_path)
    assert found == tmp_path / "step_2"
    assert checkpoint.load(found).state["step"] == 2
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize("tear", [cut_file, remove_manifest, still_being_written])
def test_a_torn_checkpoint_is_written_again_in_place(tmp_path, tear):
    save(tmp_path, 2, keep=0)
    tear(save(tmp_path, 4, keep=0))
    save(tmp_path, 4, keep=0)
    assert names(tmp_path) == ["step_2", "step_4"]
    assert checkpoint.last_whole(tmp_path).name == "step_4"


def test_older_checkpoints_keep_the_model_and_are_not_resumed_from(tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert names(tmp_path / "step_1") == ["config.json", "model.safetensors"]
    for step in (2, 3):
        assert names(tmp_path / f"step_{step}") == [
            "config.json",
            MANIFEST,
            "model.safetensors",
            "resume",
        ]
    shutil.rmtree(tmp_path / "step_2")
    shutil.rmtree(tmp_path / "step_3")
    assert checkpoint.last_whole(tmp_path) is None
    assert not caplog.records  # dropping a resume state is no damage


def test_zero_keeps_every_resume_state(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=0)
    assert all(checkpoint.is_whole(tmp_path / f"step_{step}") for step in (1, 2, 3))


def test_a_torn_newer_checkpoint_does_not_push_out_the_one_just_written(tmp_path):
    save(tmp_path, 2)
    cut_file(save(tmp_path, 4, keep=0))
    save(tmp_path, 3)
    assert checkpoint.last_whole(tmp_path).name == "step_3"


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_half_a_model(path):
    """As save_hf does: into a directory beside the target, then a full disk."""
    beside = path.with_name(path.name + ".tmp")
    write_model(beside)
    full_disk()


def assert_only_step_2_is_left(folder, before):
    assert names(folder) == ["step_2"]
    assert files(folder / "step_2") == before
    assert checkpoint.last_whole(folder).name == "step_2"


def test_a_full_disk_while_the_model_is_written(tmp_path):
    before = files(save(tmp_path, 2))
    with pytest.raises(OSError, match="No space left on device") as caught:
        save(tmp_path, 4, save_model=write_half_a_model)
    assert caught.value.errno == errno.ENOSPC
    assert "(while writing step_4; the last whole checkpoint is step_2)" in str(caught.value)
    assert_only_step_2_is_left(tmp_path, before)


@pytest.mark.parametrize("function", ["torch.save", "safetensors.torch.save_file"])
def test_a_full_disk_while_the_resume_state_is_written(tmp_path, monkeypatch, function):
    before = files(save(tmp_path, 2))
    monkeypatch.setattr(function, full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path, 4)
    assert_only_step_2_is_left(tmp_path, before)


@pytest.mark.parametrize("limit", [4_000, 20_000, 60_000])
def test_writes_that_really_fail(tmp_path, limit):
    """A limit on file sizes: in the model, in torch.save and in safetensors, with their own errors.

    Neither of the two raises an OSError.
    """
    before = files(save(tmp_path, 2))
    state = resume_state(4)
    large = ResumeState(
        weights={"a": torch.zeros(12_000 if limit == 20_000 else 40_000)},
        optimizer={"a": torch.zeros(10_000)},
        reference={},
        state=state.state,
    )
    if limit == 60_000:  # weights fit, the optimizer does not
        large.weights["a"] = torch.zeros(10)
        large.optimizer["a"] = torch.zeros(40_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"File too large \(while writing step_4; ") as caught:
            checkpoint.save(tmp_path, 4, large, save_model=write_model, world=ALONE)
        assert caught.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_only_step_2_is_left(tmp_path, before)


def test_ctrl_c_while_saving_leaves_nothing_torn(tmp_path):
    before = files(save(tmp_path, 2))

    def interrupted(path):
        write_model(path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4, save_model=interrupted)
    assert_only_step_2_is_left(tmp_path, before)


def test_killed_while_saving(tmp_path):
    """SIGKILL after the model is written, before the resume state is: nothing can clean up."""
    save(tmp_path, 2)
    code = """
        import os, signal, sys
        from pathlib import Path
        from tests.unit.training import test_checkpoint as t
        def killed(path):
            t.write_model(path)
            os.kill(os.getpid(), signal.SIGKILL)
        t.save(Path(sys.argv[1]), 4, save_model=killed)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)])
    assert done.returncode == -9
    assert names(tmp_path) == ["step_2", "step_4.tmp"]
    assert checkpoint.last_whole(tmp_path).name == "step_2"
    save(tmp_path, 4)
    assert names(tmp_path) == ["step_2", "step_4"]


class TwoRanks(World):
    """The second of two ranks, seen from the outside: what the first said is put in."""

    def gather(self, items):
        return [(errno.ENOSPC, "disk full"), *items]


def test_a_failure_on_the_main_rank_is_raised_on_every_rank(tmp_path):
    world = TwoRanks(rank=1, size=2, device=torch.device("cpu"))
    with pytest.raises(OSError, match=r"disk full .*no checkpoint is whole"):
        checkpoint.save(tmp_path, 4, resume_state(4), save_model=write_model, world=world)
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("shape"), ValueError("no such tensor")])
def test_what_is_no_failed_write_passes_as_it_is(tmp_path, error):
    before = files(save(tmp_path, 2))

    def broken(path):
        write_model(path)
        raise error

    with pytest.raises(type(error)) as caught:
        save(tmp_path, 4, save_model=broken)
    assert caught.value is error
    assert_only_step_2_is_left(tmp_path, before)


def test_weights_are_refused_by_name_and_shape():
    params = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(3))}
    with pytest.raises(ValueError, match=r"1 trainable tensors differ.*: b"):
        checkpoint.load_weights(params.items(), {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"b is \(2,\), the model's is \(3,\)"):
        checkpoint.load_weights(params.items(), {"a": torch.ones(2), "b": torch.ones(2)})
    checkpoint.load_weights(params.items(), {"a": torch.ones(2), "b": torch.full((3,), 2.0)})
    assert params["a"].tolist() == [1, 1]
    assert params["b"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    ],
)
def test_an_optimizer_goes_on_bitwise(tmp_path, make):
    """Four steps at once equal two, a checkpoint, and two with a fresh optimizer."""

    def train(weights, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            torch.manual_seed(step)
            sum((w * torch.randn_like(w)).sum() + (w**3).sum() for w in weights).backward()
            optimizer.step()

    def fresh():
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(()))]
        return weights, make(weights)

    straight, optimizer = fresh()
    train(straight, optimizer, range(4))
    weights, optimizer = fresh()
    train(weights, optimizer, range(2))
    state = ResumeState(
        weights={str(i): w.detach() for i, w in enumerate(weights)},
        optimizer=checkpoint.full_optimizer_state(optimizer),
        reference={},
        state={"step": 2},
    )
    path = checkpoint.save(tmp_path, 2, state, save_model=write_model, world=ALONE)
    resumed, optimizer = fresh()
    found = checkpoint.load(path)
    checkpoint.load_weights(((str(i), w) for i, w in enumerate(resumed)), found.weights)
    checkpoint.load_optimizer_state(optimizer, found.optimizer)
    train(resumed, optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(resumed, straight, strict=True))
