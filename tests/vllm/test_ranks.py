"""Two ranks and two real servers on one machine."""

from __future__ import annotations

import json
import os

import pytest

from tests.recipes.runs import played, rows
from tests.vllm.policy_runs import BOUND, policy_server, run

pytestmark = pytest.mark.vllm


def requests_served(log):
    """How often a server was asked for a turn, and for new weights."""
    text = log.read_text(errors="replace")
    return text.count("POST /inference/v1/generate"), text.count("POST /collective_rpc")


def test_two_ranks_sample_each_from_a_server_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    logs = [tmp_path / f"server{i}.log" for i in range(2)]
    first, second = map(policy_server, logs)
    with first, second:
        before = [requests_served(log) for log in logs]
        run(
            tmp_path / "run",
            first.url,
            second.url,
            launcher=("--nproc_per_node", "2"),
            num_steps=2,
            tasks_per_step=2,
            eval="null",
        )
        after = [requests_served(log) for log in logs]
    steps = [row for row in rows(tmp_path / "run") if "time/step_s" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        print(json.dumps({k: v for k, v in row.items() if k.startswith(("sync/", "time/"))}))
        assert row["rollout/error_frac"] == 0
        assert 0 < row["sync/gap"] < BOUND
        assert (row["sync/change"] > 0) == (row["sync/trainer_change"] > 0)
        assert row["engine/lost_turns"] == row["engine/renewed_servers"] == 0
    records = played(tmp_path / "run")
    assert {record["step"] for record in records} == {1, 2}
    assert len(records) == 2 * 2 * 4  # steps, tasks, rollouts of a group
    turns = [(r["step"] - 1, t["policy_version"]) for r in records for t in r["turns"]]
    assert all(expected == version for expected, version in turns)
    # Both served turns, and each was sent the weights of every version by its own rank alone.
    served = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
    assert all(turns > 8 for turns, _ in served), served
    assert served[0][1] == served[1][1] > 0, served
