"""Two evaluations side by side."""

import json

import pytest

from components.rollout.compare import compare
from tools import compare_evals as tool


def evaluation(tasks, domain="retail", **settings):
    rows = [
        {
            "domain": domain,
            "task_id": task_id,
            "official": official,
            "strict": [0.0] * len(official),
        }
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
    assert found["tasks"] == {"retail/1": [1.0, 0.5], "retail/2": [0.5, 0.0]}
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
    assert found["num_differ"] == 40
    assert found["p"] < 1e-4  # 40 tasks got worse, none better


def test_no_task_that_differs_has_an_interval_all_the_same():
    """[0, 0] would claim that no other task could differ; z^2 / (n + z^2) = 0.107 of 32 is left."""
    first = evaluation({str(i): [i % 2] for i in range(32)})
    low, reach = (pytest.approx(sign * 1.96**2 / (32 + 1.96**2)) for sign in (-1, 1))
    assert compare(first, first)["official"] == {
        "difference": 0.0,
        "low": low,
        "high": reach,
        "p": 1.0,
        "num_differ": 0,
    }


def test_one_task_has_no_interval():
    found = compare(evaluation({"1": [1]}), evaluation({"1": [0]}))
    assert found["official"] == {
        "difference": -1.0,
        "low": None,
        "high": None,
        "p": 1.0,
        "num_differ": 1,
    }


def test_tasks_of_another_domain_are_other_tasks():
    ids = {str(i): [1] for i in range(10)}
    message = r"only in the first \['retail/0', .*only in the second \['airline/0'"
    with pytest.raises(ValueError, match=message):
        compare(evaluation(ids), evaluation(ids, domain="airline"))
    both, less = evaluation({"0": [1]}), evaluation({"0": [1]})
    both["tasks"] += evaluation({"0": [1]}, domain="airline")["tasks"]
    less["tasks"] += evaluation({"0": [0]}, domain="airline")["tasks"]
    found = compare(both, less)
    assert (found["num_tasks"], found["official"]["difference"]) == (2, -0.5)
    assert found["tasks"] == {"airline/0": [1.0, 0.0]}


def test_a_file_from_before_rows_had_a_domain_is_named():
    old = evaluation({"0": [1]})
    del old["tasks"][0]["domain"]
    with pytest.raises(ValueError, match=r"eval\.json 2: .*before rows had a domain: KeyError"):
        compare(evaluation({"0": [1]}), old)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            evaluation({"1": [1], "2": [0]}),
            r"tasks: only in the first \['retail/3'\], only in",
        ),
        ({"tasks": [], "metrics": {}}, "eval.json 2: holds no task"),
        ({"metrics": {}}, "eval.json 2: not written by eval_agentic, .*: KeyError"),
        ([], "eval.json 2: not written by eval_agentic, .*: TypeError"),
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
    assert "task retail/1: official 1.00 -> 0.50" in out
    # Wilson of 0 in 3 is [0, 0.5615], of 1 in 3 [0.0615, 0.7923]: the lower end is -0.7923, the
    # upper one -1/3 + sqrt(0.5615^2 + (1/3 - 0.0615)^2).
    assert "official: -0.333  95 % [-0.792, +0.291], p 0.500, paired over 3 tasks\n" in out
    none = "strict: +0.000  95 % [-0.562, +0.562], p 1.000, paired over 3 tasks, none of which "
    assert none + "differed: that is all this says" in out
    assert json.loads(paths[2].read_text())["num_tasks"] == 3
    for text, message in (("{", "Expecting property name"), ("{}", "not written by eval_agentic")):
        paths[1].write_text(text)
        assert tool.main() == 2
        assert message in capsys.readouterr().err
