"""Two runs side by side, and the seeds of an arm: numbers worked out by hand."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from components.training import plot_arms
from components.training.compare_runs import compare_runs
from components.training.plot_arms import band, group_arms
from recipes import grpo_agentic, sft_agentic

ROOT = Path(__file__).parents[3]


def write(folder, rows, config=""):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "versions.json").write_text('{"torch": "2.13.0"}')
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


@pytest.fixture
def two(tmp_path):
    first = [
        {"step": 1, "reward/mean": 0.1, "loss/kl": 0.0},
        {"step": 1, "eval/official_mean": 0.25},
        {"step": 2, "reward/mean": 0.2},
        {"step": 3, "reward/mean": 0.6, "loss/kl": 0.5},
    ]
    second = [{"step": 1, "reward/mean": 0.5, "loss/kl": math.nan}]
    return (
        write(tmp_path / "a", first, "seed: 1\nloss: {beta: 0.01, eps_low: 0.2}\n"),
        write(tmp_path / "b", second, "seed: 1\nloss: {beta: 0.0, eps_low: 0.2}\nresume: true\n"),
    )


def test_settings_and_metrics_of_two_runs(two):
    found = compare_runs(*two)
    assert found["settings"] == {"loss.beta": [0.01, 0.0], "resume": ["not set", True]}
    assert found["versions"] == {}
    assert found["num_steps"] == [3, 1]
    reward = found["metrics"]["reward/mean"]
    assert reward["first"] == pytest.approx([0.1, 0.5, 0.4])
    assert reward["last"] == pytest.approx([0.6, 0.5, -0.1])
    assert reward["mean"] == pytest.approx([0.3, 0.5, 0.2])
    assert found["metrics"]["loss/kl"]["mean"] == [0.25, None, None]
    assert found["metrics"]["eval/official_mean"]["last"] == [0.25, None, None]


def test_the_command_prints_a_table_and_writes_json(two, tmp_path):
    command = [sys.executable, str(ROOT / "tools/compare_runs.py"), *map(str, two)]
    path = tmp_path / "found.json"
    done = subprocess.run(
        [*command, "--only", "reward/", "--json", str(path)],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b" not in done.stdout
    [row] = [line for line in done.stdout.splitlines() if "reward/mean" in line]
    numbers = [cell.strip() for cell in row.replace("┃", "│").split("│")[1:]]
    assert numbers == ["0.1", "0.5", "+0.4", "0.6", "0.5", "-0.1", "0.3", "0.5", "+0.2"]
    assert "loss.beta" in done.stdout
    assert list(json.loads(path.read_text())["metrics"]) == ["reward/mean"]


def test_a_run_without_a_step_is_refused(two, tmp_path):
    with pytest.raises(ValueError, match=r"no metrics\.jsonl"):
        compare_runs(two[0], tmp_path)


def seeds(folder):
    """Three seeds of one arm, one run of another."""
    rows = ([0.0, 0.2, 0.9], [0.3, 0.4], [0.6, 0.3, 0.9], [1.0, 1.0])
    configs = [f"seed: {n}\nloss: {{beta: 0.1}}\noutput_dir: runs/{n}\n" for n in range(3)]
    configs.append("seed: 0\nloss: {beta: 0.0}\noutput_dir: runs/9\n")
    return [
        write(
            folder / f"run{n}",
            [{"step": s, "reward/mean": v} for s, v in enumerate(values, start=1)],
            config,
        )
        for n, (values, config) in enumerate(zip(rows, configs, strict=True))
    ]


def test_runs_that_differ_in_the_seed_alone_are_one_arm(tmp_path):
    runs = seeds(tmp_path)
    arms = group_arms(runs)
    assert [arm.runs for arm in arms] == [tuple(runs[:3]), (runs[3],)]
    assert [arm.label for arm in arms] == ["loss.beta=0.1 (3 seeds)", "loss.beta=0.0"]
    with pytest.raises(ValueError, match="named twice"):
        group_arms([runs[0], runs[0]])
    (runs[1] / "config.yaml").write_text((runs[0] / "config.yaml").read_text())
    with pytest.raises(ValueError, match="one seed"):
        group_arms(runs)


def test_a_band_is_the_mean_the_least_and_the_most_over_all_runs():
    """Step 2 is not finite in one of them, step 4 has no x in another."""
    rows = [
        [{"step": s, "x": x} for s, x in ((1, 0.0), (2, 0.2), (3, 0.5), (4, 0.5))],
        [{"step": s, "x": x} for s, x in ((1, 0.3), (2, math.nan), (3, 0.7), (4, 0.7))],
        [{"step": 1, "x": 0.6}, {"step": 2, "x": 9.0}, {"step": 3, "x": 0.9}, {"step": 4, "y": 1}],
    ]
    found = band(rows, "x")
    assert found.steps == [1, 3]
    assert found.mean == pytest.approx([0.3, 0.7])
    assert (found.low, found.high) == ([0.0, 0.5], [0.6, 0.9])
    assert band(rows, "y").steps == []


def test_an_arm_ends_where_its_shortest_run_does():
    """All runs rise alike; the mean of those left would jump to the better ones at step 3."""
    runs = [
        [{"step": s, "x": 0.1 * s + 0.2 * n} for s in range(1, last + 1)]
        for n, last in enumerate((2, 5, 4))
    ]
    found = band(runs, "x")
    assert found.steps == [1, 2]
    assert found.mean == pytest.approx([0.3, 0.4])
    assert found.low == pytest.approx([0.1, 0.2])
    assert found.high == pytest.approx([0.5, 0.6])
    assert band(runs[1:2], "x").steps == [1, 2, 3, 4, 5]  # one run is drawn whole


def test_what_does_not_make_an_arm_are_settings_that_exist():
    for name in plot_arms.NOT_OF_THE_ARM:
        assert name in grpo_agentic.SCHEMA
        assert name in sft_agentic.SCHEMA


def test_arms_are_drawn(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    bands, fill = [], Axes.fill_between
    monkeypatch.setattr(
        Axes, "fill_between", lambda self, *a, **k: bands.append(a) or fill(self, *a, **k)
    )
    path = plot_arms.plot_arms(seeds(tmp_path), tmp_path / "arms.png")
    assert bands == [([1, 2], pytest.approx([0.0, 0.2]), pytest.approx([0.6, 0.4]))]
    with Image.open(path) as image:
        image.verify()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="no finished step"):
        plot_arms.plot_arms([empty], tmp_path / "x.png")
