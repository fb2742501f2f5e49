"""What all attention layers of a forward pass share: the mask of the batch, prepared once.

Suffixes: ``T`` packed tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from components.attention.masks import TreeMask, causal_tree, dense, tree
from components.attention.parts import Chain, Part, split


class MaskPlan:
    """The mask of a batch. Build it once per batch and pass it to every layer.

    Each backend takes from it what it needs, once per (window, prefix): the folded backend a small
    table of chains, FlexAttention a BlockMask, the reference a dense mask. All rows of a batch
    share it. Make one with :meth:`from_tree` or :meth:`causal`.

    Args:
        tree: the packed row.
        chains: its table of chains.
    """

    def __init__(self, tree: TreeMask, chains: Tensor) -> None:
        self.tree = tree
        self.chains = chains
        """[C, 5] int64 on the CPU: start, end, position, parent, attach of each chain."""
        self._trees: dict[str, TreeMask] = {}
        self._visible: dict[tuple, Tensor] = {}
        self._block_masks: dict[tuple, Any] = {}

    @property
    def num_tokens(self) -> int:
        """Length T of the rows."""
        return self.tree.position.shape[0]

    @classmethod
    def from_tree(cls, tree: TreeMask) -> MaskPlan:
        """The plan of a packed row.

        Args:
            tree: nodes as runs of tokens in depth-first order.

        Raises:
            ValueError: where the tree is malformed (see :func:`chain_table`).
        """
        return cls(tree, chain_table(tree))

    @classmethod
    def causal(cls, num_tokens: int, position: Tensor | None = None) -> MaskPlan:
        """The plan of rows that are one rollout each.

        Args:
            num_tokens: length T of the rows.
            position: positions ``[T]`` if they do not start at 0; consecutive.

        Raises:
            ValueError: positions that are not consecutive.
        """
        tree = causal_tree(num_tokens)
        if position is not None:
            tree = TreeMask(enter=tree.enter, exit=tree.exit, position=position.cpu())
            return cls.from_tree(tree)
        # Tensor operations only: a compiled module may come here.
        rows = [[0, num_tokens, 0, -1, -1], [num_tokens, num_tokens, 0, -1, -1]]
        return cls(tree, torch.tensor(rows, dtype=torch.int64))

    def _tree_on(self, device: torch.device) -> TreeMask:
        if str(device) not in self._trees:
            self._trees[str(device)] = self.tree.to(device)
        return self._trees[str(device)]

    def visible(self, *, window: int | None, prefix: int, device: torch.device) -> Tensor:
        """The dense mask ``[T, T]`` (bool): for the reference only."""
        key = (window, prefix, str(device))
        if key not in self._visible:
            mask_mod = tree(self._tree_on(device), w=window, p=prefix)
            self._visible[key] = dense(mask_mod, self.num_tokens, device=device)
        return self._visible[key]

    def block_mask(self, *, window: int | None, prefix: int, device: torch.device) -> Any:
        """FlexAttention's BlockMask, built once and shared by all heads, rows and layers.

        Args:
            window: largest distance in positions that is still seen; None for no window.
            prefix: positions that no window hides.
            device: where q, k and v are.

        Raises:
            RuntimeError: inside a compiled module, if it was not built before.
        """
        key = (window, prefix, str(device))
        if key not in self._block_masks:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "a compiled module needs its BlockMask beforehand: call "
                    "components.attention.sink_attention.prepare(model, plan, device=...)"
                )
            self._block_masks[key] = create_block_mask(
                tree(self._tree_on(device), w=window, p=prefix),
                B=None,
                H=None,
                Q_LEN=self.num_tokens,
                KV_LEN=self.num_tokens,
                device=str(device),
                _compile=device.type == "cuda",  # eager would materialise T x T booleans
            )
        return self._block_masks[key]


def chain_table(tree: TreeMask) -> Tensor:
    """Check a tree and cut it into chains (see :mod:`components.attention.parts`).

    Args:
        tree: the packed row.

    Returns:
        ``[C, 5]`` int64 on the CPU. At least two rows, the last ones empty if need be: a dimension
        of one is a case of its own to ``torch.compile``.

    Raises:
        ValueError: columns of different lengths or types, an empty row, intervals that are not
            nested or not in depth-first order, positions that do not follow on.
    """
    columns = _columns(tree)
    enter, exit_, position = columns
    num_tokens = len(enter)
    starts = np.flatnonzero(np.diff(enter, prepend=enter[0] - 1) | np.diff(exit_, prepend=exit_[0]))
    ends = np.append(starts[1:], num_tokens)
    _check_positions(position, starts)
    chains: list[Chain] = []
    open_nodes: list[tuple[int, int, int]] = []  # (exit, last row + 1, chain) of the path so far
    previous = None
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        node_enter, node_exit = int(enter[start]), int(exit_[start])
        _check_interval(node_enter, node_exit, previous, start)
        previous = node_enter
        while open_nodes and open_nodes[-1][0] <= node_enter:
            open_nodes.pop()
        first = int(position[start])
        if not open_nodes:
            chains.append(Chain(start, end, first, -1, -1))
        else:
            outer_exit, attach, parent = open_nodes[-1]
            if node_exit > outer_exit:
                raise ValueError(
                    f"tree node at token {start}: exit {node_exit} is past its parent's exit "
                    f"{outer_exit}"
                )
            if first != int(position[attach - 1]) + 1:
                raise ValueError(
                    f"tree node at token {start}: starts at position {first}, but its parent ends "
                    f"at {int(position[attach - 1])}; a node must follow on its parent"
                )
            if attach == start:
                chains[parent] = chains[parent]._replace(end=end)
                open_nodes.append((node_exit, end, parent))
                continue
            chains.append(Chain(start, end, first, parent, attach))
        open_nodes.append((node_exit, end, len(chains) - 1))
    while len(chains) < 2:
        chains.append(Chain(num_tokens, num_tokens, 0, -1, -1))
    return torch.tensor(chains, dtype=torch.int64)


def _columns(tree: TreeMask) -> list[np.ndarray]:
    """The three columns as numpy arrays, checked one by one."""
    columns = []
    for name in ("enter", "exit", "position"):
        column = getattr(tree, name)
        if column.dim() != 1 or column.dtype != torch.int64:
            raise ValueError(
                f"tree.{name} must be an int64 tensor [T], got {column.dtype} {list(column.shape)}"
            )
        if len(column) != len(tree.enter):
            raise ValueError(f"tree.{name} has {len(column)} tokens, tree.enter {len(tree.enter)}")
        columns.append(column.detach().cpu().numpy())
    if len(columns[0]) == 0:
        raise ValueError("a tree needs at least one token, got none")
    return columns


def _check_positions(position: np.ndarray, starts: np.ndarray) -> None:
    """Positions inside a node are consecutive, and none is negative."""
    steps = np.diff(position, prepend=position[0])
    steps[starts] = 1
    if (steps != 1).any():
        at = int(np.flatnonzero(steps != 1)[0])
        raise ValueError(
            f"tree.position jumps from {position[at - 1]} to {position[at]} at token {at}, inside "
            "a node; positions in a node are consecutive"
        )
    if position.min() < 0:
        raise ValueError(f"tree.position must be >= 0, got {position.min()}")


def _check_interval(enter: int, exit_: int, previous: int | None, start: int) -> None:
    if exit_ <= enter:
        raise ValueError(
            f"tree node at token {start}: exit {exit_} must be greater than enter {enter}"
        )
    if previous is not None and enter <= previous:
        raise ValueError(
            f"tree node at token {start}: enter {enter} after {previous}; nodes must stand in "
            "depth-first order, each in one run of tokens"
        )


def parts_of(chains: Tensor, *, window: int | None, prefix: int) -> tuple[Part, ...]:
    """The kernel calls for a table of chains, cut once per content and kept for the next layers.

    Args:
        chains: ``[C, 5]`` int64 on the CPU.
        window: largest distance in positions that is still seen; None for no window.
        prefix: positions that no window hides.
    """
    return _parts_of(chains.numpy().tobytes(), window, prefix)


@functools.lru_cache(maxsize=32)
def _parts_of(content: bytes, window: int | None, prefix: int) -> tuple[Part, ...]:
    rows = np.frombuffer(content, dtype=np.int64).reshape(-1, 5).tolist()
    chains = [Chain(*row) for row in rows if row[0] < row[1]]
    return tuple(split(chains, window=window, prefix=prefix))
