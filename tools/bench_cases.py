"""What ``tools/bench_attention.py`` measures: the arms, and how time and peak memory are taken.

Suffixes: ``B`` batch, ``T`` tokens, ``N`` query heads, ``K`` key heads, ``H`` head dim.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from components.attention.flex import flex_attention_sink
from components.attention.folded import folded_attention
from components.attention.plan import MaskPlan
from components.attention.reference import reference_attention

# The profiler writes two lines to stderr whenever it is used; this is above its highest level.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

Arm = Callable[["Inputs"], Tensor]
BACKENDS = {
    "folded": folded_attention,
    "flex": flex_attention_sink,
    "reference": reference_attention,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Heads of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Random leaves, and the gradient of the output."""

    q: Tensor
    """[1, N, T, H], a view of [1, T, N, H] as projections give it."""
    k: Tensor
    """[1, K, T, H]"""
    v: Tensor
    """[1, K, T, H]"""
    sinks: Tensor
    """[N] fp32"""
    grad: Tensor
    """[1, N, T, H]"""

    @property
    def num_bytes(self) -> int:
        """Size of all five."""
        tensors = (self.q, self.k, self.v, self.sinks, self.grad)
        return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(slots=True, kw_only=True)
class Measured:
    """One arm at one length."""

    forward_s: list[float] = field(default_factory=list)
    """Seconds of each pass."""
    backward_s: list[float] = field(default_factory=list)
    """Seconds of each pass."""
    peak_bytes: int = 0
    """Inputs, and the most that was allocated beside them in forward and backward."""

    @property
    def total_s(self) -> list[float]:
        """Forward and backward of each pass."""
        return [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]


def make_inputs(
    num_tokens: int, *, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Inputs of unit variance; the same for the same length.

    Args:
        num_tokens: T.
        shape: heads.
        dtype: of q, k and v.
        device: where they are.
    """
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(num: int) -> Tensor:
        x = torch.randn(1, num_tokens, num, shape.head_dim, generator=generator)
        return x.to(device, dtype).transpose(1, 2)

    q, k, v, grad = (
        draw(n) for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    )
    sinks = torch.randn(shape.num_heads, generator=generator).to(device)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    return Inputs(q=leaves[0], k=leaves[1], v=leaves[2], sinks=leaves[3], grad=grad)


def dense_mask(num_tokens: int, window: int | None, *, like: Tensor) -> Tensor:
    """The additive mask ``[1, 1, T, T]`` that an eager model makes once per forward."""
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=like.device).tril_()
    if window is not None:
        visible.triu_(-window)
    mask = torch.zeros(1, 1, num_tokens, num_tokens, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~visible, float("-inf"))


def eager(x: Inputs, *, mask: Tensor) -> Tensor:
    """Softmax with a sink column, step by step as transformers' gpt-oss does it (5.x, Apache-2.0).

    Args:
        x: the inputs.
        mask: additive ``[1, 1, T, T]``.

    Returns:
        ``[1, N, T, H]``.
    """
    group = x.q.shape[1] // x.k.shape[1]
    k, v = (y.repeat_interleave(group, dim=1) for y in (x.k, x.v))
    scores = x.q @ k.transpose(2, 3) * x.q.shape[-1] ** -0.5
    scores = scores + mask
    column = x.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    logits = torch.cat([scores, column], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = torch.softmax(logits, dim=-1, dtype=logits.dtype)
    return weights[..., :-1] @ v


def fused(x: Inputs) -> Tensor:
    """torch's fused attention: causal, without a sink."""
    return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True, enable_gqa=True)


def ours(x: Inputs, *, backend: str, plan: MaskPlan, window: int | None) -> Tensor:
    """One of our backends, with the sink."""
    attend = BACKENDS[backend]
    return attend(x.q, x.k, x.v, plan=plan, window=window, prefix=0, sinks=x.sinks, scale=None)


def make_arms(
    inputs: Inputs, *, window: int | None, max_dense: int, max_reference: int
) -> dict[str, Arm]:
    """The arms that can run at this length, by name.

    Args:
        inputs: what they will be given.
        window: largest distance that is still seen; None for plain causal.
        max_dense: most tokens at which the eager arm runs: it keeps several ``[N, T, T]``.
        max_reference: the same for the backend ``reference``, which does so in fp32.
    """
    num_tokens = inputs.q.shape[2]
    plan = MaskPlan.causal(num_tokens)
    names = ["folded", "flex"] if inputs.q.device.type == "cuda" else ["folded"]
    if num_tokens <= max_reference:
        names.append("reference")
    arms: dict[str, Arm] = {}
    if num_tokens <= max_dense:
        arms["eager"] = partial(eager, mask=dense_mask(num_tokens, window, like=inputs.q))
    if window is None:
        arms["fused"] = fused
    for name in names:
        arms[name] = partial(ours, backend=name, plan=plan, window=window)
    return arms


def timed(run: Callable[[], Tensor], inputs: Inputs, wanted: Sequence[Tensor]) -> tuple[float, ...]:
    """Seconds of one forward and of its backward."""
    cuda = inputs.q.device.type == "cuda"
    marks = []
    for step in range(3):
        if step == 1:
            out = run()
        if step == 2:
            torch.autograd.grad(out, wanted, inputs.grad)
        if cuda:
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
    return marks[1] - marks[0], marks[2] - marks[1]


def peak_allocated(run: Callable[[], object], *, device: torch.device) -> int:
    """The most bytes that were allocated at one time during ``run``, beyond what was there.

    On a CPU, which has no peak counter, the allocator's events as the profiler records them: they
    contain the buffers inside kernels, which counting tensors would miss.

    Args:
        run: what is measured.
        device: where it allocates.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    kineto: Any = profiler.profiler.kineto_results  # its methods are not in torch's stubs
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events)
    peak = total = 0
    for _, size in changes:
        total += size
        peak = max(peak, total)
    return peak


def measure(
    arms: Mapping[str, Arm],
    inputs: Inputs,
    *,
    slow_s: float,
    budget_s: float,
    max_rounds: int,
) -> dict[str, Measured]:
    """Time the arms in turn, round by round, so that a busy moment hits all of them.

    The first pass of each arm gives its peak memory. It is a warm-up too, except for an arm that
    takes longer than ``slow_s``: that pass then is its one figure.

    Args:
        arms: name -> arm.
        inputs: what they are given.
        slow_s: see above.
        budget_s: seconds for the rounds.
        max_rounds: most rounds; at least 3 are done.

    Returns:
        name -> figures.
    """
    results, cost, warm_up = {}, {}, {}
    for name, arm in arms.items():
        wanted = [inputs.q, inputs.k, inputs.v]
        if name != "fused":
            wanted.append(inputs.sinks)
        run = partial(timed, partial(arm, inputs), inputs, wanted)
        first: list[tuple[float, ...]] = []
        peak = peak_allocated(
            lambda run=run, first=first: first.append(run()), device=inputs.q.device
        )
        results[name] = Measured(peak_bytes=inputs.num_bytes + peak)
        cost[name], warm_up[name] = sum(first[0]), (run, first[0])
    rounds = [name for name in arms if cost[name] <= slow_s]
    for name in arms:
        if name not in rounds:
            _note(results[name], warm_up[name][1])
    num_rounds = budget_s / max(sum(cost[name] for name in rounds), 1e-9)
    for _ in range(max(3, min(max_rounds, int(num_rounds)))):
        for name in rounds:
            _note(results[name], warm_up[name][0]())
    return results


def _note(measured: Measured, sample: tuple[float, ...]) -> None:
    measured.forward_s.append(sample[0])
    measured.backward_s.append(sample[1])


def time_ratio(over: Measured, under: Measured) -> float:
    """Time of ``over`` in units of ``under``: the median of the rounds' ratios, where paired."""
    if len(over.total_s) == len(under.total_s):
        pairs = zip(over.total_s, under.total_s, strict=True)
        return statistics.median(a / b for a, b in pairs)
    return statistics.median(over.total_s) / statistics.median(under.total_s)
