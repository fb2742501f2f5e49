import dataclasses
import random

import pytest
import torch

from components.attention.masks import TreeMask
from components.rl.packing import (
    PackItem,
    empty_batch,
    pack,
    pack_stats,
    reference_rows,
)
from components.rollout.types import Tokens
from tests.unit.rl.ledgers import item

A, B = [1, 2], [3, 4]  # two sampled turns


def _columns(batch):
    return {
        "tokens": batch.tokens.tolist(),
        "position": batch.position.tolist(),
        "enter": batch.tree.enter.tolist(),
        "exit": batch.tree.exit.tolist(),
        "index": batch.index.tolist(),
        "targets": batch.targets.tolist(),
    }


def _visible(tree: TreeMask) -> torch.Tensor:
    """The rule of the tree mask, in full."""
    enter, leave, position = tree.enter, tree.exit, tree.position
    return (
        (enter[None] <= enter[:, None])
        & (enter[:, None] < leave[None])
        & (position[None] <= position[:, None])
    )


def _check(batches, items, *, tokens_per_batch):
    """Every rollout is in one row, and each of its trained tokens sees its own history there."""
    by_key = {item.key: item for item in items}
    seen = []
    for batch in batches:
        assert len(batch.tokens) <= tokens_per_batch
        visible = _visible(batch.tree)
        assert len(batch.rollout_ids) == len(set(batch.rollout_ids))
        assert batch.tree.position.tolist() == batch.position.tolist()
        trained: dict[str, list[int]] = {key: [] for key in batch.rollout_ids}
        for m in range(len(batch.index)):
            key = batch.rollout_ids[int(batch.rollout[m])]
            source, place = by_key[key], int(batch.index[m])
            t = int(batch.position[place]) + 1
            keys = visible[place].nonzero().flatten()
            assert batch.tokens[keys].tolist() == list(source.tokens.ids[:t])
            assert batch.position[keys].tolist() == list(range(t))
            assert int(batch.targets[m]) == source.tokens.ids[t]
            assert float(batch.advantages[m]) == source.advantage
            assert float(batch.generator_logprobs[m]) == source.tokens.generator_logprobs[t]
            assert int(batch.policy_versions[m]) == source.tokens.policy_versions[t]
            trained[key].append(t)
        for key, places in trained.items():
            mask = by_key[key].tokens.loss_mask
            assert places == [t for t, m in enumerate(mask) if m], key
        # One place predicts one token.
        assert len(set(batch.index.tolist())) == len(batch.index)
        seen += batch.rollout_ids
    assert sorted(seen) == sorted(i.key for i in items if 1 in i.tokens.loss_mask)


def test_example_of_the_docstring():
    items = [item("x", [7, 7, 8], [1]), item("y", [7, 7, 9], [2, 3])]
    (batch,) = pack(items, tokens_per_batch=99)
    # The prompt's last token stays with the rollout; the last trained token is not computed.
    assert _columns(batch) == {
        "tokens": [7, 7, 8, 9, 2],
        "position": [0, 1, 2, 2, 3],
        "enter": [0, 0, 1, 2, 2],
        "exit": [3, 3, 2, 3, 3],
        "index": [2, 3, 4],
        "targets": [1, 2, 3],
    }
    assert batch.rollout.tolist() == [0, 1, 1]
    assert batch.rollout_ids == ("x", "y")


def test_equal_prompts_share_all_but_the_last_token():
    items = [item(k, [5, 6, 7], turn) for k, turn in (("a", [1]), ("b", [2]), ("c", [3]))]
    (batch,) = pack(items, tokens_per_batch=99)
    assert _columns(batch) == {
        "tokens": [5, 6, 7, 7, 7],
        "position": [0, 1, 2, 2, 2],
        "enter": [0, 0, 1, 2, 3],
        "exit": [4, 4, 2, 3, 4],
        "index": [2, 3, 4],
        "targets": [1, 2, 3],
    }


def test_sampled_and_observed_turns():
    # Sampled turns of 2, a tool result between them that is not trained but is seen.
    (batch,) = pack([item("a", [5, 6], A, [8, 9], B)], tokens_per_batch=99)
    assert _columns(batch) == {
        "tokens": [5, 6, 1, 2, 8, 9, 3],
        "position": list(range(7)),
        "enter": [0] * 7,
        "exit": [1] * 7,
        "index": [1, 2, 5, 6],
        "targets": [1, 2, 3, 4],
    }
    assert batch.generator_logprobs.tolist() == [-2 / 64, -3 / 64, -6 / 64, -7 / 64]
    assert batch.policy_versions.tolist() == [2, 3, 6, 7]


def test_tail_that_no_loss_depends_on_is_left_out():
    (batch,) = pack([item("a", [5, 6], A, [8, 9, 9, 9])], tokens_per_batch=3)
    assert batch.tokens.tolist() == [5, 6, 1]


def test_domains_tasks_and_rollouts_nest():
    items = [
        item(f"{d}{t}{r}", [*([d] * 6), 20 + t, 30], [40 + r], advantage=float(r))
        for d in (1, 2)
        for t in range(2)
        for r in range(2)
    ]
    (batch,) = pack(items, tokens_per_batch=999)
    # per domain: 6 shared, then per task 1 shared, then per rollout the last prompt token
    assert len(batch.tokens) == 2 * (6 + 2 * (1 + 2))
    assert batch.tree.enter.tolist()[:12] == [0] * 6 + [1, 2, 3] + [4, 5, 6]
    assert batch.tree.exit.tolist()[:12] == [7] * 6 + [4, 3, 4] + [7, 6, 7]
    _check([batch], items, tokens_per_batch=999)


def test_a_prompt_that_is_the_prefix_of_another():
    items = [item("a", [5, 6, 7], A), item("b", [5, 6, 7, 8, 9], A), item("c", [5], A)]
    (batch,) = pack(items, tokens_per_batch=99)
    _check([batch], items, tokens_per_batch=99)
    # a and b share [5, 6]; c's only prompt token predicts its first trained one: not shared.
    assert len(batch.tokens) == (1 + 1) + 2 + (1 + 1) + (3 + 1)


def test_trained_tokens_are_never_shared():
    items = [item("a", [5, 6], A, [8], B), item("b", [5, 6], A, [8], B)]
    (batch,) = pack(items, tokens_per_batch=99)
    _check([batch], items, tokens_per_batch=99)
    assert len(batch.tokens) == 1 + 2 * 5


def test_without_sharing_every_rollout_is_a_document():
    items = [item("a", [5, 6], A), item("b", [5, 6], B)]
    (batch,) = pack(items, tokens_per_batch=99, share=False)
    assert batch.tokens.tolist() == [5, 6, 1, 5, 6, 3]
    assert batch.tree.enter.tolist() == [0, 0, 0, 1, 1, 1]
    _check([batch], items, tokens_per_batch=99)


def test_rollout_without_trained_tokens_is_left_out():
    items = [item("a", [5, 6]), item("b", [5, 6], B)]
    (batch,) = pack(items, tokens_per_batch=99)
    assert batch.rollout_ids == ("b",)
    assert pack(items[:1], tokens_per_batch=99) == []


def test_siblings_stay_together():
    """Two groups of three that fill a row each: no row pays for both prompts."""
    items = [
        item(f"{g}{r}", [g] * 10, [50 + r] * 4) for r in range(3) for g in (1, 2)
    ]  # 9 shared + 3 * (1 + 3) = 21
    batches = pack(items, tokens_per_batch=21)
    assert sorted(batch.rollout_ids for batch in batches) == [
        ("10", "11", "12"),
        ("20", "21", "22"),
    ]


def test_a_rollout_goes_where_it_adds_least():
    """To its sibling (3 more tokens), although it would fill the other row to the brim (12)."""
    items = [item("a", [1] * 10, [9] * 19), item("b", [2] * 10, [9] * 11)]
    items.append(item("c", [2] * 10, [9] * 3))
    batches = pack(items, tokens_per_batch=40)
    assert [batch.rollout_ids for batch in batches] == [("a",), ("b", "c")]
    assert [len(batch.tokens) for batch in batches] == [28, 23]


def test_one_domain_fills_rows_well():
    """Longest first: in depth-first order (4, 4, 6, 6) the two sixes would take a row each."""
    items = [item(f"{k}", [7] * 5, [9] * n) for k, n in enumerate((4, 4, 6, 6))]
    batches = pack(items, tokens_per_batch=14)  # 4 shared and 10 more
    assert [len(batch.tokens) for batch in batches] == [14, 14]


def test_rows_fall_in_length_and_ranks_get_the_same_number():
    items = [item(f"{i}", [i] * 4, [9] * n) for i, n in enumerate((2, 8, 5))]
    batches = pack(items, tokens_per_batch=12, num_batches=4)
    assert [len(batch.tokens) for batch in batches] == [11, 8, 5, 1]
    assert [len(batch.index) for batch in batches] == [8, 5, 2, 0]
    with pytest.raises(ValueError, match="num_batches = 2: the rollouts need 3 rows"):
        pack(items, tokens_per_batch=12, num_batches=2)


def test_no_rollouts_at_all():
    assert pack([], tokens_per_batch=8) == []
    (batch,) = pack([], tokens_per_batch=8, num_batches=1)
    assert _columns(batch) == _columns(empty_batch())


def test_empty_batch_is_a_row():
    batch = empty_batch(num_tokens=2, pad_id=9)
    assert _columns(batch) == {
        "tokens": [9, 9],
        "position": [0, 1],
        "enter": [0, 0],
        "exit": [1, 1],
        "index": [],
        "targets": [],
    }
    assert batch.index.dtype == batch.rollout.dtype == torch.long
    assert batch.advantages.dtype == torch.float32


def test_padding_is_seen_by_nobody():
    items = [item("a", [5, 6], A, [8], B)]
    (batch,) = pack(items, tokens_per_batch=8, pad_to_multiple=8, pad_id=5)
    assert batch.tokens.tolist() == [5, 6, 1, 2, 8, 3, 5, 5]
    visible = _visible(batch.tree)
    assert not visible[:6, 6:].any()
    assert not visible[6:, :6].any()
    assert visible.diagonal().all()
    assert batch.position.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    _check([batch], items, tokens_per_batch=8)


def test_too_long_a_rollout_is_an_error():
    items = [item("train/3/retail/42/1", [5] * 6, A)]
    assert len(pack(items, tokens_per_batch=7)) == 1
    with pytest.raises(
        ValueError, match=r"train/3/retail/42/1 needs 7 tokens.*tokens_per_batch = 6"
    ):
        pack(items, tokens_per_batch=6)


def test_settings_are_checked():
    items = [item("a", [5], A)]
    with pytest.raises(ValueError, match="tokens_per_batch = 0"):
        pack(items, tokens_per_batch=0)
    with pytest.raises(ValueError, match="pad_to_multiple = 3"):
        pack(items, tokens_per_batch=8, pad_to_multiple=3)
    with pytest.raises(ValueError, match="key 'a'"):
        pack([*items, *items], tokens_per_batch=8)
    broken = dataclasses.replace(items[0].tokens, ids=(5, 1))
    with pytest.raises(ValueError, match="authors"):
        pack([PackItem(tokens=broken, advantage=1.0, key="b")], tokens_per_batch=8)


def test_first_token_trained_is_an_error():
    tokens = Tokens(
        ids=(1,), authors=(4,), loss_mask=(1,), generator_logprobs=(-1.0,), policy_versions=(0,)
    )
    with pytest.raises(ValueError, match="no predecessor"):
        pack([PackItem(tokens=tokens, advantage=1.0, key="a")], tokens_per_batch=8)


def _random_items(seed):
    rng = random.Random(seed)
    items = []
    for d in range(rng.randint(1, 3)):
        system = [rng.randint(0, 1) for _ in range(rng.randint(0, 12))]
        for t in range(rng.randint(1, 3)):
            task = [rng.randint(0, 2) for _ in range(rng.randint(0, 4))]
            for r in range(rng.randint(1, 5)):
                turns = [
                    [rng.randint(0, 3) for _ in range(rng.randint(1, 5))]
                    for _ in range(rng.randint(1, 5))
                ]
                advantage = rng.randint(-4, 4) / 4
                prompt = [0, *system, *task, 1]
                items.append(item(f"{d}/{t}/{r}", prompt, *turns, advantage=advantage))
    return items


@pytest.mark.parametrize("seed", range(40))
def test_random_forests(seed):
    items = _random_items(seed)
    longest = max(len(i.tokens) for i in items)
    alone = sum(len(i.tokens) for i in items)
    for tokens_per_batch in (longest, 2 * longest + 3, alone):
        batches = pack(items, tokens_per_batch=tokens_per_batch)
        _check(batches, items, tokens_per_batch=tokens_per_batch)
        stats = pack_stats(items, batches)
        assert stats.computed_tokens == sum(len(b.tokens) for b in batches) <= alone
        assert stats.rollout_tokens == alone
        assert stats.trained_tokens == sum(sum(i.tokens.loss_mask) for i in items)
    # One row for everything: exactly one place per distinct (prefix, position), plus the rest.
    (batch,) = pack(items, tokens_per_batch=alone)
    nodes, private = set(), 0
    for i in items:
        first = i.tokens.loss_mask.index(1) - 1
        last = len(i.tokens) - 1 - i.tokens.loss_mask[::-1].index(1)
        nodes |= {i.tokens.ids[:n] for n in range(1, first + 1)}
        private += last - first
    assert len(batch.tokens) == len(nodes) + private


@pytest.mark.parametrize("seed", range(5))
def test_order_of_the_input_does_not_matter(seed):
    items = _random_items(seed)
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    longest = max(len(i.tokens) for i in items)
    one = pack(items, tokens_per_batch=2 * longest)
    other = pack(shuffled, tokens_per_batch=2 * longest)
    assert [_columns(b) for b in one] == [_columns(b) for b in other]
    assert [b.rollout_ids for b in one] == [b.rollout_ids for b in other]


def test_reference_rows_hold_each_rollout_in_full():
    items = [item("b", [5, 6], A, [8]), item("a", [5, 6], B)]
    rows = reference_rows(items)
    assert [row.rollout_ids for row in rows] == [("b",), ("a",)]
    assert rows[0].tokens.tolist() == [5, 6, 1, 2, 8]
    assert rows[0].index.tolist() == [1, 2]
    _check(rows, items, tokens_per_batch=99)


def test_stats_of_a_group():
    items = [item(f"{r}", [7] * 101, [r] * 10) for r in range(4)]
    batches = pack(items, tokens_per_batch=999, num_batches=2)
    stats = pack_stats(items, batches)
    # 100 shared + 4 * (1 + 9) and one token of an empty batch, of 4 * 111
    assert (stats.computed_tokens, stats.rollout_tokens) == (141, 444)
    assert stats.saving == pytest.approx(141 / 444)
    assert (stats.num_batches, stats.num_rollouts, stats.trained_tokens) == (2, 4, 40)
    assert pack_stats([], []).saving == 1.0


def test_to_moves_every_tensor():
    (batch,) = pack([item("a", [5, 6], A)], tokens_per_batch=9)
    moved = batch.to("meta")
    for field in dataclasses.fields(moved):
        value = getattr(moved, field.name)
        if isinstance(value, torch.Tensor):
            assert value.device.type == "meta", field.name
    assert moved.tree.enter.device.type == "meta"
    assert moved.rollout_ids == ("a",)
