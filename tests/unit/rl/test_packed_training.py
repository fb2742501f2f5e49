"""Loss and gradients do not depend on how rollouts are packed, split or shared.

The reference runs every rollout alone and in full through a small transformer with dense attention,
and knows nothing of rows, trees or indices.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from components.attention.masks import TreeMask
from components.rl.logprobs import chunked_logprobs
from components.rl.losses import GRPOLoss, sft_loss
from components.rl.packing import PackedBatch, PackItem, pack, reference_rows
from tests.unit.rl.ledgers import item

VOCAB, WIDTH, HEADS, KEY_HEADS, HEAD = 11, 16, 4, 2, 4
TEMPERATURE = 0.7
GRPO = GRPOLoss(eps_low=0.2, eps_high=0.28, beta=0.1)


class Transformer(nn.Module):
    """Two layers: rotary positions, grouped heads, sinks, window with visible prefix, tied head."""

    def __init__(self, *, window: int | None, prefix: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int, scale: float) -> nn.Parameter:
            values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
            return nn.Parameter(values.to(dtype))

        self.window, self.prefix = window, prefix
        self.embedding = weight(VOCAB, WIDTH, scale=1.0)
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.q = weight(WIDTH, HEADS * HEAD, scale=0.5)
            layer.k = weight(WIDTH, KEY_HEADS * HEAD, scale=0.5)
            layer.v = weight(WIDTH, KEY_HEADS * HEAD, scale=0.5)
            layer.o = weight(HEADS * HEAD, WIDTH, scale=0.3)
            layer.sinks = weight(HEADS, scale=1.0)
            layer.up = weight(WIDTH, 2 * WIDTH, scale=0.3)
            layer.down = weight(2 * WIDTH, WIDTH, scale=0.3)
            self.layers.append(layer)

    def forward(self, tokens: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        """Hidden states [T, D] for a dense mask [T, T]; the window comes on top."""
        distance = position[:, None] - position[None]
        if self.window is not None:
            near = (distance <= self.window) | (position[None] < self.prefix)
            visible = visible & near
        x = self.embedding[tokens]
        for layer in self.layers:
            h = torch.nn.functional.rms_norm(x, (WIDTH,))
            q = _rotate((h @ layer.q).view(-1, HEADS, HEAD), position)
            k = _rotate((h @ layer.k).view(-1, KEY_HEADS, HEAD), position)
            v = (h @ layer.v).view(-1, KEY_HEADS, HEAD)
            k, v = (y.repeat_interleave(HEADS // KEY_HEADS, 1) for y in (k, v))
            scores = torch.einsum("qnh,knh->nqk", q, k) / HEAD**0.5
            scores = scores.masked_fill(~visible, -torch.inf)
            sink = layer.sinks[:, None, None].expand(-1, len(x), 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            x = x + torch.einsum("nqk,knh->qnh", weights, v).flatten(1) @ layer.o
            h = torch.nn.functional.rms_norm(x, (WIDTH,))
            x = x + torch.nn.functional.silu(h @ layer.up) @ layer.down
        return torch.nn.functional.rms_norm(x, (WIDTH,)) * 0.4


def _rotate(x: Tensor, position: Tensor) -> Tensor:
    frequency = torch.tensor([1.0, 0.1], dtype=x.dtype)
    angle = position[:, None, None].to(x.dtype) * frequency
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _dense(tree: TreeMask) -> Tensor:
    enter, leave, position = tree.enter, tree.exit, tree.position
    inside = (enter[None] <= enter[:, None]) & (enter[:, None] < leave[None])
    return inside & (position[None] <= position[:, None])


def _loss(name: str, logprobs: Tensor, old: Tensor, advantages: Tensor, num_trained: int) -> Tensor:
    if name == "sft":
        return sft_loss(logprobs, denominator=num_trained)
    ref = old * 0.5 - 1.0
    return GRPO(
        logprobs,
        old_logprobs=old,
        advantages=advantages,
        ref_logprobs=ref,
        denominator=num_trained,
    ).loss


def _num_trained(items: list[PackItem]) -> int:
    return sum(sum(i.tokens.loss_mask) for i in items)


def _alone(model: Transformer, items: list[PackItem], name: str) -> tuple[float, list[Tensor]]:
    """Each rollout alone, from its ledger: the specification."""
    num_trained = _num_trained(items)
    total = 0.0
    for i in items:
        ids = torch.tensor(i.tokens.ids)
        length = len(ids)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        hidden = model(ids, torch.arange(length), causal)
        table = torch.log_softmax(hidden @ model.embedding.T / TEMPERATURE, -1)
        picked = table[:-1].gather(1, ids[1:, None]).squeeze(1)
        mask = torch.tensor(i.tokens.loss_mask[1:], dtype=torch.bool)
        old = torch.tensor(i.tokens.generator_logprobs[1:], dtype=hidden.dtype)[mask]
        advantages = torch.full_like(old, i.advantage)
        loss = _loss(name, picked[mask], old, advantages, num_trained)
        loss.backward()
        total += loss.item()
    return total, _take_grads(model)


def _packed(
    model: Transformer,
    batches: list[PackedBatch],
    name: str,
    *,
    num_trained: int,
    chunk_size: int = 4,
) -> tuple[float, list[Tensor]]:
    """The trainer's way: one forward and backward per row, gradients accumulated."""
    total = 0.0
    for b in batches:
        head = partial(
            chunked_logprobs, targets=b.targets, temperature=TEMPERATURE, chunk_size=chunk_size
        )
        hidden = model(b.tokens, b.position, _dense(b.tree))
        logprobs, _ = head(hidden[b.index], model.embedding)
        old = b.generator_logprobs.to(hidden.dtype)
        loss = _loss(name, logprobs, old, b.advantages.to(hidden.dtype), num_trained)
        loss.backward()
        total += loss.item()
    return total, _take_grads(model)


def _take_grads(model: Transformer) -> list[Tensor]:
    grads = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        grads.append(parameter.grad)
        parameter.grad = None
    return grads


ids = st.integers(0, VOCAB - 1)


@st.composite
def rollouts(draw: st.DrawFn) -> list[PackItem]:
    """Domains of tasks of groups, as in training; sometimes with prompts that happen to overlap."""
    items = []
    for d in range(draw(st.integers(1, 2))):
        system = draw(st.lists(ids, min_size=0, max_size=8))
        for t in range(draw(st.integers(1, 2))):
            task = draw(st.lists(ids, min_size=1, max_size=3))
            for g in range(draw(st.integers(1, 3))):
                turns = draw(
                    st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=4)
                )
                length = len(system) + len(task) + sum(map(len, turns))
                # Around log(VOCAB): some ratios are clipped, some are not.
                logprobs = draw(st.lists(st.integers(40, 300), min_size=length, max_size=length))
                items.append(
                    item(
                        f"{d}/{t}/{g}",
                        [*system, *task],
                        *turns,
                        advantage=draw(st.integers(-4, 4)) / 4,
                        logprobs=[-x / 64 for x in logprobs],
                    )
                )
    return items


@given(
    items=rollouts(),
    room=st.floats(1.0, 4.0),
    share=st.booleans(),
    padding=st.sampled_from([1, 4]),
    extra=st.integers(0, 1),
    window=st.sampled_from([None, 0, 2, 5]),
    prefix=st.sampled_from([0, 3]),
    chunk_size=st.integers(1, 9),
    name=st.sampled_from(["grpo", "sft"]),
    shuffle=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_packing_equals_each_rollout_alone(
    items, room, share, padding, extra, window, prefix, chunk_size, name, shuffle
):
    model = Transformer(window=window, prefix=prefix, dtype=torch.float64)
    expected_loss, expected = _alone(model, items, name)
    longest = max(len(i.tokens) for i in items)
    tokens_per_batch = -int(-longest * room // padding) * padding
    shuffle.shuffle(items)
    batches = pack(items, tokens_per_batch=tokens_per_batch, share=share, pad_to_multiple=padding)
    batches = pack(
        items,
        tokens_per_batch=tokens_per_batch,
        share=share,
        pad_to_multiple=padding,
        num_batches=len(batches) + extra,
    )
    loss, grads = _packed(
        model, batches, name, num_trained=_num_trained(items), chunk_size=chunk_size
    )
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-11)


def _group(num_rollouts: int) -> list[PackItem]:
    generator = torch.Generator().manual_seed(1)

    def draw(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    system, items = draw(12), []
    for g in range(num_rollouts):
        turns = [draw(3), draw(4), draw(2)]
        logprobs = [-(40 + 18 * x) / 64 for x in draw(14 + 9)]
        advantage = 1.0 - g % 3
        items.append(item(f"{g}", [*system, 1, 2], *turns, advantage=advantage, logprobs=logprobs))
    return items


def test_fp32():
    items = _group(6)
    model = Transformer(window=4, prefix=2, dtype=torch.float32)
    expected_loss, expected = _alone(model, items, "grpo")
    batches = pack(items, tokens_per_batch=60)
    assert len(batches) == 2
    loss, grads = _packed(model, batches, "grpo", num_trained=_num_trained(items))
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    for grad, expected_grad in zip(grads, expected, strict=True):
        # Gradients are up to 30 here: 1e-5 of the largest entry of each.
        scale = max(1.0, expected_grad.abs().max().item())
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-5 * scale)


def test_reference_rows_are_each_rollout_alone():
    items = _group(3)
    model = Transformer(window=None, prefix=0, dtype=torch.float64)
    expected_loss, expected = _alone(model, items, "grpo")
    loss, grads = _packed(model, reference_rows(items), "grpo", num_trained=_num_trained(items))
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


def test_ranks_add_up_to_one_process():
    """Rows dealt out to two ranks: the sum of their gradients is that of one process."""
    items = _group(5)
    model = Transformer(window=3, prefix=1, dtype=torch.float64)
    expected_loss, expected = _alone(model, items, "grpo")
    batches = pack(items, tokens_per_batch=31, num_batches=4)
    assert [len(b.index) for b in batches] == [10, 10, 5, 0]
    losses, sums = 0.0, [torch.zeros_like(g) for g in expected]
    for rank in range(2):
        loss, grads = _packed(model, batches[rank::2], "grpo", num_trained=_num_trained(items))
        losses += loss
        sums = [s + g for s, g in zip(sums, grads, strict=True)]
    assert losses == pytest.approx(expected_loss, abs=1e-12)
    for grad, expected_grad in zip(sums, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


def test_tool_output_is_attended_but_not_trained():
    """Fault 7: it changes later log-probabilities; no position predicts it."""
    one = item("a", [1, 2, 3], [4, 5], [6, 7], [8, 9])
    two = item("a", [1, 2, 3], [4, 5], [6, 0], [8, 9])
    model = Transformer(window=None, prefix=0, dtype=torch.float64)
    rows = []
    for i in (one, two):
        (b,) = pack([i], tokens_per_batch=99)
        hidden = model(b.tokens, b.position, _dense(b.tree))
        rows.append(
            chunked_logprobs(
                hidden[b.index], model.embedding, targets=b.targets, temperature=TEMPERATURE
            )[0].detach()
        )
        assert b.targets.tolist() == [4, 5, 8, 9]
    assert torch.equal(rows[0][:2], rows[1][:2])
    assert (rows[0][2:] != rows[1][2:]).all()


def test_padding_equal_to_end_of_turn_does_not_matter():
    """Faults 6 and 9: pad = eos = 10, with eos inside the rollout too."""
    items = [item("a", [5, 10], [1, 10], [7, 10], [2, 10])]
    model = Transformer(window=None, prefix=0, dtype=torch.float64)
    logprobs = []
    for multiple in (1, 5):
        (b,) = pack(items, tokens_per_batch=10, pad_to_multiple=multiple, pad_id=10)
        hidden = model(b.tokens, b.position, _dense(b.tree))
        logprobs.append(
            chunked_logprobs(
                hidden[b.index], model.embedding, targets=b.targets, temperature=TEMPERATURE
            )[0]
        )
    assert len(b.tokens) == 10
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=1e-12)
