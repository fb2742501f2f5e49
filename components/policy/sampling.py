"""Drawing tokens from logits, each rollout with its own random numbers.

Suffixes: ``B`` rollouts, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 256


def uniforms(seed: int, count: int) -> list[float]:
    """The numbers in [0, 1) that one turn draws with, 53 bits each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator).tolist()


def sample(
    logits: Tensor,
    *,
    temperatures: Sequence[float],
    draws: Sequence[float],
    top_p: float = 1.0,
    top_k: int | None = None,
) -> tuple[list[int], list[float]]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: [B, V] fp32.
        temperatures: [B]; logits are divided by it, 0 means the most probable token (the lowest id
            among equals).
        draws: [B] uniform numbers in [0, 1), one per row: no row's draw depends on another row.
        top_p: see :func:`truncate`.
        top_k: likewise.

    Returns:
        Tokens and their log-probabilities under the distribution that they were drawn from: of
        what top_p and top_k leave, it is renormalised. Where the temperature is 0 that distribution
        has all mass on one token and tells nothing: there it is the one under temperature 1.
    """
    divisor = [t or 1.0 for t in temperatures]
    if any(d != 1.0 for d in divisor):
        logits = logits / torch.tensor(divisor, dtype=logits.dtype, device=logits.device)[:, None]
    if top_p < 1.0 or top_k is not None:
        logits = truncate(logits, top_p=top_p, top_k=top_k)
    p = torch.softmax(logits, -1)
    # The largest probability is exp(its logit - lse): one softmax gives both.
    lse = logits.amax(-1) - p.amax(-1).log()
    tokens = _invert(p, torch.tensor(draws, dtype=torch.float64, device=logits.device))
    if not all(temperatures):
        greedy = torch.tensor([t == 0.0 for t in temperatures], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    picked = logits.gather(1, tokens[:, None]).squeeze(1).sub_(lse).clamp_(max=0.0)
    return tokens.tolist(), picked.tolist()


def truncate(logits: Tensor, *, top_p: float, top_k: int | None) -> Tensor:
    """Logits [B, V] with those of the least probable tokens at -inf.

    Args:
        logits: [B, V], divided by the temperature.
        top_p: keep the fewest most probable tokens that together have this probability (Holtzman
            et al. 2020, arXiv:1904.09751), counted among those that top_k leaves.
        top_k: keep this many; of equal ones those with the lowest ids. None for all.
    """
    values, ids = torch.sort(logits, stable=True, dim=-1, descending=True)
    if top_k is not None:
        values[:, top_k:] = -torch.inf
    if top_p < 1.0:
        p = torch.softmax(values, -1, dtype=torch.float64)
        values = values.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, ids, values)


def _invert(p: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds ``u`` times the total: [B] long.

    Summed in two levels, first over chunks, then inside one chunk: a cumulative sum over the whole
    vocabulary in fp64 would cost ten times as much. A token of probability 0 is never returned.
    """
    p = F.pad(p, (0, -p.shape[1] % _CHUNK)).view(len(p), -1, _CHUNK)
    outer = p.sum(-1).cumsum(-1, dtype=torch.float64)
    target = _below(u[:, None] * outer[:, -1:], outer)
    chunk = torch.searchsorted(outer, target, right=True)
    before = F.pad(outer, (1, 0)).gather(1, chunk)
    rows = torch.arange(len(p), device=p.device)
    inner = p[rows, chunk.squeeze(1)].cumsum(-1, dtype=torch.float64)
    target = _below(target - before, inner)
    return (chunk * _CHUNK + torch.searchsorted(inner, target, right=True)).squeeze(1)


def _below(x: Tensor, cumulative: Tensor) -> Tensor:
    """``x`` [B, 1], kept below the total where rounding has lifted it."""
    total = cumulative[:, -1:]
    return torch.minimum(x, torch.nextafter(total, torch.zeros_like(total)))
