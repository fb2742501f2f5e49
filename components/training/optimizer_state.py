"""An optimizer's state by the names of its parameters: tensors apart from what JSON holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from components.training.parallelize import full_tensor, shard_like


def split_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take an optimizer's state apart; tensors are not copied.

    Args:
        optimizer: its state has tensors that safetensors can hold (:func:`has_odd_tensors`).
        names: ``id(parameter)`` to its name.

    Returns:
        Tensors as ``<name>/<key>``; JSON: the settings of the groups, and numbers by name and key.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for param, entry in optimizer.state.items():
        name = names[id(param)]
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value.detach()
            else:
                numbers.setdefault(name, {})[key] = value
    groups = [
        {k: _plain(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    return tensors, {"groups": groups, "numbers": numbers}


def join_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Put back what :func:`split_state` took apart.

    Args:
        optimizer: over the same parameters.
        names: as there.
        tensors: as there, each laid out as its parameter if it has its shape.
        facts: as there.

    Raises:
        ValueError: if the optimizer has other groups than it had.
    """
    now = optimizer.state_dict()["param_groups"]
    if len(now) != len(facts["groups"]):
        raise ValueError(
            f"optimizer: it has {len(now)} groups of parameters, the checkpoint's had "
            f"{len(facts['groups'])}"
        )
    entries: dict[str, dict[str, Any]] = {n: dict(v) for n, v in facts["numbers"].items()}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        entries.setdefault(name, {})[key] = tensor
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {**group, **{k: _as(v, group.get(k)) for k, v in saved.items()}}
        for group, saved in zip(now, facts["groups"], strict=True)
    ]
    state = {index: entries[name] for index, name in enumerate(ordered) if name in entries}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _as(value: Any, now: Any) -> Any:
    """A value from JSON in the type that the optimizer has it in."""
    if isinstance(now, Tensor):
        return torch.tensor(value, dtype=now.dtype, device=now.device)
    return tuple(value) if isinstance(now, tuple) else value


def has_odd_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state has tensors that safetensors cannot hold, as torchao's 8-bit moments."""
    values = [v for entry in optimizer.state.values() for v in entry.values()]
    locals_ = [v.to_local() if hasattr(v, "to_local") else v for v in values]
    return any(isinstance(v, Tensor) and type(v) not in (Tensor, nn.Parameter) for v in locals_)


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with every sharded tensor made whole, on the CPU. Collective."""

    def whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            return full_tensor(value).detach().cpu()
        if isinstance(value, Mapping):
            return {k: whole(v) for k, v in value.items()}
        if isinstance(value, list):
            return [whole(v) for v in value]
        return value

    return whole(optimizer.state_dict())


def load_whole_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer from whole tensors, sharding them as its parameters are sharded."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def like(param: nn.Parameter, value: Any) -> Any:
        same = isinstance(value, Tensor) and value.shape == param.shape
        return shard_like(param, value) if same else value

    entries = {
        index: {key: like(params[int(index)], value) for key, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": state["param_groups"]})
