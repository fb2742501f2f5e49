"""Random packed rows and a dense oracle that shares no code with the components."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from components.attention.masks import TreeMask


def random_tree(seed: int, *, num_nodes: int, max_len: int) -> TreeMask:
    """A forest in depth-first order, with nodes of 1..max_len tokens."""
    rng = random.Random(seed)
    enter: list[int] = []
    exit_: list[int] = []
    position: list[int] = []
    count = 0

    def grow(start: int, depth: int) -> None:
        nonlocal count
        index, count = count, count + 1
        length, first = rng.randint(1, max_len), len(enter)
        enter.extend([index] * length)
        exit_.extend([0] * length)
        position.extend(range(start, start + length))
        for _ in range(rng.randint(0, 3)):
            if depth < 4 and count < num_nodes:
                grow(start + length, depth + 1)
        exit_[first : first + length] = [count] * length

    while count < num_nodes:
        grow(0, 0)
    return TreeMask(
        enter=torch.tensor(enter), exit=torch.tensor(exit_), position=torch.tensor(position)
    )


def visible(tree: TreeMask, *, window: int | None, prefix: int) -> Tensor:
    """The mask by walking: a token's ancestors are followed one parent at a time."""
    enter, exit_ = tree.enter.tolist(), tree.exit.tolist()
    position = tree.position.tolist()
    parent: list[int] = []
    for t in range(len(enter)):
        above = -1
        for s in range(t - 1, -1, -1):
            if position[s] == position[t] - 1 and enter[s] <= enter[t] < exit_[s]:
                above = s
                break
        parent.append(above)
    mask = torch.zeros(len(enter), len(enter), dtype=torch.bool)
    for t in range(len(enter)):
        s = t
        while s >= 0:
            near = window is None or position[t] - position[s] <= window
            mask[t, s] = near or position[s] < prefix
            s = parent[s]
    return mask


def path(tree: TreeMask, token: int) -> Tensor:
    """Rows of the rollout that ends at ``token``, root first."""
    mask = visible(tree, window=None, prefix=0)[token]
    return mask.nonzero().flatten()


def inputs(
    num_tokens: int,
    *,
    batch: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    sink: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Leaves q, k, v, s that want gradients, and a gradient of the output; [B, n, T, H] views."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        x = torch.randn(batch, num_tokens, n, head_dim, generator=generator, dtype=torch.float64)
        return x.to(dtype).transpose(1, 2)

    q, k, v, grad = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    s = torch.randn(heads, generator=generator, dtype=torch.float64)
    if sink is not None:
        s = torch.full_like(s, sink)
    s = s.to(dtype if dtype == torch.float64 else torch.float32)
    q, k, v, s = (x.detach().requires_grad_() for x in (q, k, v, s))
    return q, k, v, s, grad


def oracle(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, mask: Tensor, scale: float) -> Tensor:
    """Softmax over T + 1 columns in fp64, the last one (the sink) dropped; rows must see a key."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    heads = []
    for n in range(q.shape[1]):
        scores = scale * q[:, n] @ k[:, n // group].mT
        scores = scores.masked_fill(~mask, -torch.inf)
        top = scores.amax(-1, keepdim=True).detach()
        if s is not None:
            top = torch.maximum(top, s[n].detach().double())
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if s is not None:
            total = total + torch.exp(s[n].double() - top)
        heads.append(weights / total @ v[:, n // group])
    return torch.stack(heads, 1)
