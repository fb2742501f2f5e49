"""From the rollouts of a step to what is trained: groups, advantages, dropped ones counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from components.rl.advantages import GroupAdvantages, group_advantages
from components.rl.packing import PackItem
from components.rollout.types import Rollout


def by_group(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each task, groups in their order of appearance."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.spec.group, []).append(rollout)
    return list(groups.values())


def trained_items(
    rollouts: Sequence[Rollout],
    *,
    normalize_std: bool,
    eps: float,
    leave_one_out: bool = False,
    baseline: Literal["group", "none"] = "group",
    num_trained: int | None = None,
    mask_overlong: bool = False,
) -> tuple[list[PackItem], GroupAdvantages]:
    """Advantages within each group, and the rollouts of the groups that carry a signal.

    Args:
        rollouts: of a step; failed ones (no reward) leave their group.
        normalize_std: see ``group_advantages``.
        eps: likewise.
        leave_one_out: likewise.
        baseline: likewise.
        num_trained: likewise.
        mask_overlong: leave rollouts that the context or token budget cut (truncated_tokens) out of
            the loss, though not out of their group's mean and standard deviation. A cut rollout
            says little of how good its tokens are (overlong filtering, DAPO,
            https://arxiv.org/abs/2503.14476).

    Returns:
        What to pack, and the advantages of all groups with the counts of dropped ones.
    """
    groups = by_group(rollouts)
    advantages = group_advantages(
        [[rollout.reward for rollout in group] for group in groups],
        normalize_std=normalize_std,
        eps=eps,
        leave_one_out=leave_one_out,
        baseline=baseline,
        num_trained=num_trained,
    )
    items = [
        PackItem(tokens=rollout.tokens, advantage=advantage, key=rollout.spec.rollout_id)
        for group, row, kept in zip(groups, advantages.values, advantages.kept, strict=True)
        for rollout, advantage in zip(group, row, strict=True)
        if kept and advantage is not None
        if not (mask_overlong and rollout.status == "truncated_tokens")
    ]
    return items, advantages
