"""Sampling: the local engine beside transformers' generate() and vLLM, on the same work.

    python tools/bench_engine.py [--quick] [--against ENGINE ...] [--json FILE]

Rollouts that share a prefix of 1,000 or 5,000 tokens play 4 turns: 200 tokens of a tool result,
then 64 sampled ones. SmolLM2-135M, bf16, on this machine's CPU, all in one run and with the same
number of threads. The keys of the JSON file:

    speedup_vs_transformers_1k, _5k   tokens per second over those of transformers, which computes
                                      each turn's whole contexts, once per call
    speedup_vs_kept_cache_1k, _5k     the same where its cache is kept from turn to turn
    speedup_vs_vllm_1k, _5k           over those of vLLM on the CPU, its prefix cache on; null where
                                      was not measured (`make vllm`, or VLLM_VENV)
    vllm_missing                      why it was not measured; null if it was
    bandwidth_share                   decode steps of 8 rollouts at the 1k prefix: the time to read
                                      the weights once, over the time that a step took
    own_key_us                        time that a step and rollout takes for each token the rollout
                                      has of its own: slope over the turns
    prefix_cost_5k                    a decode step of the last turn at the 5k prefix over one at 1k
    setting                           what all engines had alike: dtype, threads, weights in MB
    runs                              each run: its turns in seconds, tokens per second

Where there are runs with 8 and with 32 rollouts, a key is the smaller of the two ratios. Nothing
but sampled tokens is counted, while all that was done is timed, the prefix included. A key of an
engine that ``--against`` leaves out is null.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.models.paths import model_dir
from components.models.smollm2 import smollm2
from tools.bench_engine_runs import Run, Transformers, Work, bandwidth_gb_s, run_local, run_vllm
from tools.serve_vllm import VllmServer, vllm_command

OTHERS = ("transformers", "kept_cache", "vllm")
GOALS = {
    "speedup_vs_transformers_1k": 8.0,
    "speedup_vs_transformers_5k": 8.0,
    "speedup_vs_vllm_1k": 2.0,
    "speedup_vs_vllm_5k": 2.0,
    "bandwidth_share": 0.3,
}
SIZES = {"1k": 1000, "5k": 5000}
Runs = dict[str, dict[Work, Run]]
"""By engine, then by work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the command line asks for."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    sizes = {"1k": SIZES["1k"]} if options.quick else SIZES
    rollouts, turns = ((8,), 2) if options.quick else ((8, 32), 4)
    works = [
        Work(rollouts=number, prefix=prefix, turns=turns)
        for prefix in sizes.values()
        for number in rollouts
    ]
    bandwidth = bandwidth_gb_s()
    print("memory, GB/s: " + ", ".join(f"{k} {v:.1f}" for k, v in bandwidth.items()))
    runs: Runs = {}
    directory = model_dir(options.model)
    model = smollm2(directory, dtype=torch.bfloat16)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    _measure(runs, "local", works, lambda work: run_local(model, work))
    _measure_transformers(runs, works, directory, options.against)
    missing = None
    if "vllm" in options.against:
        missing = _measure_vllm(runs, works, directory, threads=options.threads)
    figures = summary(runs, bandwidth=max(bandwidth.values()), weight_bytes=weight_bytes)
    print_figures(figures)
    if options.json is not None:
        figures["vllm_missing"] = None if missing is None else missing.why
        figures["setting"] = {
            "dtype": "bf16",
            "threads": options.threads,
            "weights_mb": weight_bytes / 1e6,
        }
        figures["bandwidth_gb_s"] = bandwidth
        figures["runs"] = [_record(name, *pair) for name in runs for pair in runs[name].items()]
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if missing is not None and missing.failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="8 rollouts, 1k prefix, 2 turns: under 6 minutes"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        choices=OTHERS,
        default=OTHERS,
        help="engines to compare with (all): in the long form transformers takes about an hour",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="directory, cached name")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of every engine"
    )
    return parser.parse_args(arguments)


def _measure(runs: Runs, name: str, works: Sequence[Work], run: Callable[[Work], Run]) -> None:
    """Run each work once, after a small one that pays for what a first call needs."""
    run(Work(rollouts=2, prefix=40, turns=2, new_tokens=4, seed=1))
    runs[name] = {}
    for work in works:
        runs[name][work] = found = run(work)
        print(
            f"{name:13}{work.rollouts:3} rollouts, prefix {work.prefix}: "
            f"{work.sampled / found.total_s:8.1f} tokens/s, turns of "
            + " ".join(f"{seconds:.1f}" for seconds in found.turn_s)
            + " s",
            flush=True,
        )


def _measure_transformers(
    runs: Runs, works: Sequence[Work], directory: Path, against: Sequence[str]
) -> None:
    """With and without its cache kept; its copy of the model is gone afterwards."""
    wanted = [name for name in ("transformers", "kept_cache") if name in against]
    if not wanted:
        return
    theirs = Transformers(directory, dtype=torch.bfloat16)
    for name in wanted:
        _measure(runs, name, works, partial(theirs.run, keep_cache=name == "kept_cache"))


class Missing(NamedTuple):
    """Why there are no figures of an engine."""

    why: str
    failed: bool
    """It was there and did not do the work."""


def _measure_vllm(
    runs: Runs, works: Sequence[Work], directory: Path, *, threads: int
) -> Missing | None:
    """vLLM's server with its prefix cache (its default).

    Returns:
        What kept it from being measured: it is said, and what the others measured is not lost.
    """
    try:
        command = vllm_command()
    except FileNotFoundError as error:
        print(f"vllm: not measured, {error}")
        return Missing(str(error), failed=False)
    # vLLM's own default where serve_vllm.py has another, chunked prefill; room for every context.
    longest = max(work.context for work in works)
    args = ("--enable-scale-out", "--enable-chunked-prefill", "--max-model-len", str(longest + 1))
    handle, name = tempfile.mkstemp(prefix="vllm", suffix=".log")
    os.close(handle)
    try:
        with VllmServer(
            directory,
            log=Path(name),
            command=command,
            args=args,
            env={"OMP_NUM_THREADS": str(threads)},
            start_timeout_s=900.0,
        ) as server:
            url = f"http://127.0.0.1:{server.port}"
            _measure(runs, "vllm", works, lambda work: run_vllm(url, server.model, work))
    except (OSError, RuntimeError) as error:
        runs.pop("vllm", None)
        print(f"vllm: failed, its log is {name}: {error}", file=sys.stderr)
        return Missing(str(error), failed=True)
    Path(name).unlink()
    return None


def summary(runs: Runs, *, bandwidth: float, weight_bytes: int) -> dict[str, Any]:
    """The figures of the JSON file.

    Args:
        runs: of which ``local`` is one engine.
        bandwidth: of the memory, GB/s.
        weight_bytes: read in each decode step.
    """
    figures: dict[str, Any] = {}
    for size, prefix in SIZES.items():
        for name in OTHERS:
            ratios = [
                run.total_s / runs["local"][work].total_s
                for work, run in runs.get(name, {}).items()
                if work.prefix == prefix
            ]
            figures[f"speedup_vs_{name}_{size}"] = min(ratios, default=None)
    last = {(w.rollouts, w.prefix): run.decode_step_s[-1] for w, run in runs["local"].items()}
    work, run = next(
        pair
        for pair in runs["local"].items()
        if (pair[0].rollouts, pair[0].prefix) == (8, SIZES["1k"])
    )
    steps = run.decode_step_s
    read_s = weight_bytes / (bandwidth * 1e9)
    figures["bandwidth_share"] = read_s / (sum(steps) / len(steps))
    own = work.observation + work.new_tokens
    slope = (steps[-1] - steps[0]) / ((len(steps) - 1) * own * work.rollouts)
    figures["own_key_us"] = 1e6 * slope
    at_5k = last.get((8, SIZES["5k"]))
    figures["prefix_cost_5k"] = None if at_5k is None else at_5k / last[8, SIZES["1k"]]
    return figures


def print_figures(figures: dict[str, Any]) -> None:
    """One line each, with its goal where it has one."""
    for name, value in figures.items():
        goal = f"   goal {GOALS[name]:g}" if name in GOALS else ""
        print(f"{name:28}" + ("     null" if value is None else f"{value:9.3f}") + goal)


def _record(name: str, work: Work, run: Run) -> dict[str, Any]:
    return {
        "engine": name,
        "rollouts": work.rollouts,
        "prefix": work.prefix,
        "turn_s": run.turn_s,
        "decode_step_s": run.decode_step_s,
        "tokens_per_s": work.sampled / run.total_s,
    }


if __name__ == "__main__":
    sys.exit(main())
