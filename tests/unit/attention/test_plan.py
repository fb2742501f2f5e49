"""Cutting a row into kernel calls: every visible pair once, nothing else; bad trees are refused."""

import time

import pytest
import torch

from components.attention.masks import TreeMask, document_tree
from components.attention.parts import BAND, CAUSAL, FULL
from components.attention.plan import MaskPlan, parts_of

from .cases import random_tree, visible

WINDOWS = [(None, 0), (0, 0), (1, 2), (127, 0), (127, 50), (127, 400), (300, 40), (600, 0)]


def coverage(plan: MaskPlan, window: int | None, prefix: int) -> torch.Tensor:
    """How often each (query, key) pair is computed."""
    counts = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.int32)
    own = torch.zeros(plan.num_tokens, dtype=torch.int32)
    seen_other = False
    for part in parts_of(plan.chains, window=window, prefix=prefix):
        i = torch.arange(part.q1 - part.q0)[:, None]
        j = torch.arange(part.k1 - part.k0)[None, :]
        distance = part.offset + i - j
        block = {
            FULL: torch.ones_like(distance, dtype=torch.bool),
            CAUSAL: j <= i,
            BAND: (distance >= 0) & (distance <= (window or 0)),
        }[part.kind]
        assert block.any(1).all(), "a query of a part sees none of its keys"
        assert block.any(0).all(), "a key of a part is seen by none of its queries"
        counts[part.q0 : part.q1, part.k0 : part.k1] += block.int()
        if part.own:
            assert not seen_other
            own[part.q0 : part.q1] += 1
        seen_other |= not part.own
    assert (own == 1).all()
    return counts


@pytest.mark.parametrize(("window", "prefix"), WINDOWS)
def test_parts_cover_each_visible_pair_once(window, prefix):
    for seed, max_len in enumerate([1, 4, 30, 90, 250]):
        plan = MaskPlan.from_tree(random_tree(seed, num_nodes=7, max_len=max_len))
        expected = plan.visible(window=window, prefix=prefix, device=torch.device("cpu"))
        assert torch.equal(coverage(plan, window, prefix), expected.int())


@pytest.mark.parametrize("num_tokens", [1, 2, 127, 128, 129, 257, 1000])
@pytest.mark.parametrize(("window", "prefix"), WINDOWS)
def test_parts_of_a_causal_row(num_tokens, window, prefix):
    plan = MaskPlan.causal(num_tokens)
    i, j = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None, :]
    expected = (j <= i) & ((i - j <= (num_tokens if window is None else window)) | (j < prefix))
    assert torch.equal(coverage(plan, window, prefix), expected.int())


def test_a_row_of_one_rollout_is_one_call():
    assert len(parts_of(MaskPlan.causal(1000).chains, window=None, prefix=0)) == 1
    from_tree = MaskPlan.from_tree(document_tree([1000]))
    assert torch.equal(from_tree.chains, MaskPlan.causal(1000).chains)


def test_a_shared_prompt_is_attended_in_one_call():
    """Root 0..9 with eight children: the first goes on causally, the rest share one full part."""
    enter = torch.tensor([0] * 10 + [c for c in range(1, 9) for _ in range(3)])
    exit_ = torch.where(enter == 0, 9, enter + 1)
    position = torch.tensor([*range(10), *[10, 11, 12] * 8])
    plan = MaskPlan.from_tree(TreeMask(enter=enter, exit=exit_, position=position))
    parts = parts_of(plan.chains, window=None, prefix=0)
    assert [(p.q0, p.q1, p.k0, p.k1) for p in parts if p.kind == FULL] == [(13, 34, 0, 10)]
    assert len(parts) == 9


def test_window_touches_linear_area():
    """Cost follows the window: at T = 8192 and w = 127 at most 3 x the visible area is computed."""
    parts = parts_of(MaskPlan.causal(8192).chains, window=127, prefix=0)
    area = sum((p.q1 - p.q0) * (p.k1 - p.k0) for p in parts)
    assert area <= 3 * 8192 * 128


def test_window_counts_positions_not_rows():
    """The last child of a root sees the root's end at distance 1, however far away in the row."""
    tree = TreeMask(
        enter=torch.tensor([0, 0, 1, 1, 1, 2]),
        exit=torch.tensor([3, 3, 2, 2, 2, 3]),
        position=torch.tensor([0, 1, 2, 3, 4, 2]),
    )
    counts = coverage(MaskPlan.from_tree(tree), 1, 0)
    assert counts[5].tolist() == [0, 1, 0, 0, 0, 1]
    assert torch.equal(counts.bool(), visible(tree, window=1, prefix=0))


def test_positions_may_start_later():
    plan = MaskPlan.causal(300, torch.arange(50, 350))
    expected = plan.visible(window=20, prefix=60, device=torch.device("cpu"))
    assert expected[:, :10].tril().sum() == expected[:, :10].sum()
    assert torch.equal(coverage(plan, 20, 60), expected.int())
    assert expected[299, :12].tolist() == [True] * 10 + [False] * 2


def make(enter, exit_, position):
    columns = [torch.tensor(x, dtype=torch.int64) for x in (enter, exit_, position)]
    return TreeMask(enter=columns[0], exit=columns[1], position=columns[2])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (make([], [], []), "at least one token"),
        (make([0, 0], [1, 1], [0]), "tree.position has 1"),
        (make([0, 0, 0], [1, 1, 1], [0, 2, 3]), "jumps from 0 to 2 at token 1"),
        (make([0, 0], [1, 1], [-1, 0]), ">= 0"),
        (make([0, 1], [0, 2], [0, 1]), "exit 0 must be greater than enter 0"),
        (make([0, 1, 0], [2, 2, 2], [0, 1, 1]), "depth-first"),
        (make([0, 1], [2, 3], [0, 1]), "past its parent's exit 2"),
        (make([0, 0, 1], [2, 2, 2], [0, 1, 1]), "parent ends at 1"),
        (make([0, 0, 1], [2, 2, 2], [0, 1, 3]), "must follow on its parent"),
        (
            TreeMask(enter=torch.zeros(2), exit=torch.ones(2), position=torch.arange(2)),
            "tree.enter must be an int64 tensor",
        ),
    ],
)
def test_malformed_trees_are_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        MaskPlan.from_tree(tree)


def test_causal_refuses_positions_with_holes():
    with pytest.raises(ValueError, match="consecutive"):
        MaskPlan.causal(3, torch.tensor([0, 1, 3]))


def test_a_plan_is_cheap():
    """A few ms at T = 8192 with 30 nodes; the bound leaves room for a busy machine."""
    tree = random_tree(3, num_nodes=30, max_len=540)
    times = []
    for _ in range(5):
        start = time.process_time()
        parts_of(MaskPlan.from_tree(tree).chains, window=None, prefix=0)
        times.append(time.process_time() - start)
    assert min(times) < 0.02


def test_block_mask_is_shared_and_broadcast():
    plan = MaskPlan.from_tree(random_tree(1, num_nodes=6, max_len=60))
    device = torch.device("cpu")
    block_mask = plan.block_mask(window=30, prefix=0, device=device)
    assert block_mask.shape[:2] == (1, 1)
    assert plan.block_mask(window=30, prefix=0, device=device) is block_mask
    assert plan.block_mask(window=None, prefix=0, device=device) is not block_mask
