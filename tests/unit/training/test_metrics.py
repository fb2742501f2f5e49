"""Metrics of a run: files, resuming, the console line."""

import csv
import json
import math
import sys
import time

import pytest
import torch

from components.training.metrics import MetricsLog, Timer, console_line, peak_gib, read_metrics


def table(path):
    with (path / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_appended_to_jsonl_and_csv(tmp_path):
    log = MetricsLog(tmp_path, resume_step=-1)
    log.log(0, {"eval/x": 1})
    log.log(1, {"loss": 0.1 + 0.2, "n": 3})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/x": 1.0},
        {"step": 1, "loss": 0.1 + 0.2, "n": 3.0},  # every bit
    ]
    assert table(tmp_path) == [
        {"step": "0", "eval/x": "1.0", "loss": "", "n": ""},
        {"step": "1", "eval/x": "", "loss": "0.30000000000000004", "n": "3.0"},
    ]
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_a_resumed_run_has_every_step_once(tmp_path):
    log = MetricsLog(tmp_path, resume_step=-1)
    for step in range(5):
        log.log(step, {"loss": step})
    log = MetricsLog(tmp_path, resume_step=2)
    assert [row["step"] for row in table(tmp_path)] == ["0", "1", "2"]
    log.log(3, {"loss": 30})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert [row["loss"] for row in table(tmp_path)] == ["0.0", "1.0", "2.0", "30.0"]


def test_a_torn_last_line_is_left_out_and_healed(tmp_path):
    MetricsLog(tmp_path, resume_step=-1).log(1, {"loss": 1})
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1]
    MetricsLog(tmp_path, resume_step=1).log(2, {"loss": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_damage_inside_the_file_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


def test_no_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_tensorboard_has_the_same_values(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, tensorboard=True)
    log.log(1, {"loss/total": 0.5})
    log.log(2, {"loss/total": 0.25})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 0.5), (2, 0.25)]


def test_tensorboard_without_the_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        MetricsLog(tmp_path, tensorboard=True)
    assert list(tmp_path.iterdir()) == []


def test_the_timer_adds_up_by_phase_even_when_a_phase_fails():
    timer = Timer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.02)
    with pytest.raises(RuntimeError), timer("update"):
        raise RuntimeError
    found = timer.metrics(since=time.perf_counter() - 3)
    assert found.keys() == {"time/rollout_s", "time/update_s", "time/step_s"}
    assert 3 <= found["time/step_s"] < 4
    assert 0.04 <= found["time/rollout_s"] < 2
    assert 0 <= found["time/update_s"] < 0.02


def test_peak_memory_is_that_of_this_process():
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    assert peak_gib(torch.device("cpu")) == pytest.approx(int(line.split()[1]) / 2**20, rel=0.05)


FULL = {
    "reward/mean": 0.5,
    "reward/official_mean": 0.25,
    "reward/strict_mean": 0.125,
    "loss/total": -0.0123,
    "loss/kl": 0.0004,
    "train/grad_norm": 1.5,
    "rollout/tool_calls": 2.0,
    "rollout/error_frac": 0.0,
    "rollout/tokens": 812.4,
    "time/step_s": 12.34,
}


def test_the_console_line():
    assert console_line(3, 10, FULL) == (
        "step   3/10  reward 0.500  official 0.250  strict 0.125  loss  -0.0123  kl  0.0004  "
        "gnorm   1.500  calls  2.0  errors 0.00  tok    812  s   12.3"
    )


def test_what_a_step_did_not_compute_is_a_dash_and_lines_stay_aligned():
    partial = {k: v for k, v in FULL.items() if k not in ("loss/total", "loss/kl")}
    line = console_line(3, 10, partial)
    assert "loss        -  kl       -  gnorm   1.500" in line
    assert len(line) == len(console_line(3, 10, FULL))
    assert "nan" in console_line(3, 10, {**FULL, "loss/total": math.nan})
