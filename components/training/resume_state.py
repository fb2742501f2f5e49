"""What a run needs to go on as if it had never stopped: taken, written, put back.

Tensors are written in shards (:mod:`components.training.shards`); what is no tensor is JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.disk import flush, write_text
from components.training.optimizer_state import (
    has_odd_tensors,
    join_state,
    load_whole_state,
    split_state,
    whole_state,
)
from components.training.parallelize import shard_like
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from components.training.rng import rng_state, set_rng_state
from components.training.shards import (
    Group,
    Shapes,
    load_shards,
    read_shards,
    saved_shapes,
    write_shards,
)

WEIGHTS, OPTIMIZER, REFERENCE = "weights/", "optimizer/", "reference/"
_STATE, _ODD_OPTIMIZER = "state.json", "optimizer.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """One rank's part of what a resumed run needs."""

    tensors: dict[str, Tensor]
    """``weights/<name>`` (fp32, trainable), ``optimizer/<name>/<key>``, ``reference/<name>``; under
    FSDP2 this rank's shards."""
    facts: dict[str, Any]
    """JSON: what the caller gave (step, loader state, seed), the optimizer's settings and numbers,
    and the random generators of every rank."""
    odd_optimizer: dict[str, Any] | None = None
    """The whole ``optimizer.state_dict()`` if it has tensors that safetensors cannot hold."""

    def staged(self) -> ResumeState:
        """A copy in host memory that later steps do not change."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        plain = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        stager = DefaultStager(plain)
        try:
            tensors: Any = stager.stage(dict(self.tensors))
        finally:
            stager.close()
        return replace(self, tensors=tensors, odd_optimizer=copy.deepcopy(self.odd_optimizer))


def capture(
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    reference: ReferencePolicy | None,
    facts: Mapping[str, Any],
    *,
    group: Group = None,
) -> ResumeState:
    """Collect what a resumed run needs; tensors are not copied. Collective.

    Args:
        masters: the weights that the optimizer updates.
        optimizer: over ``masters``.
        reference: the reference policy, if the loss has one.
        facts: JSON of the caller, with ``seed``.
        group: all ranks.
    """
    named = dict(masters.named_parameters())
    names = {id(param): name for name, param in named.items()}
    tensors = {WEIGHTS + name: param.detach() for name, param in named.items()}
    odd = whole_state(optimizer) if has_odd_tensors(optimizer) else None
    settings: dict[str, Any] = {}
    if odd is None:
        state, settings = split_state(optimizer, names)
        tensors |= {OPTIMIZER + path: tensor for path, tensor in state.items()}
    if reference is not None:
        tensors |= {REFERENCE + name: tensor for name, tensor in reference.tensors().items()}
    everyones = [rng_state()]
    if group is not None:
        mine, everyones = everyones[0], [{}] * group.size()
        dist.all_gather_object(everyones, mine, group=group)
    facts = {**facts, "optimizer": settings, "rng": everyones}
    # By name: an optimizer that was loaded has its entries in another order.
    return ResumeState(tensors=dict(sorted(tensors.items())), facts=facts, odd_optimizer=odd)


def write(resume: ResumeState, folder: Path, *, group: Group, is_main: bool) -> None:
    """Write and flush the parts of all ranks. Collective.

    Args:
        resume: this rank's part.
        folder: exists, empty, the same for all ranks.
        group: all ranks.
        is_main: whether this rank writes what is no tensor.

    Raises:
        Exception: of a rank that could not write its part.
    """
    write_shards(resume.tensors, folder, group=group)
    if is_main:
        write_text(folder / _STATE, json.dumps(resume.facts, indent=2) + "\n")
        if resume.odd_optimizer is not None:
            with (folder / _ODD_OPTIMIZER).open("wb") as file:
                torch.save(resume.odd_optimizer, file)
            flush(folder / _ODD_OPTIMIZER)


def restore(
    folder: Path,
    masters: MasterWeights,
    optimizer: torch.optim.Optimizer,
    reference: ReferencePolicy | None,
    *,
    seed: int,
    group: Group = None,
) -> dict[str, Any]:
    """Put everything back as it was, whatever the number of ranks was. Collective.

    The random generators of a rank that the saved run did not have stay as they are.

    Returns:
        What the caller of :func:`capture` gave: step, loader state, seed.

    Raises:
        ValueError: for another seed, or tensors that do not fit the model.
    """
    facts = read_facts(folder)
    if facts["seed"] != seed:
        raise ValueError(f"seed: {seed}, but {folder} was made with {facts['seed']}")
    saved = saved_shapes(folder)
    named = dict(masters.named_parameters())
    check_fit({name: param.shape for name, param in named.items()}, _under(WEIGHTS, saved))
    targets = {WEIGHTS + name: param.detach() for name, param in named.items()}
    if reference is not None:
        targets |= _reference_targets(reference, _under(REFERENCE, saved), folder)
    moments: dict[str, Tensor] = {}
    for path, (shape, dtype) in _under(OPTIMIZER, saved).items():
        param = named[path.rpartition("/")[0]].detach()
        like = param if shape == param.shape else torch.empty(shape)
        moments[path] = targets[OPTIMIZER + path] = torch.empty_like(like, dtype=dtype)
    read_shards(targets, folder, group=group)
    if (folder / _ODD_OPTIMIZER).exists():
        load_whole_state(optimizer, torch.load(folder / _ODD_OPTIMIZER, weights_only=True))
    else:
        names = {id(param): name for name, param in named.items()}
        join_state(optimizer, names, moments, facts["optimizer"])
    masters.publish()
    rank = 0 if group is None else group.rank()
    if rank < len(facts["rng"]):
        set_rng_state(facts["rng"][rank])
    return {key: value for key, value in facts.items() if key not in ("optimizer", "rng")}


def _reference_targets(
    reference: ReferencePolicy, saved: Shapes, folder: Path
) -> dict[str, Tensor]:
    """The snapshot's own tensors, to be read into."""
    if not saved:
        raise ValueError(
            f"loss.beta: a KL term needs the reference policy that the run began with, and "
            f"{folder} has none, because it was made with beta 0"
        )
    snapshot = reference.tensors()
    check_fit({name: tensor.shape for name, tensor in snapshot.items()}, saved)
    return {REFERENCE + name: tensor for name, tensor in snapshot.items()}


def read_facts(folder: Path) -> dict[str, Any]:
    """The JSON part of a resume state.

    Raises:
        ValueError: if an earlier version wrote it.
    """
    facts = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    if "rng" not in facts:
        raise ValueError(
            f"{folder}: an earlier version wrote it, in files that this one does not read. Finish "
            "that run with its version, or begin one from the model beside it (model_dir)"
        )
    return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint's resume state with whole tensors, for looking at."""

    weights: dict[str, Tensor]
    """fp32 trainable weights by name."""
    optimizer: dict[str, Tensor]
    """By ``<name>/<key>``."""
    reference: dict[str, Tensor]
    """The reference policy's weights; empty without one."""
    state: dict[str, Any]
    """JSON: step, loader state, seed, the optimizer's settings, random generators."""


def load(folder: Path) -> Saved:
    """Read a resume state whole, by one process alone."""
    facts, tensors = read_facts(folder), load_shards(folder)

    def under(prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    return Saved(
        weights=under(WEIGHTS),
        optimizer=under(OPTIMIZER),
        reference=under(REFERENCE),
        state=facts,
    )


def load_weights(params: Iterable[tuple[str, nn.Parameter]], weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into (possibly sharded) parameters.

    Raises:
        ValueError: if names or shapes differ.
    """
    named = dict(params)
    saved = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    check_fit({name: param.shape for name, param in named.items()}, saved)
    with torch.no_grad():
        for name, param in named.items():
            param.copy_(shard_like(param, weights[name]))


def check_fit(shapes: Mapping[str, torch.Size], saved: Shapes) -> None:
    """Whether saved tensors are those of a model.

    Raises:
        ValueError: if names or shapes differ.
    """
    if shapes.keys() != saved.keys():
        odd = sorted(shapes.keys() ^ saved.keys())
        raise ValueError(
            f"checkpoint: {len(odd)} trainable tensors differ from the model's (another model, or "
            f"other lora_modules?): {', '.join(odd[:5])}"
        )
    for name, shape in shapes.items():
        if shape != saved[name][0]:
            raise ValueError(
                f"checkpoint: {name} is {tuple(saved[name][0])}, the model's is {tuple(shape)}"
            )


def _under(prefix: str, saved: Shapes) -> Shapes:
    return {n.removeprefix(prefix): entry for n, entry in saved.items() if n.startswith(prefix)}
