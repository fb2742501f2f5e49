"""The arithmetic of tools/bench_engine.py, and its runs on a tiny model."""

from __future__ import annotations

import pytest
import torch

from tests.unit.policy.tiny import VOCAB, tiny_model
from tools import bench_engine_runs
from tools.bench_engine import summary
from tools.bench_engine_runs import Run, Work, bandwidth_gb_s, play, run_local


def work(rollouts: int, prefix: int) -> Work:
    return Work(rollouts=rollouts, prefix=prefix, turns=2)


def test_figures_by_hand():
    local = {
        work(8, 1000): Run(turn_s=(1.0, 1.0), decode_step_s=(0.010, 0.012112)),
        work(32, 1000): Run(turn_s=(2.0, 3.0), decode_step_s=(0.03, 0.04)),
        work(8, 5000): Run(turn_s=(2.0, 2.0), decode_step_s=(0.012, 0.018168)),
    }
    theirs = {
        work(8, 1000): Run(turn_s=(10.0, 8.0)),
        work(32, 1000): Run(turn_s=(20.0, 20.0)),
        work(8, 5000): Run(turn_s=(30.0, 50.0)),
    }
    found = summary(
        {"local": local, "transformers": theirs}, bandwidth=20.0, weight_bytes=40_000_000
    )
    assert found["speedup_vs_transformers_1k"] == 8.0  # the smaller of 18 / 2 and 40 / 5
    assert found["speedup_vs_transformers_5k"] == 20.0
    assert found["speedup_vs_vllm_1k"] is None
    # 40 MB at 20 GB/s are 2 ms, a step is 11.056 ms
    assert found["bandwidth_share"] == pytest.approx(2 / 11.056)
    # 2.112 ms more for 264 tokens of 8 rollouts
    assert found["own_key_us"] == pytest.approx(1.0)
    assert found["prefix_cost_5k"] == pytest.approx(1.5)


def test_every_engine_gets_the_same_work(monkeypatch):
    given = Work(rollouts=3, prefix=7, turns=2, observation=4, new_tokens=2)
    seen: list[list[list[int]]] = []

    def ask(contexts, turn):
        seen.append([list(context) for context in contexts])
        return [[turn, index] for index in range(3)]

    assert len(play(given, ask)) == 2
    first, second = seen
    assert [len(context) for context in first] == [11] * 3
    assert len({tuple(context[:7]) for context in first}) == 1
    assert len({tuple(context) for context in first}) == 3
    for index in range(3):
        assert second[index][:13] == [*first[index], 0, index]
        assert len(second[index]) == 17
    assert (given.sampled, given.context) == (12, 19)
    again = list(seen)
    seen.clear()
    play(given, ask)
    assert seen == again
    monkeypatch.setattr(bench_engine_runs, "IDS", range(VOCAB))
    run = run_local(tiny_model(), given)
    assert len(run.turn_s) == len(run.decode_step_s) == 2
    assert all(0 < step < turn for step, turn in zip(run.decode_step_s, run.turn_s, strict=True))


def test_bandwidth_is_measured():
    before = torch.get_num_threads()
    found = bandwidth_gb_s(num_bytes=1 << 22, repeats=2)
    assert set(found) == {"copy", "sum", "product"}
    assert all(0.01 < value < 10_000 for value in found.values())
    assert torch.get_num_threads() == before
