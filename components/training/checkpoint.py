"""Checkpoints that are whole or absent.

``step_N/`` is a directory that transformers and vLLM load. ``step_N/resume/`` holds what a resumed
run needs beyond that: fp32 trainable weights, the optimizer's state, the reference policy and a
JSON state. It is written under another name, flushed, and renamed into place, so a run killed while
saving finds the step before.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.disk import failed_write, flush, remove_tree, write_text
from components.training.parallelize import World, full_tensor, shard_like
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What a run needs to go on as if it had never stopped."""

    weights: dict[str, Tensor]
    """fp32 trainable weights by name."""
    optimizer: dict[str, Any]
    """``optimizer.state_dict()`` with whole tensors."""
    reference: dict[str, Tensor]
    """The reference policy's weights; empty without one."""
    state: dict[str, Any]
    """JSON: step, loader state, seed."""


def gather(
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    reference: ReferencePolicy | None,
    state: dict[str, Any],
) -> ResumeState:
    """Collect what a resumed run needs, every tensor whole. Collective."""
    return ResumeState(
        weights={name: full_tensor(p.detach()) for name, p in masters.named_parameters()},
        optimizer=full_optimizer_state(optimizer),
        reference={} if reference is None else reference.full_state(),
        state=state,
    )


def restore(
    path: Path,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    reference: ReferencePolicy | None,
    *,
    seed: int,
) -> dict[str, Any]:
    """Put everything back as it was at a whole checkpoint.

    Returns:
        The JSON state: step, loader state, seed.

    Raises:
        ValueError: for another seed, or tensors that do not fit the model.
    """
    resume = load(path)
    if resume.state["seed"] != seed:
        raise ValueError(f"seed: {seed}, but {path} was made with {resume.state['seed']}")
    load_weights(masters.named_parameters(), resume.weights)
    load_optimizer_state(optimizer, resume.optimizer)
    if reference is not None:
        if not resume.reference:
            raise ValueError(
                f"loss.beta: a KL term needs the reference policy that the run began with, and "
                f"{path} has none, because it was made with beta 0"
            )
        reference.load_full_state(resume.reference)
    masters.publish()
    return resume.state


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with every sharded tensor made whole. Collective."""

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            return full_tensor(value).detach().cpu()
        if isinstance(value, Mapping):
            return {k: whole(v) for k, v in value.items()}
        if isinstance(value, list):
            return [whole(v) for v in value]
        return value

    return whole(optimizer.state_dict())


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore an optimizer, sharding its tensors as its parameters are sharded."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {
        index: {key: _like(params[int(index)], value) for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": state["param_groups"]})


def load_weights(params: Iterable[tuple[str, nn.Parameter]], weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into (possibly sharded) parameters.

    Raises:
        ValueError: if names or shapes differ.
    """
    named = dict(params)
    if named.keys() != weights.keys():
        odd = sorted(named.keys() ^ weights.keys())
        raise ValueError(
            f"checkpoint: {len(odd)} trainable tensors differ from the model's (another model, or "
            f"other lora_modules?): {', '.join(odd[:5])}"
        )
    with torch.no_grad():
        for name, param in named.items():
            if param.shape != weights[name].shape:
                raise ValueError(
                    f"checkpoint: {name} is {tuple(weights[name].shape)}, the model's is "
                    f"{tuple(param.shape)}"
                )
            param.copy_(shard_like(param, weights[name]))


def _like(param: nn.Parameter, value: Any) -> Any:
    """An optimizer's tensor laid out like its parameter; scalars and counters as they are."""
    if isinstance(value, Tensor) and value.shape == param.shape:
        return shard_like(param, value)
    return value


def save(
    output_dir: Path,
    step: int,
    resume: ResumeState,
    *,
    save_model: Callable[[Path], None],
    world: World,
    keep_resume_states: int = 1,
) -> Path:
    """Write ``step_N`` on the main rank; the others wait.

    Args:
        output_dir: the run's directory.
        step: number of finished steps.
        resume: what a resumed run needs (gathered by the caller on every rank).
        save_model: writes a Hugging Face directory at the path it is given.
        world: this process among its peers.
        keep_resume_states: how many of the newest checkpoints keep their resume state; older ones
            keep the model only. 0 keeps all.

    Returns:
        The directory of the checkpoint.

    Raises:
        OSError: if it cannot be written (disk full...); what was written is removed, and the
            checkpoints before it are as they were. The text says which is the last whole one.
    """
    target = output_dir / f"step_{step}"
    failure: list[tuple[int, str]] = []
    cause: Exception | None = None
    if world.is_main:
        try:
            _write(target, resume, save_model)
            _drop_old_resume_states(output_dir, keep_resume_states)
        except Exception as error:
            failed = failed_write(error)
            if failed is None:
                raise
            failure, cause = [failed], error
    failures = world.gather(failure)
    if failures:
        before = last_whole(output_dir)
        number, why = failures[0]
        last = f"the last whole checkpoint is {before.name}" if before else "no checkpoint is whole"
        raise OSError(number, f"{why} (while writing {target.name}; {last})") from cause
    return target


def _write(target: Path, resume: ResumeState, save_model: Callable[[Path], None]) -> None:
    from safetensors.torch import save_file

    temporary = target.with_name(target.name + ".tmp")
    _remove_leftovers(target.parent)
    try:
        save_model(temporary)
        folder = temporary / "resume"
        folder.mkdir()
        save_file(_contiguous(resume.weights), folder / "weights.safetensors")
        if resume.reference:
            save_file(_contiguous(resume.reference), folder / "reference.safetensors")
        with (folder / "optimizer.pt").open("wb") as file:
            torch.save(resume.optimizer, file)
        write_text(folder / "state.json", json.dumps(resume.state, indent=2) + "\n")
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in files}
        for path in files:
            flush(path)
        write_text(temporary / MANIFEST, json.dumps(sizes, indent=2) + "\n")
        flush(folder)
        flush(temporary)
        remove_tree(target)
        temporary.rename(target)
        flush(target.parent)
    except BaseException:
        _remove_leftovers(target.parent)
        raise


def _remove_leftovers(output_dir: Path) -> None:
    """Halves of checkpoints, and what ``save_model`` may have written beside them."""
    for path in output_dir.glob("step_*.tmp*"):
        remove_tree(path)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _steps(output_dir: Path) -> list[tuple[int, Path]]:
    found = []
    for path in output_dir.glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", path.name)
        if match:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def _drop_old_resume_states(output_dir: Path, keep: int) -> None:
    if keep <= 0:
        return
    # A torn checkpoint counts for nothing: it must not push out the resume state of a whole one.
    whole = [path for _, path in _steps(output_dir) if is_whole(path)]
    for path in whole[keep:]:
        if (path / "resume").exists():
            # The manifest goes first: without it the directory is no longer one to resume from.
            (path / MANIFEST).unlink(missing_ok=True)
            remove_tree(path / "resume")


def is_whole(path: Path) -> bool:
    """Whether every file that the checkpoint's manifest lists is there at full size."""
    manifest = path / MANIFEST
    try:
        sizes = json.loads(manifest.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return all((path / n).is_file() and (path / n).stat().st_size == s for n, s in sizes.items())


def last_whole(output_dir: Path) -> Path | None:
    """The newest checkpoint that is whole; newer torn ones are named in the log."""
    for leftover in output_dir.glob("step_*.tmp"):
        logger.warning("%s was being written when the run stopped: ignored", leftover.name)
    for _, path in _steps(output_dir):
        if is_whole(path):
            return path
        if (path / "resume").exists():
            logger.warning("%s is not whole: ignored", path.name)
    return None


def load(path: Path) -> ResumeState:
    """Read the resume state of a whole checkpoint."""
    from safetensors.torch import load_file

    folder = path / "resume"
    reference = folder / "reference.safetensors"
    return ResumeState(
        weights=load_file(folder / "weights.safetensors"),
        optimizer=torch.load(folder / "optimizer.pt", weights_only=True),
        reference=load_file(reference) if reference.exists() else {},
        state=json.loads((folder / "state.json").read_text()),
    )
