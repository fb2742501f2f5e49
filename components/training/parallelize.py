"""One device or many: process group, FSDP2 sharding, and the policy engine's unsharded copy."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.models.decoder import PolicyModel, Reports, check_offload
from components.models.nf4 import is_nf4
from components.training.compiled import Compile, compile_layers

SLOWEST_RANK = timedelta(hours=6)
"""Ranks wait this long for the rollouts of another; a dead one is noticed by the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def alone(cls) -> World:
        """A single process on the CPU."""
        return cls(rank=0, size=1, device=torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks (in fp64)."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        dtype = torch.float64
        tensor = torch.tensor(list(values), dtype=dtype, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def gather(self, items: Sequence) -> list:
        """All ranks' items in rank order, on every rank."""
        if self.size == 1:
            return list(items)
        lists: list = [None] * self.size
        dist.all_gather_object(lists, list(items))
        return [item for part in lists for item in part]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def init_world(device: str) -> World:
    """Join the process group that torchrun describes, or be alone.

    Args:
        device: ``"auto"`` (CUDA if there is one), ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: if CUDA is asked for and this machine has none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: 'cuda' was asked for, but this machine has none; use cpu or auto")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    target = torch.device(device)
    if device == "cuda":
        target = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(target)
    if size > 1:
        # gloo for shards that are offloaded to the host: nccl takes no CPU tensors.
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=SLOWEST_RANK)
    return World(rank=rank, size=size, device=target)


def leave_world(world: World) -> None:
    """Leave the process group."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How several ranks hold the trainer's model; alone nothing is sharded."""

    shard_size: int | None = None
    """Ranks over which the weights are sharded, a divisor of their number; every further such group
    holds a copy, and gradients are averaged over the copies (HSDP: shard within a node, copy across
    nodes). None: over all ranks."""
    cpu_offload: bool = False
    """Keep shards, gradients and the optimizer's state in the host's memory (CUDA only)."""

    def check(self, world: World) -> None:
        """Raise where it does not fit the ranks.

        Raises:
            ValueError: naming the setting, its value and what is allowed.
        """
        if self.shard_size is not None and world.size == 1:
            raise ValueError(
                f"sharding.shard_size = {self.shard_size}: nothing is sharded on one rank; set it "
                "to null, or start several with --nproc_per_node"
            )
        if self.shard_size is not None and world.size % self.shard_size:
            raise ValueError(
                f"sharding.shard_size = {self.shard_size}: must divide the number of ranks, "
                f"{world.size} (--nproc_per_node times the number of nodes)"
            )
        if self.cpu_offload and world.device.type != "cuda":
            raise ValueError(
                "sharding.cpu_offload = true: needs device cuda; on a CPU the weights are in the "
                "host's memory already"
            )
        if self.cpu_offload and world.size == 1:
            raise ValueError(
                "sharding.cpu_offload = true: needs FSDP2, so at least 2 ranks; set it to false"
            )


def shard(
    model: PolicyModel, world: World, *, dtype: torch.dtype, sharding: Sharding = Sharding()
) -> None:
    """Shard a model with FSDP2: each layer, then the root. In place.

    Parameters stay fp32 shards, cast to ``dtype`` for compute; gradients are reduced in fp32.
    FSDP2 averages gradients over ranks: the caller multiplies its loss by ``world.size``.

    Raises:
        ValueError: for weights that are no plain numbers (NF4, MXFP4).
    """
    packed = [n for n, p in model.named_parameters() if is_nf4(p) or not p.is_floating_point()]
    if packed:
        raise ValueError(
            f"{len(packed)} weights are stored in four bits ({packed[0]}, ...): quantize_base and "
            f"packed experts run on one rank, not on {world.size}"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    width = sharding.shard_size or world.size
    shape, names = (world.size // width, width), ("replicate", "shard")
    if width == world.size:
        shape, names = shape[1:], names[1:]
    settings = {
        "mesh": init_device_mesh(world.device.type, shape, mesh_dim_names=names),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy(),
    }
    for layer in model.layers:
        fully_shard(layer, **settings)
    # By default the root stays gathered after its forward, and weights written into the shards
    # (a reference swapped in) would not be seen by the next one.
    fully_shard(model, reshard_after_forward=True, **settings)


def build_policy(
    make_model: Callable[..., PolicyModel],
    world: World,
    *,
    dtype: torch.dtype,
    compile: Compile = False,
    sharding: Sharding = Sharding(),
    engine_apart: bool = False,
) -> tuple[PolicyModel, PolicyModel]:
    """The trainer's model and the one that the policy engine samples from.

    Alone they are one module: it computes in ``dtype`` and the optimizer works on fp32 copies
    (``MasterWeights``). With FSDP2 the trainer holds fp32 shards and the engine an unsharded copy,
    filled by :func:`refresh`, so that sampling never runs inside sharded forwards.

    Args:
        make_model: ``make_model(dtype=...)`` builds the model on the CPU.
        world: this process among its peers.
        dtype: of the computation.
        compile: the layers of the trainer's model; see :func:`compile_layers`.
        sharding: over several ranks.
        engine_apart: the engine samples from its model while the trainer works. Alone it has
            trainable weights of its own then; the frozen ones are still shared.

    Raises:
        ValueError: a sharding that does not fit, no compiler where one is asked for, activations to
            be offloaded without a CUDA device, a model that two threads cannot use at once.
    """
    sharding.check(world)
    built = make_model(dtype=dtype)
    if built.offload_activations:
        check_offload(world.device)
    if engine_apart:
        compile = _check_apart(built, world, compile)
    if world.size == 1:
        model = built.to(world.device)
        engine_model = _own_trainable(model) if engine_apart else model
        compile_layers(model, compile=compile, device=world.device)
        return model, engine_model
    engine_model = built.to(world.device).requires_grad_(False)
    model = make_model(dtype=torch.float32).to(world.device)
    compile_layers(model, compile=compile, device=world.device)
    shard(model, world, dtype=dtype, sharding=sharding)
    return model, engine_model


def _check_apart(model: PolicyModel, world: World, compile: Compile) -> Compile:
    """Whether to compile the layers of a model, a copy of which is sampled from meanwhile.

    Raises:
        ValueError: compiled layers, streamed experts, or experts and several ranks.
    """
    setting = "rollout.max_staleness above 0 with an engine in this process"
    if any(getattr(module, "_stream", None) is not None for module in model.modules()):
        raise ValueError(f"{setting}: model.experts = streamed has buffers for one pass at a time")
    if world.size > 1 and any(isinstance(module, Reports) for module in model.layers.modules()):
        raise ValueError(
            f"{setting}: a mixture of experts runs on one rank, not on {world.size}, since its "
            "routing is compared with the engine's in every step"
        )
    if compile is True:
        # The engine's forwards switch the compiler off, and there is one switch for all threads.
        raise ValueError(f"{setting}: compile = true: must be false")
    return False


def _own_trainable(model: PolicyModel) -> PolicyModel:
    """A copy of a model with trainable weights of its own; frozen weights are the same tensors."""
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, frozen).requires_grad_(False)


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """On CUDA a stream of the calling thread's own: its kernels do not queue behind the others."""
    if device.type != "cuda":
        return nullcontext()
    torch.cuda.set_device(device)  # a new thread begins with the first one
    torch.cuda.synchronize(device)  # what the others have written so far is there
    return torch.cuda.stream(torch.cuda.Stream(device))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a (possibly sharded) tensor, on this rank's device. Collective."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def shard_like(param: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor laid out as ``param`` is: sharded if it is a DTensor, else on its device."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return whole.to(param.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(param.device), mesh, getattr(param, "placements"))  # noqa: B009


@torch.no_grad()
def refresh(engine_model: nn.Module, model: nn.Module) -> None:
    """Copy the trained weights of a model into the engine's, whole, one tensor at a time.

    Frozen ones are equal from the start.
    """
    targets = dict(engine_model.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            targets[name].copy_(full_tensor(param.detach()))


@torch.no_grad()
def clip_grad_norm(params: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients of all ranks to a global L2 norm of at most ``max_norm``.

    Returns:
        The norm before clipping; not finite if any gradient is not.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    norm = full_tensor(norm)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return float(norm)
