"""How much memory the updates of a config take, before the run.

    python tools/memory_plan.py --config configs/retail.yaml [key=value ...] [--json]
    python tools/memory_plan.py --config configs/retail.yaml --measure
    python tools/memory_plan.py --gpt-oss

The model's first layers are built and take steps, with two and with six layers; what they hold and
allocate grows by the same for every further layer. The six also take steps in a process of its own:
what that has resident at its peak beyond the sum of the parts is ``allocator``, freed memory that
the C library keeps. It is taken to be the same share of the parts in the whole model: the
difference of two such processes would carry their noise over many times. The row is as long as
``tokens_per_batch`` and the engine's cache is full, as they are at worst in an update. Rollouts,
a warm start and checkpoints are not in it. ``--measure`` makes the whole model take two steps and
prints its peak beside the prediction. ``--gpt-oss`` prints tables for LoRA on gpt-oss.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.models.hf_config import read_raw
from components.models.paths import model_dir
from components.training.component import ConfigError, build
from components.training.config import as_dict, load_config
from components.training.precision import settle_dtype
from tools.memory_probe import Setting, Update, head_chunk, measure, slice_directory

HELD = ("weights", "masters", "optimizer", "reference", "engine_copy", "kv_cache")
TRAINED_SHARE = 4
"""One token in so many is trained: rollouts are mostly prompt and what tools answer."""
GIB = 2**30
SLICES = (2, 6)
"""Layers of the two parts of a model. Their number is even, as gpt-oss's windows alternate; further
apart, they would carry less of a process's noise over to the whole, and take longer."""


def setting_of(cfg: Any) -> Setting:
    """What of a grpo_agentic config decides about memory."""
    plain = as_dict(cfg)
    tokens = plain["tokens_per_batch"]
    return Setting(
        model=plain["model"],
        dtype=settle_dtype(cfg),
        optimizer=plain["optimizer"],
        beta=float(plain["loss"].get("beta", 0.0)),
        tokens=tokens,
        trained=max(1, tokens // TRAINED_SHARE),
        chunk=plain["logprob_chunk"],
        max_grad_norm=plain["max_grad_norm"],
        num_workers=plain["rollout"]["num_workers"],
        max_tokens=plain["rollout"]["max_tokens"],
        packed=_packs(plain["engine"]),
    )


def _packs(engine: Mapping[str, Any]) -> bool:
    """Whether an engine decodes from a packed copy of the weights, where it can."""
    ours = str(engine["_component_"]).endswith(".LocalEngine")
    return ours and engine.get("pack_weights", "auto") is not False


def predict(
    setting: Setting, source: Path, *, resident: Callable[[Setting, Path], int] | None = None
) -> dict[str, int]:
    """Bytes of every component, and of the peak, extrapolated from the model's first layers.

    Args:
        setting: of the run.
        source: the model's directory.
        resident: peak of a process that runs these updates of the model in that directory; None:
            :func:`measured_in_a_process`.

    Returns:
        What :func:`memory_probe.measure` says of the whole model, with ``head_chunk`` (a part of
        ``row``), ``process`` (Python and its libraries), ``allocator`` (resident beyond the sum
        of the parts) and ``peak``.
    """
    raw = read_raw(source)
    num_layers = raw["num_hidden_layers"]
    resident = resident or measured_in_a_process
    found = []
    with tempfile.TemporaryDirectory() as folder:
        first = slice_directory(source, Path(folder) / "first", num_layers=1)
        process = process_bytes(setting, first)
        sizes = SLICES if num_layers > SLICES[-1] else (num_layers,)
        for size in sizes:
            part = slice_directory(source, Path(folder) / str(size), num_layers=size)
            found.append(measure(Update(partial(build, setting.model, str(part)), setting)))
        kept = max(0, resident(setting, part) - process - _peak_of_parts(found[-1]))
        share = kept / _peak_of_parts(found[-1])
    plan = found[-1]
    if sizes == SLICES:
        (few, more), (small, large) = found, SLICES
        plan = {
            name: few[name] + (more[name] - few[name]) * (num_layers - small) // (large - small)
            for name in few
        }
    plan["head_chunk"] = head_chunk(raw["vocab_size"], setting)
    plan["process"] = process
    plan["allocator"] = round(share * _peak_of_parts(plan))
    plan["peak"] = process + _peak_of_parts(plan) + plan["allocator"]
    return plan


def _peak_of_parts(plan: Mapping[str, int]) -> int:
    """What torch's allocator has given out at the peak of a step."""
    return sum(plan[name] for name in HELD) + max(plan["row"], plan["step"])


def process_bytes(setting: Setting, directory: Path) -> int:
    """Resident memory of a fresh process of Python and its libraries that has taken a step.

    What they load and set up at a first step is a good part of it, so one is taken, of one layer
    and a few tokens, and given back.
    """
    return in_a_process(run_few, setting, directory)


def run_few(setting: Setting, directory: Path) -> int:
    """What stays resident in this process after a step of a few tokens, in bytes."""
    few = replace(setting, tokens=16, trained=8, num_workers=1, max_tokens=16)
    update = Update(partial(build, setting.model, str(directory)), few)
    update.forward_backward()
    update.optimizer_step()
    del update
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed
    return resident_bytes("VmRSS")


def run_whole(setting: Setting, source: Path) -> int:
    """Peak of this process after two steps of the whole model, in bytes."""
    update = Update(partial(build, setting.model, str(source)), setting)
    for _ in range(2):
        update.forward_backward()
        update.optimizer_step()
    return resident_bytes("VmHWM")


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (at most so far) of this process.

    Raises:
        ValueError: on a system without /proc.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        raise ValueError(f"{field} is read from /proc, which is Linux's")
    for line in status.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def table(plan: Mapping[str, int]) -> str:
    """The components of a plan, one a line."""
    notes = {
        "row": "activations of a row, gradients as they come",
        "step": "all gradients and what the optimizer needs beside them",
        "gradients": "part of both below",
        "head_chunk": "part of row",
        "allocator": "freed, and kept by the C library",
        "peak": "process, what is held, the larger of row and step, allocator",
    }
    order = ("process", *HELD, "gradients", "head_chunk", "row", "step")
    order = (*order, "allocator", "peak")
    return "\n".join(
        f"{name:<12}{plan[name] / GIB:9.3f} GiB  {notes.get(name, '')}".rstrip() for name in order
    )


def in_a_process(run: Callable[[Setting, Path], int], setting: Setting, directory: Path) -> int:
    """What a function returns in a fresh process that does nothing else.

    Raises:
        ValueError: if the process was killed, as it is when memory runs out.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(run, setting, directory).result()
        except BrokenProcessPool as error:
            raise ValueError("the measured process was killed: out of memory?") from error


def measured_in_a_process(setting: Setting, directory: Path) -> int:
    """The peak of a fresh process that does nothing but :func:`run_whole`."""
    return in_a_process(run_whole, setting, directory)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", help="a config of grpo_agentic, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--json", action="store_true", help="bytes, as one JSON object")
    parser.add_argument("--measure", action="store_true", help="and two steps of the whole model")
    parser.add_argument("--gpt-oss", action="store_true", help="tables for gpt-oss-20b and 120b")
    arguments = parser.parse_args(argv)
    try:
        if arguments.gpt_oss:
            from tools.memory_gpt_oss import plans, tables

            found = plans()
            print(json.dumps(found) if arguments.json else tables(found))
            return 0
        if arguments.config is None:
            parser.error("--config or --gpt-oss is needed")
        cfg = load_config(arguments.config, arguments.overrides)
        setting, source = setting_of(cfg), model_dir(cfg.model_dir)
        plan = predict(setting, source)
        if arguments.measure:
            plan["measured"] = measured_in_a_process(setting, source)
    except (ConfigError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(plan))
        return 0
    print(table(plan))
    if "measured" in plan:
        off = plan["peak"] / plan["measured"] - 1
        print(f"{'measured':<12}{plan['measured'] / GIB:9.3f} GiB  the plan is {off:+.1%} off")
    return 0


if __name__ == "__main__":
    sys.exit(main())
