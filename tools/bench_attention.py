"""Sink attention against eager and plain fused attention: time and peak memory, forward + backward.

    python tools/bench_attention.py [--quick] [--json FILE] [--plot FILE]

The arms, on the same inputs, timed in turn within one run:
- eager: softmax with a sink column over dense scores, as transformers' gpt-oss does it;
- fused: torch's scaled_dot_product_attention, causal, **without** a sink: the lower bound;
- folded, flex, reference: our backends, with the sink. flex trains on CUDA only.

Peak memory is the inputs and the most that was allocated beside them in one forward and backward.
The default heads are an eighth of a gpt-oss layer. With ``--model`` the same is asked of a whole
gpt-oss: a tiny one on a CPU, the shape of the 20b on CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tools import bench_model
from tools.bench_cases import Measured, Shape, make_arms, make_inputs, measure, time_ratio

WINDOW = 127  # gpt-oss: 128 keys with the query's own
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (1024, 4096, 8192, 32768)
LONGEST = 131072  # with a window only: full causal attention takes minutes there


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure of the run and what it should be."""

    key: str
    """Its key in the JSON file."""
    bound: float
    """Where it should be..."""
    at_least: bool
    """...this or more; else this or less."""

    def reached(self, value: float) -> bool:
        """Whether ``value`` is on the right side of the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


GOALS = (
    Goal(key="speedup_vs_eager_4096", bound=8, at_least=True),
    Goal(key="speedup_vs_eager_8192", bound=20, at_least=True),
    Goal(key="memory_ratio_vs_eager_4096", bound=10, at_least=True),
    Goal(key="memory_ratio_vs_eager_8192", bound=20, at_least=True),
    Goal(key="time_ratio_vs_fused_4096", bound=1.15, at_least=False),
    Goal(key="time_ratio_vs_fused_8192", bound=1.15, at_least=False),
    Goal(key="window127_speedup_vs_full_32768", bound=20, at_least=True),
    # 131,072 tokens take 16 times the memory of 8,192: linear, with nothing of size T x T.
    Goal(key="window127_memory_131072_over_8192", bound=16.5, at_least=False),
)

Results = dict[tuple[int, str, str], Measured]
"""(tokens, mask, arm) -> figures."""


def run_all(
    lengths: Sequence[int],
    *,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    quick: bool,
    max_dense: int,
) -> Results:
    """Measure every arm at every length, causal and with the window.

    Args:
        lengths: tokens.
        shape: heads.
        dtype: of q, k and v.
        device: where to run.
        quick: fewer rounds; an arm slower than five seconds has one pass.
        max_dense: most tokens for the eager arm.
    """
    results: Results = {}
    for num_tokens in lengths:
        for window in (None, WINDOW):
            if window is None and num_tokens >= LONGEST:
                continue
            inputs = make_inputs(num_tokens, shape=shape, dtype=dtype, device=device)
            arms = make_arms(
                inputs,
                window=window,
                max_dense=max_dense if window is None or not quick else 0,
                max_reference=1024 if quick else 4096,
            )
            measured = measure(
                arms,
                inputs,
                slow_s=5.0 if quick else 10.0,
                budget_s=6.0 if quick else 20.0,
                max_rounds=7 if quick else 15,
            )
            mask = "causal" if window is None else f"window {window}"
            for arm, figures in measured.items():
                results[num_tokens, mask, arm] = figures
                print(_line(num_tokens, mask, arm, figures, measured), flush=True)
    return results


def _line(
    num_tokens: int, mask: str, arm: str, figures: Measured, beside: dict[str, Measured]
) -> str:
    versus = [
        f"{time_ratio(figures, beside[other]):9.2f}x" if other in beside else f"{'-':>10}"
        for other in ("eager", "fused")
    ]
    forward, backward = (
        1e3 * statistics.median(x) for x in (figures.forward_s, figures.backward_s)
    )
    return (
        f"{num_tokens:>7,} {mask:<10} {arm:<9} {forward:>11.1f} {backward:>11.1f} "
        f"{figures.peak_bytes / 2**20:>10.1f} {' '.join(versus)} {len(figures.total_s):>6}"
    )


HEADER = (
    f"{'tokens':>7} {'mask':<10} {'arm':<9} {'forward ms':>11} {'backward ms':>11} "
    f"{'peak MiB':>10} {'vs eager':>10} {'vs fused':>10} {'passes':>6}"
)


def summary(results: Results, *, backend: str) -> dict[str, float]:
    """The figures of :data:`GOALS`, as far as they were measured.

    Args:
        results: of :func:`run_all`.
        backend: which of ours they are about.
    """
    found: dict[str, float] = {}
    for num_tokens in (4096, 8192):
        ours, eager, fused = (
            results.get((num_tokens, "causal", arm)) for arm in (backend, "eager", "fused")
        )
        if ours and eager:
            found[f"speedup_vs_eager_{num_tokens}"] = time_ratio(eager, ours)
            found[f"memory_ratio_vs_eager_{num_tokens}"] = eager.peak_bytes / ours.peak_bytes
        if ours and fused:
            found[f"time_ratio_vs_fused_{num_tokens}"] = time_ratio(ours, fused)
    windowed = f"window {WINDOW}"
    full, near = (results.get((32768, mask, backend)) for mask in ("causal", windowed))
    if full and near:
        found["window127_speedup_vs_full_32768"] = time_ratio(full, near)
    long, short = (results.get((n, windowed, backend)) for n in (LONGEST, 8192))
    if long and short:
        found["window127_memory_131072_over_8192"] = long.peak_bytes / short.peak_bytes
    return found


def print_goals(found: dict[str, float], *, bounds: dict[str, float]) -> None:
    """One line per goal: the figure, the bound, and whether it was reached.

    Args:
        found: figures of our backend.
        bounds: the same figures of plain fused attention, which has no sink: what they could be.
    """
    print(f"\n{'goal':<36} {'measured':>9} {'wanted':>9}")
    for goal in GOALS:
        wanted = f"{'>=' if goal.at_least else '<='} {goal.bound:g}"
        if goal.key not in found:
            print(f"{goal.key:<36} {'-':>9} {wanted:>9}  not measured")
            continue
        word = "reached" if goal.reached(found[goal.key]) else "MISSED"
        if goal.key in bounds and "_vs_eager_" in goal.key:
            word += f" (plain fused attention: {bounds[goal.key]:.2f})"
        print(f"{goal.key:<36} {found[goal.key]:>9.2f} {wanted:>9}  {word}")


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were taken on; a load above the number of threads spoils them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "device": name or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "load_1_min": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def as_rows(results: Results) -> list[dict[str, Any]]:
    """One flat record per figure, every pass included."""
    return [
        {"tokens": num_tokens, "mask": mask, "arm": arm, **asdict(figures)}
        for (num_tokens, mask, arm), figures in results.items()
    ]


def plot(results: Results, path: Path) -> None:
    """Time and peak memory over length, one line per arm and mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5))
    colours = {"eager": "C3", "fused": "C7", "folded": "C0", "flex": "C2", "reference": "C1"}
    for mask, arm in dict.fromkeys((mask, arm) for _, mask, arm in results):
        points = {n: x for (n, m, a), x in results.items() if (m, a) == (mask, arm)}
        style = {"color": colours[arm], "marker": "o", "ms": 3, "label": f"{arm}, {mask}"}
        style["ls"] = "-" if mask == "causal" else "--"
        seconds = [statistics.median(x.total_s) for x in points.values()]
        panels[0].loglog(list(points), seconds, **style)
        panels[1].loglog(list(points), [x.peak_bytes / 2**20 for x in points.values()], **style)
    panels[0].set(xlabel="tokens", ylabel="forward + backward, s", xscale="log")
    panels[1].set(xlabel="tokens", ylabel="peak memory, MiB")
    ticks = sorted({n for n, _, _ in results})
    for panel in panels:
        panel.set_xticks(ticks, [f"{n // 1024}k" for n in ticks], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[1].legend(fontsize=7, handlelength=4)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under 5 minutes on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them (PNG)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help="other lengths")
    parser.add_argument("--heads", type=int, nargs=3, default=(8, 2, 64), metavar=("N", "K", "H"))
    parser.add_argument(
        "--max-dense", type=int, default=8192, help="most tokens of the eager arm (default 8192)"
    )
    parser.add_argument("--model", action="store_true", help="the whole-model study as well")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Args:
        argv: command line; None for the process's.
    """
    args = _arguments(argv)
    device = torch.device(args.device)
    num_heads, num_kv_heads, head_dim = args.heads
    shape = Shape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]
    lengths = args.lengths or [*(QUICK_LENGTHS if args.quick else LENGTHS), LONGEST]
    about = machine(device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(
        f"{num_heads} query heads, {num_kv_heads} key heads of {head_dim}, {args.dtype}\n{HEADER}"
    )
    results = run_all(
        lengths,
        shape=shape,
        dtype=dtype,
        device=device,
        quick=args.quick,
        max_dense=args.max_dense,
    )
    backend = "flex" if device.type == "cuda" else "folded"
    found = summary(results, backend=backend)
    print_goals(found, bounds=summary(results, backend="fused"))
    report: dict[str, Any] = {**found, "machine": about, "shape": asdict(shape)}
    report |= {"dtype": args.dtype, "rows": as_rows(results)}
    if args.model:
        report["model"] = bench_model.run_study(device=device, backend=backend)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(results, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
