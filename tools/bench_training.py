"""Time of an update against TRL's, of prefix trees against packing and padding, and of products.

    make bench-venv                                        # TRL, in an environment of its own
    python tools/bench_training.py --json training.json    # 25 minutes on 2 cores
    python tools/bench_training.py --quick

Every arm updates SmolLM2-135M on the same group of eight rollouts of one prompt, in a process of
its own, with the same number of threads; the first update, on cut rollouts, is not counted. Times
are wall clock, and a ratio is of medians.

    speedup_vs_trl_1k_64    TRL's time / ours; prompt of 1,024 tokens, responses of 64
    speedup_vs_trl_5k_512   the same for a prompt of 5,120 and responses of 512
    tree_vs_packed_5k_512   time with every rollout in full, side by side / with prefixes held once
    packed_vs_padded        the same work as padded rows / packed; responses of 32 to 256 tokens
    matmul_share            FLOP/s of our 1k/64 update / FLOP/s of its matrix products by themselves

TRL runs with the settings that suit it best here: of the ways to split the group over forward
passes that are tried (``--quick``: one), the fastest counts. ``--quick`` gives the 5k workload to
the model's first eight layers, in all arms; TRL's update of it takes too long otherwise.
Arms whose first gradient norms differ by more than 5 % have not done the same work: an error.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.models.hf_config import read_raw
from components.models.paths import model_dir
from tools.bench_training_job import Job, rollouts
from tools.memory_probe import slice_directory

GROUP = 8
QUICK_LAYERS = 8
SAME_STEP = 1.05
"""Gradient norms of two arms may differ by this factor: they round in 16 bits."""
ROOT = Path(__file__).parents[1]
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
WORKLOADS = {
    "1k_64": (1024, [64] * GROUP),
    "5k_512": (5120, [512] * GROUP),
    "1k_mixed": (1024, [32 * (n + 1) for n in range(GROUP)]),
}
TRL_SPLITS = {"1k_64": [(1, False), (8, False)], "5k_512": [(1, False)]}
"""(rollouts of a forward pass, gradient_checkpointing) by workload; what fits into 24 GiB."""


class Bench:
    """Runs arms, each in a process of its own.

    Args:
        source: the model's directory.
        trl_python: the interpreter that has TRL, or None.
        dtype: ``bf16`` or ``fp32``.
        quick: short.
        folder: for files that are thrown away.
    """

    def __init__(
        self, source: Path, *, trl_python: Path | None, dtype: str, quick: bool, folder: Path
    ) -> None:
        self.quick, self.dtype, self.folder = quick, dtype, folder
        self.trl_python = trl_python
        self.models = dict.fromkeys(WORKLOADS, source)
        if quick:
            small = slice_directory(source, folder / "few_layers", num_layers=QUICK_LAYERS)
            for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                if (source / name).exists():
                    (small / name).write_bytes((source / name).read_bytes())
            self.models["5k_512"] = small
        self.found: dict[str, dict[str, Any]] = {name: {} for name in WORKLOADS}

    def job(self, workload: str, arm: str, *, num_updates: int) -> Job:
        """The orders of an arm."""
        prompt, responses = WORKLOADS[workload]
        model = self.models[workload]
        ids, answers, rewards = rollouts(
            prompt=prompt, responses=responses, vocab_size=read_raw(model)["vocab_size"]
        )
        return Job(
            arm=arm,
            model=str(model),
            prompt=ids,
            responses=answers,
            rewards=rewards,
            dtype=self.dtype,
            num_updates=num_updates,
            product_rates=workload == "1k_64",
        )

    def ours(self, workload: str, arm: str, *, num_updates: int) -> None:
        """Run one of our arms; times of a second call are added to the first's."""
        job = self.job(workload, arm, num_updates=num_updates)
        found = self._run(Path(sys.executable), "bench_training_ours.py", job)
        before = self.found[workload].get(arm)
        if before is not None:
            for name in ("wall_s", "cpu_s", "grad_norm", "product_flops_per_s"):
                found[name] = before[name] + found[name]
        self._keep(workload, arm, found)

    def trl(self, workload: str, *, num_updates: int) -> None:
        """Run TRL in each way, and keep the fastest."""
        if self.trl_python is None:
            return
        splits = TRL_SPLITS[workload][: 1 if self.quick else None]
        tried = []
        for rows_at_once, checkpoint in splits:
            job = replace(
                self.job(workload, "trl", num_updates=num_updates),
                rows_at_once=rows_at_once,
                checkpoint_activations=checkpoint,
            )
            found = self._run(self.trl_python, "bench_training_trl.py", job)
            found["rows_at_once"], found["gradient_checkpointing"] = rows_at_once, checkpoint
            tried.append(found)
        best = min(tried, key=lambda found: statistics.median(found["wall_s"]))
        self._keep(workload, "trl", best | {"tried": tried if len(tried) > 1 else None})

    def _keep(self, workload: str, arm: str, found: dict[str, Any]) -> None:
        self.found[workload][arm] = found
        norms = {name: each["grad_norm"][0] for name, each in self.found[workload].items()}
        if max(norms.values()) > SAME_STEP * min(norms.values()):
            raise RuntimeError(f"{workload}: gradient norms {norms} are not of the same step")
        times = ", ".join(f"{x:.1f}" for x in found["wall_s"])
        print(f"{workload:<9} {arm:<7} {times} s", flush=True)

    def _run(self, python: Path, script: str, job: Job) -> dict[str, Any]:
        path = job.write(self.folder / "job.json")
        answer = self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        done = subprocess.run(
            [str(python), str(ROOT / "tools" / script), str(path), str(answer)],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0 or not answer.exists():
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise RuntimeError(f"{script} ended with {done.returncode}: {last}")
        return json.loads(answer.read_text(encoding="utf-8"))


def ratio(arms: Mapping[str, Mapping[str, Any]], slow: str, fast: str) -> float | None:
    """Median time of one arm over that of another; None if one did not run."""
    if slow not in arms or fast not in arms:
        return None
    medians = [statistics.median(arms[name]["wall_s"]) for name in (slow, fast)]
    return medians[0] / medians[1]


def matmul_share(arm: Mapping[str, Any]) -> float:
    """Rate of an update over that of its own products, which was taken before and after."""
    rate = sum(arm["flops"].values()) / statistics.median(arm["wall_s"])
    return rate / statistics.mean(arm["product_flops_per_s"])


def measure(bench: Bench) -> dict[str, Any]:
    """All arms, in an order that puts what is compared side by side."""
    start = time.perf_counter()
    for workload in ("1k_64", "5k_512"):
        once = workload == "5k_512"
        bench.ours(workload, "tree", num_updates=1 if once and bench.quick else 3)
        bench.trl(workload, num_updates=1 if once or bench.quick else 2)
        if once:
            bench.ours(workload, "packed", num_updates=1)
        if not bench.quick:
            bench.ours(workload, "tree", num_updates=2)
    if not bench.quick:
        for arm in ("packed", "padded", "tree"):
            bench.ours("1k_mixed", arm, num_updates=2)
    found = bench.found
    return {
        "speedup_vs_trl_1k_64": ratio(found["1k_64"], "trl", "tree"),
        "speedup_vs_trl_5k_512": ratio(found["5k_512"], "trl", "tree"),
        "tree_vs_packed_5k_512": ratio(found["5k_512"], "packed", "tree"),
        "packed_vs_padded": ratio(found["1k_mixed"], "padded", "packed"),
        "matmul_share": matmul_share(found["1k_64"]["tree"]),
        "layers_5k_512": QUICK_LAYERS if bench.quick else "all",
        "quick": bench.quick,
        "dtype": bench.dtype,
        "without_trl": bench.trl_python is None,
        "seconds": time.perf_counter() - start,
        "python": platform.python_version(),
        "arms": found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under six minutes on 2 cores")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, metavar="FILE")
    parser.add_argument("--without-trl", action="store_true", help="our own arms only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    arguments = parser.parse_args(argv)
    python = None if arguments.without_trl else arguments.trl_python
    if python is not None and not python.exists():
        print(
            f"error: --trl-python {python}: not there; `make bench-venv` makes it, --without-trl "
            "leaves it out",
            file=sys.stderr,
        )
        return 1
    try:
        source = model_dir("smollm2-135m-instruct")
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            Bench(
                source,
                trl_python=python,
                dtype=arguments.dtype,
                quick=arguments.quick,
                folder=Path(folder),
            )
        )
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:<24} {value:8.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
