"""The same sampling work done by the local engine, by transformers and by vLLM.

``R`` rollouts begin with one shared prefix. In each turn every rollout gets an observation (a tool
result) and samples new tokens; end tokens are ignored, so that all do the same number of steps.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.models.decoder import PolicyModel
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest

IDS = range(100, 40_000)
"""Ordinary tokens of SmolLM2: what they say changes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Several rollouts in rounds."""

    rollouts: int
    prefix: int
    """Tokens that all rollouts start with."""
    turns: int
    observation: int = 200
    """Tokens that a rollout gets before each of its turns."""
    new_tokens: int = 64
    """Tokens that it samples in a turn."""
    seed: int = 0
    """Of the ids: another seed, other prefixes."""

    @property
    def sampled(self) -> int:
        """Tokens sampled in all."""
        return self.rollouts * self.turns * self.new_tokens

    @property
    def context(self) -> int:
        """Tokens of a rollout at its end."""
        return self.prefix + self.turns * (self.observation + self.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine's time for a :class:`Work`."""

    turn_s: tuple[float, ...]
    decode_step_s: tuple[float, ...] = ()
    """Mean time of a decode step in each turn, where the engine tells it apart."""

    @property
    def total_s(self) -> float:
        return sum(self.turn_s)


Ask = Callable[[Sequence[list[int]], int], list[Sequence[int]]]
"""``ask(contexts, turn)`` gives the new ids of each context."""


def play(work: Work, ask: Ask) -> tuple[float, ...]:
    """Seconds of each turn."""
    rng = random.Random(work.seed)
    shared = rng.choices(IDS, k=work.prefix)
    contexts = [list(shared) for _ in range(work.rollouts)]
    times = []
    for turn in range(work.turns):
        for context in contexts:
            context += rng.choices(IDS, k=work.observation)
        begin = time.perf_counter()
        answers = ask(contexts, turn)
        times.append(time.perf_counter() - begin)
        for context, ids in zip(contexts, answers, strict=True):
            assert len(ids) == work.new_tokens, "every engine samples the same number of tokens"
            context += ids
    return tuple(times)


def run_local(model: PolicyModel, work: Work) -> Run:
    """Our engine, from empty caches.

    Args:
        model: bf16 or fp32.
        work: what to do.
    """
    engine = LocalEngine(model, max_tokens=work.context + 1, max_batch_size=work.rollouts)
    steps: list[float] = []

    def ask(contexts: Sequence[list[int]], turn: int) -> list[Sequence[int]]:
        requests = [
            SampleRequest(
                rollout_id=str(index),
                context=tuple(context),
                shared_len=work.prefix,
                max_new_tokens=work.new_tokens,
                stop_ids=frozenset(),
                temperature=1.0,
                seed=turn * work.rollouts + index,
            )
            for index, context in enumerate(contexts)
        ]
        spent, done = engine.stats.decode_time_s, engine.stats.decode_steps
        results = engine.generate(requests)
        stats = engine.stats
        steps.append((stats.decode_time_s - spent) / max(1, stats.decode_steps - done))
        return [result.ids for result in results]

    return Run(turn_s=play(work, ask), decode_step_s=tuple(steps))


class Transformers:
    """``generate()`` of transformers: one padded batch, its own KV cache, fused attention (sdpa).

    Args:
        directory: of the model.
        dtype: of its weights.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa"
        )
        self._model.generation_config.eos_token_id = None  # every turn has its full length
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, work: Work, *, keep_cache: bool) -> Run:
        """Do the work.

        Args:
            work: what to do.
            keep_cache: False: each turn computes its whole contexts, as one who calls
                ``generate()`` for each turn gets it. True: the cache goes on from turn to turn,
                which needs contexts of equal length, as these are. The prefix is computed for each
                rollout in both.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)

        def ask(contexts: Sequence[list[int]], turn: int) -> list[Sequence[int]]:
            longest = max(map(len, contexts))
            padding = [longest - len(context) for context in contexts]  # on the left
            rows = [[0] * n + c for n, c in zip(padding, contexts, strict=True)]
            mask = [[0] * n + [1] * (longest - n) for n in padding]
            model: Any = self._model
            out = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                **({"past_key_values": cache} if keep_cache else {}),
                max_new_tokens=work.new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            return out[:, longest:].tolist()

        return Run(turn_s=play(work, ask))


def run_vllm(url: str, model: str, work: Work) -> Run:
    """A vLLM server with its prefix cache: the requests of a turn at once, ids in and ids out.

    Args:
        url: address of the server, without a path.
        model: its name of the model.
        work: what to do.

    Raises:
        OSError: it does not answer, or refuses.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def post(context: list[int]) -> list[int]:
        body = {
            "model": model,
            "token_ids": context,
            "sampling_params": {
                "max_tokens": work.new_tokens,
                "temperature": 1.0,
                "ignore_eos": True,
                "logprobs": 0,  # of the sampled token: what a trainer needs
            },
        }
        request = urllib.request.Request(
            f"{url}/inference/v1/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with opener.open(request, timeout=3600) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    with ThreadPoolExecutor(work.rollouts) as pool:
        return Run(turn_s=play(work, lambda contexts, _: list(pool.map(post, contexts))))


def bandwidth_gb_s(*, num_bytes: int = 1 << 28, repeats: int = 5) -> dict[str, float]:
    """What the memory delivers to this process's threads, in GB/s.

    Args:
        num_bytes: of the array: far more than a cache holds.
        repeats: the best of them counts.

    Returns:
        By pattern: ``copy`` (bytes read and written), ``sum`` and ``product`` with a vector (bytes
        read).
    """
    matrix = torch.ones(num_bytes // 4096, 1024)
    other, vector = torch.empty_like(matrix), torch.ones(1024)
    patterns: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: other.copy_(matrix)),
        "sum": (1, matrix.sum),
        "product": (1, lambda: torch.mv(matrix, vector)),
    }
    found = {}
    for name, (passes, act) in patterns.items():
        act()
        best = float("inf")
        for _ in range(repeats):
            begin = time.perf_counter()
            act()
            best = min(best, time.perf_counter() - begin)
        found[name] = passes * matrix.nbytes / best / 1e9
    return found
