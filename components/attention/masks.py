"""Which keys a query sees: a ``mask_mod`` factory per mask, and the tree mask that covers them all.

``python -m components.attention.masks`` draws every mask to a PNG.

Distances are between *positions* (places in a token's own rollout), not between places in the
packed row. ``window = w`` keeps keys at distance 0..w, the query's own included: gpt-oss's 128 keys
are w = 127. The first ``prefix = p`` positions stay visible whatever the window says.

Suffixes: ``T`` packed tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``(batch, head, q, k) -> visible``, all index tensors: the contract of FlexAttention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMask:
    """A packed row as a tree of nodes: each token carries the interval of its node.

    Token k is visible to q iff ``enter[k] <= enter[q] < exit[k]`` (k's node is an ancestor of q's
    or its own) and ``position[k] <= position[q]`` and
    ``(position[q] - position[k] <= w or position[k] < p)``.

    Two rollouts sharing two tokens: enter 0 0 1 1 2, exit 3 3 2 2 3, position 0 1 2 3 2.
    """

    enter: Tensor
    """[T] int64: index of the token's node in depth-first order."""
    exit: Tensor
    """[T] int64: one past the last descendant of the token's node."""
    position: Tensor
    """[T] int64: place of the token in its own rollout."""

    def __len__(self) -> int:
        return self.enter.shape[0]

    def to(self, device: torch.device | str) -> TreeMask:
        """The same tree with its tensors on ``device``."""
        return TreeMask(
            enter=self.enter.to(device),
            exit=self.exit.to(device),
            position=self.position.to(device),
        )


def causal_tree(num_tokens: int, *, start: int = 0) -> TreeMask:
    """A row that is one rollout.

    Args:
        num_tokens: length of the row.
        start: position of the first token.

    Returns:
        A tree of one node.
    """
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    return TreeMask(enter=zeros, exit=zeros + 1, position=torch.arange(start, start + num_tokens))


def document_tree(lengths: Sequence[int]) -> TreeMask:
    """Rollouts side by side that do not see each other.

    Args:
        lengths: tokens of each rollout.

    Returns:
        A tree with one root per rollout.
    """
    sizes = torch.tensor(list(lengths), dtype=torch.int64)
    enter = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    starts = torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    return TreeMask(enter=enter, exit=enter + 1, position=torch.arange(len(enter)) - starts)


def causal() -> MaskMod:
    """Every key up to the query's own."""

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= q

    return mask_mod


def window(w: int) -> MaskMod:
    """The query's own key and the ``w`` before it.

    Args:
        w: largest distance that is still seen.
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q - k <= w)

    return mask_mod


def prefix(w: int, p: int) -> MaskMod:
    """A window, and the first ``p`` positions always.

    Args:
        w: largest distance that is still seen.
        p: positions at the start that no window hides.
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((q - k <= w) | (k < p))

    return mask_mod


def document(ids: Tensor) -> MaskMod:
    """Causal inside each document of a packed row.

    Args:
        ids: document of each token ``[T]``.
    """

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[k] == ids[q]) & (k <= q)

    return mask_mod


def tree(mask: TreeMask, *, w: int | None = None, p: int = 0) -> MaskMod:
    """The general mask: prefix tree, window and always-visible prefix, in positions.

    Args:
        mask: the packed row.
        w: largest distance that is still seen; None for no window.
        p: positions at the start of each rollout that no window hides.
    """
    enter, exit_, position = mask.enter, mask.exit, mask.position

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = (enter[k] <= enter[q]) & (enter[q] < exit_[k]) & (position[k] <= position[q])
        if w is None:
            return visible
        return visible & ((position[q] - position[k] <= w) | (position[k] < p))

    return mask_mod


def dense(mask_mod: MaskMod, num_tokens: int, *, device: torch.device | str = "cpu") -> Tensor:
    """The whole mask as booleans ``[T, T]``: for drawings and references, never on a hot path.

    Args:
        mask_mod: the mask.
        num_tokens: length of the row.
        device: where to build it.
    """
    index = torch.arange(num_tokens, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return mask_mod(zero, zero, index[:, None], index[None, :])


def _examples() -> dict[str, tuple[MaskMod, int]]:
    """Small masks to look at: name -> (mask_mod, T)."""
    ids = torch.tensor([0] * 9 + [1] * 15 + [2] * 8)
    # A system prompt (8), two tasks below it (6 and 4), two rollouts below each.
    lengths = [8, 6, 7, 5, 4, 6, 4]
    exits, starts = [7, 4, 3, 4, 7, 6, 7], [0, 8, 14, 14, 8, 12, 12]
    sizes = torch.tensor(lengths)
    node = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    packed = TreeMask(
        enter=node,
        exit=torch.tensor(exits)[node],
        position=torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]),
    )
    return {
        "causal": (causal(), 32),
        "window": (window(7), 32),
        "prefix": (prefix(7, 3), 32),
        "document": (document(ids), len(ids)),
        "tree": (tree(packed), len(packed)),
        "tree_window_prefix": (tree(packed, w=7, p=3), len(packed)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Draw each mask to ``<name>.png``.

    Args:
        argv: command line, ``[--out DIR]``.
    """
    parser = argparse.ArgumentParser(prog="python -m components.attention.masks")
    parser.add_argument("--out", type=Path, default=Path("masks"), help="folder for the images")
    folder = parser.parse_args(argv).out
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name, (mask_mod, num_tokens) in _examples().items():
        figure, axes = pyplot.subplots(figsize=(4, 4))
        axes.imshow(dense(mask_mod, num_tokens), cmap="Blues", vmin=0, vmax=1.4)
        axes.set(title=name, xlabel="key", ylabel="query")
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=120)
        pyplot.close(figure)
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
