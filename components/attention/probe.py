"""A check of a backend on the machine at hand, before anything is trained with it.

A kernel can return an LSE that is in log2, off by ln 2 or already contains the sink, or lose the
gradient that flows through it; outputs then still look like attention. Two tiny inputs with known
answers tell: the probe costs milliseconds and runs once per process, backend and device.

Suffixes: ``T`` packed tokens, ``N`` query heads, ``H`` head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from components.attention.plan import MaskPlan

NUM_TOKENS, HEAD_DIM = 16, 8  # the smallest head that every kernel takes

_checked: set[tuple[str, str]] = set()


def check_backend(attend: Callable[..., Tensor], *, name: str, device: torch.device) -> None:
    """Probe a backend on a device, the first time this process uses it there.

    Args:
        attend: the backend.
        name: its name.
        device: where it will run.

    Raises:
        RuntimeError: if its values or gradients are not those of attention with a sink.
    """
    if (name, device.type) in _checked:
        return
    half = name == "folded" and device.type == "cuda"  # the flash kernels take nothing else
    check_attend(
        attend,
        name=name,
        device=device,
        dtype=torch.bfloat16 if half else torch.float32,
        gradients=not (name == "flex" and device.type == "cpu"),
    )
    _checked.add((name, device.type))


def check_attend(
    attend: Callable[..., Tensor],
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    gradients: bool,
) -> None:
    """Compare a backend with values and gradients known in closed form.

    Args:
        attend: the backend, called like :func:`components.attention.folded.folded_attention`.
        name: its name, for the message.
        device: where to run.
        dtype: of q, k and v.
        gradients: whether it can train there.

    Raises:
        RuntimeError: saying what was expected and what was found.
    """
    # The caller may sample, or be inside a checkpointed layer, whose hooks count what is saved.
    clean = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), clean:
        _check_values(attend, name=name, device=device, dtype=dtype)
        if gradients:
            _check_gradients(attend, name=name, device=device, dtype=dtype)


def _check_values(
    attend: Callable[..., Tensor], *, name: str, device: torch.device, dtype: torch.dtype
) -> None:
    # Scores 0, values 1, sink 0: query t gives its t + 1 keys all but 1 / (t + 2) of its mass.
    zeros = torch.zeros(1, 1, NUM_TOKENS, HEAD_DIM, device=device, dtype=dtype)
    with torch.no_grad():
        out = _call(attend, zeros, zeros, torch.ones_like(zeros), num_tokens=NUM_TOKENS)
    seen = torch.arange(1.0, NUM_TOKENS + 1, device=device)
    _compare(name, device, "output of equal scores", out[0, 0, :, 0], seen / (seen + 1), dtype)


def _check_gradients(
    attend: Callable[..., Tensor], *, name: str, device: torch.device, dtype: torch.dtype
) -> None:
    # One key, q = k = 1, v = 2, sink 0: p = sigmoid(1), dS = p (2 - 2 p). A dropped gradient of
    # the LSE gives dq = dk = 0.
    one = torch.zeros(1, 1, 1, HEAD_DIM, device=device, dtype=dtype)
    one[..., 0] = 1.0
    leaves = [x.requires_grad_() for x in (one.clone(), one.clone(), 2.0 * one)]
    sinks = torch.zeros(1, device=device, requires_grad=True)
    out = _call(attend, *leaves, num_tokens=1, sinks=sinks)
    found = torch.autograd.grad(out[..., 0].sum(), [*leaves, sinks])
    p = torch.sigmoid(torch.ones(()))
    slope = p * (2.0 - 2.0 * p)
    expected = {"dq": slope, "dk": slope, "dv": p, "ds": -slope}
    for (what, value), grad in zip(expected.items(), found, strict=True):
        _compare(name, device, f"{what} of one key", grad.flatten()[0], value, dtype)


def _call(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_tokens: int,
    sinks: Tensor | None = None,
) -> Tensor:
    return attend(
        q,
        k,
        v,
        plan=MaskPlan.causal(num_tokens),
        window=None,
        prefix=0,
        sinks=torch.zeros(1, device=q.device) if sinks is None else sinks,
        scale=1.0,
    )


def _compare(
    name: str,
    device: torch.device,
    what: str,
    found: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
) -> None:
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 1e-2
    found, expected = found.detach().float().cpu(), expected.float().cpu()
    if not bool(((found - expected).abs() <= tolerance).all()):
        raise RuntimeError(
            f"attention backend {name!r} is wrong on {device.type}: {what} should be "
            f"{expected.tolist()}, found {found.tolist()}. Its kernel handles the LSE or the LSE's "
            "gradient in another way than sinks need; choose another backend"
        )
