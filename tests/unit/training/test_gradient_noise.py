"""What of a step's gradient is signal: against all pairs in fp64, and against known moments."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from components.training.gradient_noise import GradientNoise
from components.training.parallelize import World

SHAPES = ((3, 4), (5,))


def parameters():
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def measure(rows, sizes, *, params=None, world=None, place=lambda x: x):
    """The metrics of rows of gradients, each a list with one tensor per parameter or None."""
    params = params or parameters()
    noise = GradientNoise(params, world or World.alone())
    for row, size in zip(rows, sizes, strict=True):
        for param, grad in zip(params, row, strict=True):
            if grad is not None:
                before = 0 if param.grad is None else param.grad
                param.grad = before + place(grad)
        noise.add(size)
    return noise.metrics()


def draw(num_rows, *, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=g) for shape in SHAPES] for _ in range(num_rows)]


def by_pairs(rows, sizes):
    """Signal from the products of all pairs of rows."""
    flat = [torch.cat([x.double().flatten() for x in row]) for row in rows]
    pairs = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if i != j]
    common = sum(float(flat[i] @ flat[j]) for i, j in pairs)
    return sum(sizes) ** 2 * common / sum(sizes[i] * sizes[j] for i, j in pairs)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 1, 3, 2)])
def test_the_signal_is_what_pairs_of_rows_have_in_common(sizes):
    rows = draw(len(sizes))
    found = measure(rows, sizes)
    assert found["grad/signal"] == pytest.approx(by_pairs(rows, sizes), rel=1e-4)
    whole = sum(sum(row[k] for row in rows).double().pow(2).sum() for k in range(2))
    assert found["grad/signal"] + found["grad/noise"] == pytest.approx(float(whole), rel=1e-5)


def test_means_over_steps_are_the_squared_mean_and_the_variance():
    g = torch.Generator().manual_seed(1)
    mean, sizes, steps = 0.2, (1, 2, 4, 5), 4000
    numel, signal, noise = 17, 0.0, 0.0
    for _ in range(steps):
        rows = [
            [n * mean + n**0.5 * torch.randn(shape, generator=g) for shape in SHAPES] for n in sizes
        ]
        found = measure(rows, sizes)
        signal += found["grad/signal"] / steps
        noise += found["grad/noise"] / steps
    assert signal == pytest.approx(12**2 * mean**2 * numel, rel=0.05)
    assert noise == pytest.approx(12 * numel, rel=0.05)


def test_rows_that_agree_are_all_signal_and_an_empty_one_says_nothing():
    row = draw(1)[0]
    found = measure([row, row, [0 * x for x in row]], (2, 2, 0))
    norm = 4 * sum(float(x.double().pow(2).sum()) for x in row)
    assert found["grad/signal"] == pytest.approx(norm, rel=1e-5)
    assert found["grad/noise"] == pytest.approx(0.0, abs=1e-4)


def test_one_row_has_nothing_to_be_compared_with():
    assert measure(draw(1), (8,)) == {}
    assert measure([*draw(1), [None, None]], (8, 0)) == {}
    assert measure([], ()) == {}


def test_a_parameter_may_get_its_first_gradient_late():
    first, second = draw(2)
    late = [[first[0], None], second]
    found = measure(late, (1, 1))
    assert found["grad/signal"] == pytest.approx(
        by_pairs([[first[0], 0 * first[1]], second], (1, 1)), rel=1e-4
    )


def run_rank(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World(rank=rank, size=2, device=torch.device("cpu"))
    mesh = dist.init_device_mesh("cpu", (2,))

    def place(grad):
        return distribute_tensor(grad, mesh, [Shard(0)])

    rows = draw(3)
    params = [nn.Parameter(place(torch.zeros(shape))) for shape in SHAPES]
    mine = ((2, 1), (3, 1), (0, 4))  # rollouts of each rank's rows, whose gradients come added up
    found = measure(rows, [m[rank] for m in mine], params=params, world=world, place=place)
    expected = measure(rows, [sum(m) for m in mine])
    assert found == pytest.approx(expected, rel=1e-5)
    dist.destroy_process_group()


def test_shards_of_two_ranks_give_what_one_gives(tmp_path):
    mp.spawn(run_rank, args=(str(tmp_path / "store"),), nprocs=2)
