"""The library's desk of CONTRIBUTING.md through the real commands, as the page gives them."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.contributing import PAGE, ROOT, write_library
from tests.recipes.runs import TINY, arguments, played, rows

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_it_trains_evaluates_and_is_scored_again(tune, tmp_path):
    write_library(tmp_path)
    # A random model changes no book: another value beside the desk's own reward trains it.
    checker = "tests.recipes.checkers.HashBesideState"
    keys = TINY | {"num_steps": 1, "eval.every": 1, "rollout.group_size": 6, "checker": checker}
    del keys["eval.dataset.include"]
    command = arguments(
        ROOT / "recipes/grpo_agentic.py", config="my/mock.yaml", model_dir=tune.model_dir, **keys
    )
    done = tune.run(*command, cwd=tmp_path)
    assert "3 demonstrations of training tasks" in done.stdout
    assert "dropped" not in done.stdout
    run = tmp_path / "runs" / "library"
    (step,) = [row for row in rows(run) if "time/step_s" in row]
    assert step["pack/trained_tokens"] > 0
    assert step["rollout/error_frac"] == 0
    drawn = {"train": set(), "eval": set()}
    for record in played(run):
        phase = record["spec"]["rollout_id"].partition("/")[0]
        drawn[phase].add(record["spec"]["task_id"])
    assert len(drawn["train"]) == TINY["tasks_per_step"]
    assert drawn["train"] < {"lend-dune", "return-emma", "lend-atlas"}
    assert drawn["eval"] == {"lend-walden", "lend-emma"}

    keys = {"device": "cpu", "dtype": "fp32", "num_trials": 1, "rollout.num_workers": 2}
    command = arguments(
        ROOT / "recipes/eval_agentic.py",
        config="my/mock_eval.yaml",
        model_dir=run / "step_1",
        **keys,
    )
    tune.run(*command, cwd=tmp_path)
    result = json.loads((tmp_path / "runs" / "library_eval" / "eval.json").read_text())
    assert len(result["tasks"]) == 2
    assert {row["task_id"] for row in result["tasks"]} == {"lend-walden", "lend-emma"}

    scored = [record for record in rescored(run, tmp_path) if record["reward"] is not None]
    assert len(scored) > 5
    for record in scored:
        if record["status"] == "completed":
            slips = record["stats"]["tool_errors"]
            assert record["reward"] == record["breakdown"]["official"] - 0.1 * slips
        else:
            assert record["breakdown"]["official"] == 0.0


def rescored(run, directory):
    """What the command of the page writes, called where the page's files are."""
    (command,) = re.findall(
        r"^PYTHONPATH=\. python (tools/rescore.py .*)$", PAGE, flags=re.MULTILINE
    )
    tool, *options = shlex.split(command)
    paths = os.pathsep.join([".", str(ROOT)])
    subprocess.run(
        [sys.executable, ROOT / tool, *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    return [json.loads(line) for line in (run / "rollouts.rescored.jsonl").open()]
