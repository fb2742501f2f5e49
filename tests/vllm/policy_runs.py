"""The policy behind a real vLLM server, and runs of the recipe that sample from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from components.models.paths import model_dir
from tests.recipes.runs import arguments, kill_group
from tools.serve_vllm import ROOT, VllmServer

BOUND = 0.15
"""Nats per token between the server's bfloat16 and ours; 0.05 to 0.09 were seen."""
SMALL = {
    "tokens_per_batch": 2048,
    "model.checkpoint_activations": "true",
    "loss.beta": 0.0,
    "rollout.num_workers": 4,
    "rollout.max_turns": 6,
    "tasks_per_step": 1,
}
"""Two gigabytes beside the server's three."""


def policy_server(log: Path, *args: str) -> VllmServer:
    """SmolLM2 as `configs/vllm_mock.yaml` wants it served; not started."""
    return VllmServer(
        model_dir("smollm2-135m-instruct"),
        log=log,
        start_timeout_s=600.0,
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        },
        args=(
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
            *("--max-model-len", "2048", *args),
        ),
    )


def run(
    output_dir: Path, *urls: str, code: int | None = 0, launcher: tuple[str, ...] = (), **keys: Any
) -> str:
    """The recipe through the command, as a user calls it; what it wrote to stderr."""
    keys = {name.replace("__", "."): value for name, value in keys.items()}
    keys = SMALL | {"output_dir": output_dir, "engine.addresses": f"[{','.join(urls)}]"} | keys
    command = [sys.executable, "-m", "components.cli"]
    command += arguments(config="configs/vllm_mock.yaml", launcher=launcher, **keys)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, err = process.communicate(timeout=1800)
    except BaseException:
        kill_group(process)
        raise
    print(err)
    assert process.returncode == code if code is not None else process.returncode, err
    return err
