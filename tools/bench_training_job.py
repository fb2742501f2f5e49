"""What one arm of ``tools/bench_training.py`` is asked to do, and what it answers.

Read by both arms, each in its own environment: nothing but the standard library here.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0
EPS = 0.2
"""Of the ratio's clip, on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Updates of one model on one group of rollouts."""

    arm: str
    """``tree``, ``packed``, ``padded`` or ``trl``."""
    model: str
    """Directory in the Hugging Face layout."""
    prompt: list[int]
    """Token ids that all rollouts share."""
    responses: list[list[int]]
    rewards: list[float]
    dtype: str
    """``bf16`` or ``fp32``."""
    num_updates: int
    """Timed, after one on cut responses that is not."""
    rows_at_once: int = 1
    """TRL: rollouts of a forward pass."""
    checkpoint_activations: bool = False
    """TRL: gradient_checkpointing."""
    product_rates: bool = False
    """Ours: also time the model's matrix products, before the updates and after."""

    def write(self, path: Path) -> Path:
        """To JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path


def read_job(path: Path) -> Job:
    """What :meth:`Job.write` wrote."""
    return Job(**json.loads(path.read_text(encoding="utf-8")))


def rollouts(
    *, prompt: int, responses: list[int], vocab_size: int
) -> tuple[list[int], list[list[int]], list[float]]:
    """Random token ids and rewards; no time depends on which ids they are.

    Args:
        prompt: tokens of the prompt.
        responses: tokens of each response.
        vocab_size: ids are below it.

    Returns:
        The prompt, the responses, and rewards, of which the first and the last half differ.
    """
    draw = random.Random(prompt)
    few = 100  # the first ids are special tokens

    def ids(num: int) -> list[int]:
        return [draw.randrange(few, vocab_size) for _ in range(num)]

    rewards = [float(2 * i >= len(responses)) for i in range(len(responses))]
    return ids(prompt), [ids(num) for num in responses], rewards


class Stopwatch:
    """Wall and CPU seconds of each update."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self._start = (0.0, 0.0)

    def start(self) -> None:
        """An update begins."""
        self._start = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        """It has ended."""
        wall, cpu = self._start
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)


def peak_gib() -> float | None:
    """The most memory this process had resident; None where /proc does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


def answer(path: Path, **found: object) -> None:
    """Write what an arm found."""
    path.write_text(json.dumps(found), encoding="utf-8")
