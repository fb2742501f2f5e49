"""Prefix-tree packing: rollouts become rows in which every shared prefix is held once.

The rollouts of a row form a trie over (token, position) of their untrained leading tokens: the
domain's system prompt at the root, then the task, then the rollout. A row holds the nodes in
depth-first order. Two rollouts ``s s a X`` and ``s s b Y Y`` (trained tokens in capitals) become

    tokens    s s | a | b Y        the last trained token predicts nothing: it is not computed
    position  0 1 | 2 | 2 3
    enter     0 0 | 1 | 2 2        number of the token's node
    exit      3 3 | 2 | 3 3        one past the last node below it
    index           2   3 4        places whose hidden state predicts a trained token
    targets         X   Y Y

A trained token's predecessor always lies in a node of its own rollout, because the shared part ends
before the last token of the prompt: one place never has to predict two different tokens.

Suffixes: ``T`` packed tokens, ``M`` trained tokens of a row, ``L`` tokens of one rollout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from components.attention.masks import TreeMask
from components.rl.placing import Prefixes, place
from components.rollout.types import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PackItem:
    """One rollout on its way into a row."""

    tokens: Tokens
    advantage: float
    key: str
    """Unique name, e.g. the rollout id; breaks ties, so that the input's order does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One row for the trainer: a forest of prefix trees."""

    tokens: Tensor
    """[T] long"""
    position: Tensor
    """[T] long, place of each token in its own rollout; the tree's ``position``"""
    tree: TreeMask
    """who sees whom"""
    index: Tensor
    """[M] long, places in the row whose hidden state predicts a trained token"""
    targets: Tensor
    """[M] long, the trained tokens"""
    advantages: Tensor
    """[M] fp32"""
    generator_logprobs: Tensor
    """[M] fp32"""
    policy_versions: Tensor
    """[M] long"""
    rollout: Tensor
    """[M] long, index into ``rollout_ids``"""
    rollout_ids: tuple[str, ...]
    """keys of the rollouts in this row"""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device."""
        tree = self.tree.to(device)
        return PackedBatch(
            tokens=self.tokens.to(device),
            position=tree.position,
            tree=tree,
            index=self.index.to(device),
            targets=self.targets.to(device),
            advantages=self.advantages.to(device),
            generator_logprobs=self.generator_logprobs.to(device),
            policy_versions=self.policy_versions.to(device),
            rollout=self.rollout.to(device),
            rollout_ids=self.rollout_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStats:
    """What packing saved."""

    num_batches: int
    num_rollouts: int
    computed_tokens: int
    """Tokens in the rows, padding and empty batches included."""
    rollout_tokens: int
    """Tokens of the rollouts, each counted in full."""
    trained_tokens: int

    @property
    def saving(self) -> float:
        """Computed tokens / tokens of the rollouts; 1 when there are no rollouts."""
        return self.computed_tokens / self.rollout_tokens if self.rollout_tokens else 1.0


def pack(
    rollouts: Sequence[PackItem],
    *,
    tokens_per_batch: int,
    num_batches: int | None = None,
    share: bool = True,
    pad_to_multiple: int = 1,
    pad_id: int = 0,
) -> list[PackedBatch]:
    """Pack rollouts into rows of at most ``tokens_per_batch`` tokens.

    Each rollout lies whole in one row. Tokens after the last predecessor of a trained token are not
    computed: no loss depends on them. Rollouts without a trained token are left out. The result
    does not depend on the order of the input. Rows are sorted by falling length, so that dealing
    them out (``batches[rank::world_size]``) gives every rank rows of similar size at each step.

    Args:
        rollouts: the rollouts to train, dropped groups and failures already removed.
        tokens_per_batch: the longest row.
        num_batches: return exactly this many, filled up with ``empty_batch``: every rank must run
            the same number of forward and backward passes.
        share: hold shared prefixes once; False gives every rollout its own node (plain document
            packing).
        pad_to_multiple: fill each row to a multiple of this with tokens of a node of their own,
            which no other token sees (compiled code then meets fewer lengths).
        pad_id: the token used as filling.

    Raises:
        ValueError: a rollout longer than ``tokens_per_batch``, more rows than ``num_batches``, a
            key that is not unique, a ledger that contradicts itself, settings out of range.
    """
    if tokens_per_batch < 1:
        raise ValueError(f"tokens_per_batch = {tokens_per_batch}: must be at least 1")
    if pad_to_multiple < 1 or tokens_per_batch % pad_to_multiple:
        raise ValueError(
            f"pad_to_multiple = {pad_to_multiple}: must be a divisor of tokens_per_batch = "
            f"{tokens_per_batch}, else a padded row would be longer than that"
        )
    for item in rollouts:
        item.tokens.check()
    items = sorted((r for r in rollouts if 1 in r.tokens.loss_mask), key=lambda item: item.key)
    for a, b in itertools.pairwise(items):
        if a.key == b.key:
            raise ValueError(f"two rollouts have the key {a.key!r}: keys must be unique")
    lengths = [_computed_length(item.tokens) for item in items]
    for item, length in zip(items, lengths, strict=True):
        if length > tokens_per_batch:
            raise ValueError(
                f"rollout {item.key} needs {length} tokens: longer than tokens_per_batch = "
                f"{tokens_per_batch}; raise tokens_per_batch or limit the context of rollouts"
            )
    prefixes = Prefixes([_shareable(item.tokens) if share else () for item in items])
    rows = place(prefixes, lengths, capacity=tokens_per_batch)
    batches = [
        _layout([items[i] for i in row], prefixes, row, pad_to_multiple, pad_id) for row in rows
    ]
    batches.sort(key=lambda batch: -len(batch.tokens))  # stable: ties stay in depth-first order
    if num_batches is None:
        return batches
    if len(batches) > num_batches:
        raise ValueError(
            f"num_batches = {num_batches}: the rollouts need {len(batches)} rows of "
            f"tokens_per_batch = {tokens_per_batch}"
        )
    empty = empty_batch(num_tokens=pad_to_multiple, pad_id=pad_id)
    return batches + [empty] * (num_batches - len(batches))


def empty_batch(*, num_tokens: int = 1, pad_id: int = 0) -> PackedBatch:
    """A row without trained tokens: ``num_tokens`` filling tokens, M = 0.

    A rank that has run out of rows runs forward and backward on it, so that collectives match; its
    loss is 0 and its gradients are zeros.
    """
    row = _Row()
    row.add_node([pad_id] * num_tokens, first_position=0)
    return row.finish(())


def reference_rows(rollouts: Sequence[PackItem]) -> list[PackedBatch]:
    """Each rollout alone in a row of its own, in full and in the order given.

    What packing must agree with: a plain causal row, nothing shared, left out or filled up.
    """
    rows = []
    for item in rollouts:
        row = _Row()
        row.add_node(item.tokens.ids, first_position=0)
        row.add_trained(item, 0, first_position=0)
        rows.append(row.finish((item.key,)))
    return rows


def pack_stats(rollouts: Sequence[PackItem], batches: Sequence[PackedBatch]) -> PackStats:
    """Sizes of what ``pack`` made of these rollouts."""
    return PackStats(
        num_batches=len(batches),
        num_rollouts=len(rollouts),
        computed_tokens=sum(len(batch.tokens) for batch in batches),
        rollout_tokens=sum(len(item.tokens) for item in rollouts),
        trained_tokens=sum(len(batch.index) for batch in batches),
    )


def _shareable(tokens: Tokens) -> tuple[int, ...]:
    """The leading tokens that may be held once: the prompt up to, not including, its last token."""
    return tokens.ids[: tokens.loss_mask.index(1) - 1]


def _computed_length(tokens: Tokens) -> int:
    """Tokens up to and including the predecessor of the last trained one."""
    return len(tokens) - 1 - tokens.loss_mask[::-1].index(1)


class _Row:
    """A row under construction."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.position: list[int] = []
        self.node_sizes: list[int] = []
        self.node_exits: list[int] = []
        self.trained: list[tuple[int, int, float, float, int, int]] = []

    def add_node(self, ids: Sequence[int], *, first_position: int) -> int:
        """Append a node, a leaf so far; returns its number."""
        self.tokens += ids
        self.position += range(first_position, first_position + len(ids))
        self.node_sizes.append(len(ids))
        self.node_exits.append(len(self.node_sizes))
        return len(self.node_sizes) - 1

    def close_node(self, node: int) -> None:
        """Everything added since the node lies below it."""
        self.node_exits[node] = len(self.node_sizes)

    def add_trained(self, item: PackItem, rollout: int, *, first_position: int) -> None:
        """Register the trained tokens of a rollout whose own node was added last."""
        start = len(self.tokens) - self.node_sizes[-1]
        columns = item.tokens
        for t, mask in enumerate(columns.loss_mask):
            if mask == 1:
                predecessor = start + t - 1 - first_position
                assert predecessor >= start, "the predecessor of a trained token is shared"
                logprob, version = columns.generator_logprobs[t], columns.policy_versions[t]
                trained = (predecessor, columns.ids[t], item.advantage, logprob, version, rollout)
                self.trained.append(trained)

    def finish(self, rollout_ids: tuple[str, ...]) -> PackedBatch:
        columns = list(zip(*self.trained, strict=True)) or [()] * 6
        index, targets, advantages, logprobs, versions, rollout = columns
        position = torch.tensor(self.position, dtype=torch.long)
        sizes = torch.tensor(self.node_sizes)
        enter = torch.arange(len(sizes)).repeat_interleave(sizes)
        exit_ = torch.tensor(self.node_exits).repeat_interleave(sizes)
        return PackedBatch(
            tokens=torch.tensor(self.tokens, dtype=torch.long),
            position=position,
            tree=TreeMask(enter=enter, exit=exit_, position=position),
            index=torch.tensor(index, dtype=torch.long),
            targets=torch.tensor(targets, dtype=torch.long),
            advantages=torch.tensor(advantages, dtype=torch.float32),
            generator_logprobs=torch.tensor(logprobs, dtype=torch.float32),
            policy_versions=torch.tensor(versions, dtype=torch.long),
            rollout=torch.tensor(rollout, dtype=torch.long),
            rollout_ids=rollout_ids,
        )


def _layout(
    items: list[PackItem], prefixes: Prefixes, row: list[int], multiple: int, pad_id: int
) -> PackedBatch:
    """Lay out rollouts, given in the order of their prefixes, as a forest in depth-first order."""
    out = _Row()
    shared = [prefixes.shared(a, b) for a, b in itertools.pairwise(row)]
    stack: list[tuple[int, int, int] | int] = [(0, len(items), 0)]
    while stack:
        todo = stack.pop()
        if isinstance(todo, int):  # the subtree of this node is complete
            out.close_node(todo)
            continue
        first, last, depth = todo  # siblings below a node that ends at `depth`
        tokens = items[first].tokens
        if last - first == 1:
            out.add_node(tokens.ids[depth : _computed_length(tokens)], first_position=depth)
            out.add_trained(items[first], first, first_position=depth)
            continue
        branch = min(shared[first : last - 1])
        if branch > depth:
            stack.append(out.add_node(tokens.ids[depth:branch], first_position=depth))
        cuts = [first, *(k + 1 for k in range(first, last - 1) if shared[k] == branch), last]
        stack += [(a, b, branch) for a, b in reversed(list(itertools.pairwise(cuts)))]
    filling = -len(out.tokens) % multiple
    if filling:
        out.add_node([pad_id] * filling, first_position=0)
    return out.finish(tuple(item.key for item in items))
