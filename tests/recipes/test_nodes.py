"""Two launchers that find each other through a c10d rendezvous, as on two nodes."""

import socket

import pytest

from components.training import checkpoint
from tests.recipes.runs import assert_no_orphans, kill_group, rows, training


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_two_launchers_are_one_run(tune, tmp_path):
    launcher = (
        *("--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d"),
        *("--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", "nodes"),
    )
    settings = training(
        model_dir=tune.model_dir,
        output_dir=tmp_path / "run",
        launcher=launcher,
        num_steps=1,
        save_every=1,
        eval="null",
        warm_start__num_steps=0,
        rollout__num_workers=2,
        sharding__shard_size=1,  # a copy on each "node"
    )
    nodes = [tune.start(*settings) for _ in range(2)]
    try:
        done = [node.communicate(timeout=400) for node in nodes]
    finally:
        for node in nodes:
            kill_group(node)
    assert [node.returncode for node in nodes] == [0, 0], done
    lines = [line for out, _ in done for line in out.splitlines() if line.startswith("step ")]
    assert len(lines) == 1  # one of the two is the main rank
    (row,) = rows(tmp_path / "run")
    assert row["mismatch/kl"] < 1e-6
    assert checkpoint.is_whole(tmp_path / "run/step_1")
    for node in nodes:
        assert_no_orphans(node)
