"""Small hand-made ledgers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

from components.rl.packing import PackItem
from components.rollout.types import Author, Tokens


def ledger(
    ids: Sequence[int], trained: Sequence[int], logprobs: Sequence[float] | None = None
) -> Tokens:
    """Tokens with the given ids, trained where ``trained`` is 1; logprob -t/64 and version t."""
    chosen = [-t / 64 for t in range(len(ids))] if logprobs is None else logprobs
    tokens = Tokens(
        ids=tuple(ids),
        authors=tuple(int(Author.ASSISTANT if m else Author.USER) for m in trained),
        loss_mask=tuple(trained),
        generator_logprobs=tuple(
            float(x) if m else 0.0 for m, x in zip(trained, chosen, strict=True)
        ),
        policy_versions=tuple(t if m else -1 for t, m in enumerate(trained)),
    )
    tokens.check()
    return tokens


def item(
    key: str,
    prompt: Sequence[int],
    *turns: Sequence[int],
    advantage: float = 1.0,
    logprobs: Sequence[float] | None = None,
) -> PackItem:
    """A rollout: the prompt, then turns that are sampled and observed by turns."""
    ids, trained = list(prompt), [0] * len(prompt)
    for k, turn in enumerate(turns):
        ids += turn
        trained += [1 - k % 2] * len(turn)
    return PackItem(tokens=ledger(ids, trained, logprobs), advantage=advantage, key=key)
