"""Each mask against its definition, token by token."""

import subprocess
import sys

import pytest
import torch

from components.attention import masks
from components.attention.masks import TreeMask, causal_tree, dense, document_tree

from .cases import random_tree, visible


@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_window_sees_exactly_w_plus_one_keys(window):
    mask = dense(masks.window(window), 20)
    assert mask.sum(1).tolist() == [min(q + 1, window + 1) for q in range(20)]
    assert (mask & ~dense(masks.causal(), 20)).sum() == 0


def test_prefix_adds_the_first_positions_once():
    mask = dense(masks.prefix(2, 4), 12)
    seen = [set(row.nonzero().flatten().tolist()) for row in mask]
    assert seen[3] == {0, 1, 2, 3}
    assert seen[5] == {0, 1, 2, 3, 4, 5}
    assert seen[11] == {0, 1, 2, 3, 9, 10, 11}


def test_documents_do_not_see_each_other():
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (3, 1, 4))).bool()
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
    assert torch.equal(dense(masks.document(ids), 8), expected)
    assert torch.equal(dense(masks.tree(document_tree([3, 1, 4])), 8), expected)
    assert document_tree([3, 1, 4]).position.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]


def test_causal_tree_is_causal():
    assert torch.equal(dense(masks.tree(causal_tree(6)), 6), torch.ones(6, 6).tril().bool())
    assert causal_tree(3, start=5).position.tolist() == [5, 6, 7]


def test_the_example_of_the_docstring():
    tree = TreeMask(
        enter=torch.tensor([0, 0, 1, 1, 2]),
        exit=torch.tensor([3, 3, 2, 2, 3]),
        position=torch.tensor([0, 1, 2, 3, 2]),
    )
    assert dense(masks.tree(tree), 5).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("window", "prefix"), [(None, 0), (0, 0), (3, 0), (3, 2), (9, 20)])
def test_tree_mask_equals_a_walk_over_parents(seed, window, prefix):
    tree = random_tree(seed, num_nodes=9, max_len=8)
    got = dense(masks.tree(tree, w=window, p=prefix), len(tree))
    assert torch.equal(got, visible(tree, window=window, prefix=prefix))


def test_drawing(tmp_path):
    command = [sys.executable, "-m", "components.attention.masks", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    names = {path.stem for path in tmp_path.glob("*.png")}
    assert {"causal", "window", "prefix", "document", "tree"} <= names
