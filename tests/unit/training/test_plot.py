"""The picture of a run."""

import json
import warnings

import pytest
from PIL import Image

from components.training.plot import plot_run

FULL = {
    "reward/mean": 0.5,
    "reward/official_mean": 0.4,
    "loss/policy": 0.1,
    "loss/kl": 0.01,
    "mismatch/kl": 1e-5,
    "rollout/tokens": 100.0,
    "rollout/sampled_tokens": 10.0,
    "time/rollout_s": 1.0,
    "time/update_s": 2.0,
    "time/step_s": 3.0,
}
NOTHING_LEARNT = {k: v for k, v in FULL.items() if not k.startswith(("loss", "mismatch"))}
del NOTHING_LEARNT["time/update_s"]
ALL_FAILED = {"rollout/error_frac": 1.0, "time/rollout_s": 1.0, "time/step_s": 1.0}


def write(folder, *rows):
    text = "".join(json.dumps({"step": n, **row}) + "\n" for n, row in enumerate(rows, start=1))
    (folder / "metrics.jsonl").write_text(text)


@pytest.mark.parametrize(
    "rows",
    [
        [FULL],
        [FULL, FULL, {"eval/official_mean": 0.3}],
        [NOTHING_LEARNT],
        [ALL_FAILED],
        [FULL, NOTHING_LEARNT, ALL_FAILED],
    ],
)
def test_it_is_drawn_without_a_warning_whatever_the_steps_have(tmp_path, rows):
    write(tmp_path, *rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = plot_run(tmp_path)
    with Image.open(path) as image:
        image.verify()
        assert image.format == "PNG"


def test_without_a_step_there_is_nothing_to_draw(tmp_path):
    assert plot_run(tmp_path) is None
    write(tmp_path, {"eval/official_mean": 0.3})
    assert plot_run(tmp_path) is None
    assert not (tmp_path / "run.png").exists()


def test_phases_that_the_last_step_lacks_are_drawn_too(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    labels = []
    bar = Axes.bar
    monkeypatch.setattr(
        Axes, "bar", lambda *a, **k: labels.append((k["label"], list(a[2]))) or bar(*a, **k)
    )
    write(tmp_path, FULL, NOTHING_LEARNT)
    plot_run(tmp_path)
    assert labels == [("rollout", [1.0, 1.0]), ("update", [2.0, 0.0])]
