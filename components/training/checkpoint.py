"""Checkpoints that are whole or absent.

``step_N/`` is a directory that transformers and vLLM load (or PEFT, for adapters alone).
``step_N/resume/`` holds what a resumed run needs beyond that. All is written under another name,
flushed, listed in a manifest with its sizes, and renamed into place, so a run killed while saving
finds the step before. Every rank writes its own part of the resume state.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from components.disk import failed_write, flush, remove_tree, write_text
from components.training import resume_state
from components.training.parallelize import World
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from components.training.resume_state import WEIGHTS, ResumeState
from components.training.retention import (
    MANIFEST,
    Best,
    Retention,
    is_whole,
    numbered,
    prune,
    remove_leftovers,
)
from components.training.shards import Group

logger = logging.getLogger(__name__)

WriteModel = Callable[[Path], None]
_PATIENCE_S = 60.0


class Checkpoints:
    """Saves and restores the checkpoints of one run; the same calls are made on every rank."""

    def __init__(
        self,
        output_dir: Path,
        world: World,
        *,
        keep_last: int = 1,
        keep_best: Mapping[str, Any] | None = None,
        exports: str = "all",
        in_background: bool = False,
    ) -> None:
        """Make a process group of their own where there are several ranks. Collective.

        Args:
            output_dir: the run's directory.
            world: this process among its peers.
            keep_last: so many of the newest keep their resume state; 0: all.
            keep_best: ``metric``, ``mode`` and ``num``: these keep theirs, too.
            exports: what becomes of the models of the others: ``all`` stay, or only those ``kept``.
            in_background: copy to host memory and write while the run goes on.
        """
        self._output_dir, self._world = output_dir, world
        best = None if keep_best is None else Best(**keep_best)
        self._retention = Retention(keep_last=keep_last, keep_best=best, exports=exports)
        self._in_background = in_background
        # On CPUs whatever the model is on, and apart from the run's own messages.
        self._group: Group = None
        if world.size > 1:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)  # every rank is in it
            self._group = group
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        reference: ReferencePolicy | None,
        facts: Mapping[str, Any],
        *,
        take_model: Callable[..., WriteModel],
    ) -> None:
        """Write ``step_N``, N being ``facts["step"]``. Collective.

        Args:
            masters: the weights that the optimizer updates.
            optimizer: over ``masters``.
            reference: the reference policy, if the loss has one.
            facts: JSON: step, seed, loader state.
            take_model: ``take_model(changing=names)`` returns what writes the model at a path; it
                copies the tensors of these names first, which later steps change.

        Raises:
            OSError: if this checkpoint, or the one in the background before it, cannot be written
                (disk full...); see :func:`write`.
        """
        self.wait()
        resume = resume_state.capture(masters, optimizer, reference, facts, group=self._group)
        changing = [n.removeprefix(WEIGHTS) for n in resume.tensors if n.startswith(WEIGHTS)]
        if not self._in_background:
            self._write(facts["step"], resume, take_model(changing=()))
            return
        # The other ranks write nothing of the model and need no copy.
        write_model = take_model(changing=changing if self._world.is_main else ())
        arguments = (facts["step"], resume.staged(), write_model)
        self._thread = threading.Thread(
            target=self._try, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, step: int, resume: ResumeState, write_model: WriteModel) -> None:
        write(
            self._output_dir,
            step,
            resume,
            write_model=write_model,
            retention=self._retention,
            group=self._group,
            is_main=self._world.is_main,
        )

    def _try(self, step: int, resume: ResumeState, write_model: WriteModel) -> None:
        try:
            self._write(step, resume, write_model)
        except BaseException as error:
            self._error = error  # raised by wait()

    def poll(self) -> None:
        """Raise the error of a checkpoint that failed in the background. Collective."""
        if self._in_background and self._world.max([float(self._error is not None)])[0]:
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint in the background.

        Raises:
            OSError: if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """At the end of this context the checkpoint in the background is written, or has failed.

        After another error it is written, too, if the other ranks are still there for it.

        Raises:
            OSError: if it could not be written.
        """
        try:
            yield
        except BaseException:
            if self._thread is not None:
                self._thread.join(_PATIENCE_S if self._world.size > 1 else None)
                if self._error is not None:
                    logger.error("the last checkpoint was not written: %s", self._error)
            raise
        self.wait()

    def restore(
        self,
        path: Path,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        reference: ReferencePolicy | None,
        *,
        seed: int,
    ) -> dict[str, Any]:
        """Put everything back as it was; see :func:`components.training.resume_state.restore`."""
        return resume_state.restore(
            path / "resume", masters, optimizer, reference, seed=seed, group=self._group
        )


def write(
    output_dir: Path,
    step: int,
    resume: ResumeState,
    *,
    write_model: WriteModel,
    retention: Retention,
    group: Group = None,
    is_main: bool = True,
) -> Path:
    """Write one checkpoint and drop what is no longer kept. Collective.

    Args:
        output_dir: the run's directory.
        step: number of finished steps.
        resume: this rank's part of what a resumed run needs.
        write_model: makes a directory at the path it is given; called on the main rank.
        retention: what is kept of older ones.
        group: all ranks.
        is_main: whether this rank writes what exists once.

    Returns:
        The directory of the checkpoint.

    Raises:
        OSError: if it cannot be written (disk full...); what was written is removed, and the
            checkpoints before it are as they were. The text says which is the last whole one.
    """
    target = output_dir / f"step_{step}"
    temporary = target.with_name(target.name + ".tmp")
    folder = temporary / "resume"

    def begin() -> None:
        remove_leftovers(output_dir)
        write_model(temporary)
        folder.mkdir()

    def finish() -> None:
        _seal(temporary, target)
        prune(output_dir, retention)

    phases = (
        begin if is_main else None,
        lambda: resume_state.write(resume, folder, group=group, is_main=is_main),
        finish if is_main else None,
    )
    try:
        for phase in phases:
            _together(phase, target, group)
    except BaseException:
        if is_main:
            remove_leftovers(output_dir)
        raise
    return target


def _together(phase: Callable[[], None] | None, target: Path, group: Group) -> None:
    """Run one phase on the ranks that have it; a write that fails on one is an error on all."""
    failure: tuple[int, str] | None = None
    cause: Exception | None = None
    other: BaseException | None = None
    try:
        if phase is not None:
            phase()
    except Exception as error:
        failure, cause = failed_write(error), error
        if failure is None:
            failure, other = (0, f"{type(error).__name__}: {error}"), error
    failures = [failure]
    if group is not None:
        failures = [None] * group.size()
        dist.all_gather_object(failures, failure, group=group)
    if other is not None:
        raise other
    first = next((f for f in failures if f is not None), None)
    if first is not None:
        whole = (path for _, path in numbered(target.parent) if is_whole(path))
        before = next(whole, None)
        number, why = first
        last = f"the last whole checkpoint is {before.name}" if before else "no checkpoint is whole"
        raise OSError(number, f"{why} (while writing {target.name}; {last})") from cause


def _seal(temporary: Path, target: Path) -> None:
    """Flush everything, list it, and give it its name."""
    files = sorted(p for p in temporary.rglob("*") if p.is_file())
    sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in files}
    for path in files:
        flush(path)
    write_text(temporary / MANIFEST, json.dumps(sizes, indent=2) + "\n")
    flush(temporary / "resume")
    flush(temporary)
    remove_tree(target)
    temporary.rename(target)
    flush(target.parent)


def last_whole(output_dir: Path) -> Path | None:
    """The newest checkpoint that is whole; newer torn ones are named in the log."""
    for leftover in output_dir.glob("step_*.tmp*"):
        logger.warning("%s was being written when the run stopped: ignored", leftover.name)
    for _, path in numbered(output_dir):
        if is_whole(path):
            return path
        if (path / "resume").exists():
            logger.warning("%s is not whole: ignored", path.name)
    return None


def load(path: Path) -> resume_state.Saved:
    """The resume state of a whole checkpoint, for looking at."""
    return resume_state.load(path / "resume")
