"""Two evaluations side by side."""

import json

import pytest

from components.rollout.compare import compare
from tools import compare_evals as tool


def evaluation(tasks, **settings):
    rows = [
        {"task_id": task_id, "official": official, "strict": [0.0] * len(official)}
        for task_id, official in tasks.items()
    ]
    means = [sum(row["official"]) / len(row["official"]) for row in rows]
    return {
        "tasks": rows,
        "metrics": {"eval/official_mean": sum(means) / len(means)},
        "settings": settings,
    }


SEEN = evaluation({"1": [1, 1], "2": [0, 1], "3": [0, 0]}, env={"domain": "retail"}, seed=1)
HELD_OUT = evaluation(
    {"3": [0, 0], "1": [1, 0], "2": [0, 0]},  # in another order
    env={"domain": "retail", "paraphrases": "held_out"},
    seed=1,
)


def test_the_difference_is_paired_by_task():
    found = compare(SEEN, HELD_OUT)
    assert found["official"]["difference"] == pytest.approx(-1 / 3)
    assert found["strict"]["difference"] == 0.0
    assert found["metrics"]["eval/official_mean"] == pytest.approx([0.5, 1 / 6, -1 / 3])
    assert found["tasks"] == {"1": [1.0, 0.5], "2": [0.5, 0.0]}
    assert found["settings"] == {"env.paraphrases": [None, "held_out"]}
    assert found["num_tasks"] == 3


def test_the_interval_is_that_of_the_mean_of_differences():
    """Of 200 tasks a fifth got worse by 1: the normal approximation is close to the bootstrap."""
    first = evaluation({str(i): [1] for i in range(200)})
    second = evaluation({str(i): [int(i % 5 > 0)] for i in range(200)})
    found = compare(first, second)["official"]
    error = (0.2 * 0.8 / 200) ** 0.5
    assert found["low"] == pytest.approx(-0.2 - 1.96 * error, abs=0.01)
    assert found["high"] == pytest.approx(-0.2 + 1.96 * error, abs=0.01)
    assert compare(first, second)["official"] == found  # seeded
    same = compare(first, first)["official"]
    assert same == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert found["p"] < 1e-4  # 40 tasks got worse, none better


def test_one_task_has_no_interval():
    found = compare(evaluation({"1": [1]}), evaluation({"1": [0]}))
    assert found["official"] == {"difference": -1.0, "low": None, "high": None, "p": 1.0}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (evaluation({"1": [1], "2": [0]}), r"different tasks: only in the first \['3'\], only in"),
        ({"tasks": [], "metrics": {}}, "eval.json 2: holds no task"),
        ({"metrics": {}}, "eval.json 2: not written by eval_agentic: KeyError"),
        ([], "eval.json 2: not written by eval_agentic: TypeError"),
    ],
)
def test_what_cannot_be_compared(second, message):
    with pytest.raises(ValueError, match=message):
        compare(SEEN, second)


def test_the_command(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / name for name in ("seen.json", "held_out.json", "out.json")]
    for path, result in zip(paths, (SEEN, HELD_OUT), strict=False):
        path.write_text(json.dumps(result))
    arguments = [*map(str, paths[:2]), "--json", str(paths[2])]
    monkeypatch.setattr("sys.argv", ["compare_evals", *arguments])
    assert tool.main() == 0
    out = capsys.readouterr().out
    assert "env.paraphrases: None -> held_out" in out
    assert "task 1: official 1.00 -> 0.50" in out
    assert "official: -0.333  95 % [-0.500, +0.000], p 0.500, paired over 3 tasks" in out
    assert json.loads(paths[2].read_text())["num_tasks"] == 3
    for text, message in (("{", "Expecting property name"), ("{}", "not written by eval_agentic")):
        paths[1].write_text(text)
        assert tool.main() == 2
        assert message in capsys.readouterr().err
