"""Checkpoints are whole or absent, whatever interrupts the writing."""

import errno
import json
import logging
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from torch import nn

from components.training import checkpoint
from components.training.checkpoint import Checkpoints
from components.training.parallelize import World
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from components.training.resume_state import ResumeState, load_weights
from components.training.retention import MANIFEST, Best, Retention, best_steps

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
ONE = Retention(keep_last=1, keep_best=None, exports="all")


def resume_state(step, *, reference=False):
    generator = torch.Generator().manual_seed(step)
    tensors = {
        "weights/a": torch.randn(4, 3, generator=generator),
        "weights/b": torch.full((2,), float(step)),
        "optimizer/a/step": torch.tensor(float(step)),
    }
    if reference:
        tensors["reference/a"] = torch.ones(4, 3)
    facts = {"step": step, "loader": {"index": 3}, "seed": 1, "rng": [], "optimizer": {}}
    return ResumeState(tensors=tensors, facts=facts)


def write_model(path):
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"x" * 5000)


def save(folder, step, *, keep=1, write_model=write_model, best=None, exports="all", **settings):
    return checkpoint.write(
        folder,
        step,
        resume_state(step, **settings),
        write_model=write_model,
        retention=Retention(keep_last=keep, keep_best=best, exports=exports),
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
    assert found.state == wanted.facts
    for part in ("weights", "optimizer", "reference"):
        left, prefix = getattr(found, part), part + "/"
        right = {n[len(prefix) :]: t for n, t in wanted.tensors.items() if n.startswith(prefix)}
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_newest_whole_checkpoint_is_found_by_number_not_by_name(tmp_path):
    for step in (2, 9, 10):
        save(tmp_path, step, keep=0)
    assert checkpoint.last_whole(tmp_path).name == "step_10"


def test_nothing_is_found_where_there_is_nothing(tmp_path):
    assert checkpoint.last_whole(tmp_path) is None
    assert checkpoint.last_whole(tmp_path / "absent") is None


def ours(caplog):
    """What we logged; DCP has messages of its own."""
    return [r.getMessage() for r in caplog.records if r.name.startswith("components.")]


def cut_file(path):
    os.truncate(next(path.glob("resume/*.safetensors")), 10)


def remove_file(path):
    next(path.glob("resume/*.safetensors")).unlink()


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


def model_being_written(path):
    """``save_hf`` has a temporary name of its own."""
    path.rename(path.with_name(path.name + ".tmp.tmp"))


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
        (model_being_written, "step_4.tmp.tmp was being written when the run stopped: ignored"),
    ],
)
def test_a_torn_checkpoint_is_ignored_and_named(tmp_path, caplog, tear, said):
    save(tmp_path, 2, keep=0)
    tear(save(tmp_path, 4, keep=0))
    with caplog.at_level(logging.WARNING):
        found = checkpoint.last_whole(tmp_path)
    assert found == tmp_path / "step_2"
    assert checkpoint.load(found).state["step"] == 2
    assert ours(caplog) == [said]


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
    assert not ours(caplog)  # dropping a resume state is no damage


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
        save(tmp_path, 4, write_model=write_half_a_model)
    assert caught.value.errno == errno.ENOSPC
    assert "(while writing step_4; the last whole checkpoint is step_2)" in str(caught.value)
    assert_only_step_2_is_left(tmp_path, before)


@pytest.mark.parametrize("limit", [4_000, 20_000])
def test_writes_that_really_fail(tmp_path, limit):
    """A limit on file sizes: in the model, and in the resume state."""
    before = files(save(tmp_path, 2))
    state = resume_state(4)
    state.tensors["weights/a"] = torch.zeros(12_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"File too large \(while writing step_4; ") as caught:
            checkpoint.write(tmp_path, 4, state, write_model=write_model, retention=ONE)
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
        save(tmp_path, 4, write_model=interrupted)
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
        t.save(Path(sys.argv[1]), 4, write_model=killed)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)])
    assert done.returncode == -9
    assert names(tmp_path) == ["step_2", "step_4.tmp"]
    assert checkpoint.last_whole(tmp_path).name == "step_2"
    save(tmp_path, 4)
    assert names(tmp_path) == ["step_2", "step_4"]


@pytest.mark.parametrize("error", [RuntimeError("shape"), ValueError("no such tensor")])
def test_what_is_no_failed_write_passes_as_it_is(tmp_path, error):
    before = files(save(tmp_path, 2))

    def broken(path):
        write_model(path)
        raise error

    with pytest.raises(type(error)) as caught:
        save(tmp_path, 4, write_model=broken)
    assert caught.value is error
    assert_only_step_2_is_left(tmp_path, before)


def test_weights_are_refused_by_name_and_shape():
    params = {"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(3))}
    with pytest.raises(ValueError, match=r"1 trainable tensors differ.*: b"):
        load_weights(params.items(), {"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"b is \(2,\), the model's is \(3,\)"):
        load_weights(params.items(), {"a": torch.ones(2), "b": torch.ones(2)})
    load_weights(params.items(), {"a": torch.ones(2), "b": torch.full((3,), 2.0)})
    assert params["a"].tolist() == [1, 1]
    assert params["b"].tolist() == [2, 2, 2]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(3, 4))
        self.scalar = nn.Parameter(torch.randn(()))


class Run:
    """A model that is trained on draws from the global generators."""

    def __init__(self, make, *, beta=1):
        self.model = Small()
        self.masters = MasterWeights(self.model)
        self.optimizer = make(self.masters.parameters())
        self.reference = ReferencePolicy(self.model) if beta else None
        self.step = 0

    def train(self, to):
        while self.step < to:
            self.optimizer.zero_grad()
            noise = random.random() + float(np.random.rand())
            weights = self.masters.parameters()
            sum((w * torch.randn_like(w)).sum() * noise + (w**3).sum() for w in weights).backward()
            self.optimizer.step()
            self.optimizer.param_groups[0]["lr"] *= 0.9  # a schedule's place
            self.step += 1

    def parts(self):
        return self.masters, self.optimizer, self.reference

    def save(self, checkpoints, **more):
        facts = {"step": self.step, "seed": 1, **more}
        checkpoints.save(*self.parts(), facts, take_model=lambda changing: write_model)


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.8, 0.95)),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
}


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_goes_on_bitwise(tmp_path, make, in_background):
    """Four steps at once equal two, a checkpoint, and two more of a fresh run, every generator too.

    In the background: what the run does after ``save`` returns is not what is written.
    """
    seed_everything(5)
    straight = Run(make)
    checkpoints = Checkpoints(tmp_path, ALONE, in_background=in_background)
    straight.train(2)
    straight.save(checkpoints, loader={"index": 3})
    straight.train(4)
    checkpoints.wait()
    seed_everything(6)
    resumed = Run(make)
    with torch.no_grad():
        resumed.reference.tensors()["matrix"].zero_()
    path = checkpoint.last_whole(tmp_path)
    facts = Checkpoints(tmp_path, ALONE).restore(path, *resumed.parts(), seed=1)
    assert facts == {"step": 2, "seed": 1, "loader": {"index": 3}}
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.81)
    assert torch.equal(resumed.reference.tensors()["matrix"], Small().matrix)
    Small()  # draws
    checkpoints.restore(path, *resumed.parts(), seed=1)
    resumed.step = 2
    resumed.train(4)
    for left, right in zip(
        resumed.masters.parameters(), straight.masters.parameters(), strict=True
    ):
        assert torch.equal(left, right)
    left, right = (run.optimizer.state_dict() for run in (resumed, straight))
    assert left["param_groups"] == right["param_groups"]
    assert type(left["param_groups"][0].get("betas")) is type(right["param_groups"][0].get("betas"))


def test_what_does_not_fit_is_refused(tmp_path):
    run, path = Run(OPTIMIZERS["adamw"], beta=0), tmp_path / "step_0"
    checkpoints = Checkpoints(tmp_path, ALONE)
    run.save(checkpoints)
    with pytest.raises(ValueError, match=r"seed: 2, but .*step_0/resume was made with 1"):
        checkpoints.restore(path, *run.parts(), seed=2)
    with pytest.raises(ValueError, match=r"loss.beta: a KL term needs the reference"):
        checkpoints.restore(path, *Run(OPTIMIZERS["adamw"]).parts(), seed=1)
    run.model.matrix = nn.Parameter(torch.zeros(2, 2))
    masters = MasterWeights(run.model)
    with pytest.raises(ValueError, match=r"matrix is \(3, 4\), the model's is \(2, 2\)"):
        checkpoints.restore(path, masters, run.optimizer, None, seed=1)
    (path / "resume/state.json").write_text('{"step": 0, "seed": 1}')
    with pytest.raises(ValueError, match="an earlier version wrote it"):
        checkpoints.restore(path, *run.parts(), seed=1)


def test_nothing_that_is_loaded_can_hold_code(tmp_path):
    """No pickle among the files, so none is there to be replaced by one that runs something."""
    run = Run(OPTIMIZERS["adamw"])
    run.train(1)
    run.save(Checkpoints(tmp_path, ALONE))
    found = names(tmp_path / "step_1/resume")
    assert all(name.endswith((".safetensors", ".json")) for name in found)


# ---- in the background


def finish(checkpoints, train=lambda: None):
    with checkpoints.finishing():
        train()


def test_an_error_in_the_background_is_raised_at_the_next_step(tmp_path):
    run, checkpoints = Run(OPTIMIZERS["plain"]), Checkpoints(tmp_path, ALONE, in_background=True)
    checkpoints.save(
        *run.parts(), {"step": 1, "seed": 1}, take_model=lambda changing: write_half_a_model
    )
    checkpoints._thread.join()
    with pytest.raises(OSError, match=r"No space left .*while writing step_1"):
        checkpoints.poll()
    checkpoints.poll()  # said once
    run.save(checkpoints)
    with checkpoints.finishing():
        pass
    assert checkpoint.last_whole(tmp_path).name == "step_0"


@pytest.mark.parametrize("call", ["save", "wait", "finishing"])
def test_an_error_in_the_background_is_raised_at_the_end_at_the_latest(tmp_path, call):
    calls = {
        "save": lambda checkpoints, run: run.save(checkpoints),
        "wait": lambda checkpoints, run: checkpoints.wait(),
        "finishing": lambda checkpoints, run: finish(checkpoints),
    }
    run, checkpoints = Run(OPTIMIZERS["plain"]), Checkpoints(tmp_path, ALONE, in_background=True)
    checkpoints.save(
        *run.parts(), {"step": 1, "seed": 1}, take_model=lambda changing: write_half_a_model
    )
    with pytest.raises(OSError, match="No space left"):
        calls[call](checkpoints, run)
    assert names(tmp_path) == []


def test_one_checkpoint_at_a_time_is_written_in_the_background(tmp_path):
    run, checkpoints = Run(OPTIMIZERS["plain"]), Checkpoints(tmp_path, ALONE, in_background=True)
    go_on, alive = threading.Event(), []

    def slow(path):
        alive.append(path.name)
        assert go_on.wait(30)
        write_model(path)

    checkpoints.save(*run.parts(), {"step": 0, "seed": 1}, take_model=lambda changing: slow)
    assert not (tmp_path / "step_0").exists()  # save has returned, nothing is written yet
    threading.Timer(0.2, go_on.set).start()
    run.train(1)
    run.save(checkpoints)
    assert (tmp_path / "step_0" / MANIFEST).exists()  # the second waited for the first
    checkpoints.wait()
    assert alive == ["step_0.tmp"]
    assert checkpoint.last_whole(tmp_path).name == "step_1"


def test_an_error_of_the_run_lets_the_checkpoint_be_finished(tmp_path):
    run, checkpoints = Run(OPTIMIZERS["plain"]), Checkpoints(tmp_path, ALONE, in_background=True)

    def fail():
        run.save(checkpoints)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        finish(checkpoints, fail)
    assert checkpoint.last_whole(tmp_path).name == "step_0"


# ---- which are kept


def log(folder, **values):
    """Rows of metrics.jsonl: s2=0.5 is eval/x of step 2."""
    rows = [{"step": int(name[1:]), "eval/x": value} for name, value in values.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def whole(folder):
    return [step for step in range(20) if checkpoint.is_whole(folder / f"step_{step}")]


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        (Best(metric="eval/x", mode="max", num=1), [3, 5]),
        (Best(metric="eval/x", mode="min", num=1), [1, 5]),
        (Best(metric="eval/x", mode="max", num=2), [2, 3, 5]),
        (None, [5]),
    ],
)
@pytest.mark.parametrize("exports", ["all", "kept"])
def test_the_best_stay_whole_beside_the_newest(tmp_path, best, expected, exports):
    values = {"s1": 0.1, "s2": 0.5, "s3": 0.7, "s4": 0.2}
    for step in range(1, 6):
        save(tmp_path, step, best=best, exports=exports)
        log(tmp_path, **{k: v for k, v in values.items() if int(k[1:]) <= step})  # after it
    assert whole(tmp_path) == expected
    left = range(1, 6) if exports == "all" else expected
    assert names(tmp_path) == sorted(["metrics.jsonl", *(f"step_{step}" for step in left)])
    for step in left:
        assert (tmp_path / f"step_{step}/model.safetensors").stat().st_size == 5000
        assert (tmp_path / f"step_{step}/resume").exists() == (step in expected)


def test_the_best_of_values_that_are_equal_or_none():
    best = Best(metric="m", mode="max", num=1)
    assert best_steps({1: 0.5, 2: 0.5, 3: 0.1}, best) == {2}
    assert best_steps({1: None, 2: math.nan, 3: -1.0}, best) == {3}
    assert best_steps({1: None}, best) == set()


def test_a_metric_that_no_step_has_is_said(tmp_path, caplog):
    log(tmp_path, s1=0.5)
    save(tmp_path, 1, best=Best(metric="eval/y", mode="max", num=1))
    assert "no step has the metric eval/y" in caplog.text


def test_a_deletion_that_was_cut_short_is_finished_by_the_next_save(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step_1").rename(tmp_path / "step_1.dropped")
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_2"]


def test_moments_of_another_class_come_back(tmp_path):
    """torchao's 8-bit state: no safetensors file can hold it."""
    from torchao.optim.subclass_8bit import OptimState8bit

    def fresh():
        weight = nn.Parameter(torch.ones(16, 256))
        model = nn.ParameterDict({"w": weight})
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        optimizer.state[weight]["momentum_buffer"] = OptimState8bit.zeros((16, 256))
        return MasterWeights(model), optimizer, optimizer.state[weight]["momentum_buffer"]

    masters, optimizer, moments = fresh()
    moments.copy_(torch.linspace(-1, 1, 16 * 256).reshape(16, 256))
    checkpoints = Checkpoints(tmp_path, ALONE)
    facts = {"step": 1, "seed": 1}
    checkpoints.save(masters, optimizer, None, facts, take_model=lambda changing: write_model)
    masters, again, _ = fresh()
    checkpoints.restore(tmp_path / "step_1", masters, again, None, seed=1)
    (found,) = (entry["momentum_buffer"] for entry in again.state.values())
    assert type(found) is OptimState8bit
    assert torch.equal(found.codes, moments.codes)
    assert torch.equal(found.dequantize(), moments.dequantize())
    assert moments.dequantize().abs().max() > 0.9
