"""Our arms of ``tools/bench_training.py``, and the arithmetic of an update.

    python tools/bench_training_ours.py JOB.json ANSWER.json

An update is what the recipe does from rewards to new weights: advantages, packing, masks, forward,
loss, backward, clipping, AdamW on fp32 master weights, and the weights in the model's dtype.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.attention.plan import MaskPlan
from components.models.decoder import ModelConfig
from components.models.smollm2 import smollm2
from components.rl.advantages import group_advantages
from components.rl.aggregate import Aggregation
from components.rl.importance import Importance
from components.rl.losses import GRPOLoss
from components.rl.objective import Objective
from components.rl.packing import PackedBatch, PackItem, pack
from components.rollout.types import Author, Tokens
from components.training import parallelize
from components.training.parallelize import World
from components.training.policy_update import PolicyUpdate
from components.training.precision import DTYPES, MasterWeights
from components.training.update import UpdateSettings
from tools.bench_training_job import (
    EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Job,
    Stopwatch,
    answer,
    peak_gib,
    read_job,
)

LONGEST_ROW = 16384
LOGPROB_CHUNK = 256
WARM_UP_TOKENS = 8
PROBES = 5
"""Times that each product is taken, before the updates and after; the median counts."""


def rows_of(job: Job, *, cut: int | None = None) -> list[PackedBatch]:
    """The rows of an update, as the arm packs them.

    Args:
        job: with the rollouts.
        cut: so many tokens of the prompt and of each response only.
    """
    prompt = job.prompt[:cut]
    advantages = group_advantages([job.rewards], normalize_std=False).values[0]
    items = [
        PackItem(tokens=_tokens(prompt, ids[:cut]), advantage=value or 0.0, key=f"{number:03}")
        for number, (ids, value) in enumerate(zip(job.responses, advantages, strict=True))
    ]
    longest = max(len(item.tokens) for item in items)
    if job.arm == "tree":
        return pack(items, tokens_per_batch=LONGEST_ROW)
    if job.arm == "packed":
        return pack(items, tokens_per_batch=LONGEST_ROW, share=False)
    return pack(items, tokens_per_batch=longest, share=False, pad_to_multiple=longest)


def _tokens(prompt: list[int], response: list[int]) -> Tokens:
    num, trained = len(prompt), len(response)
    return Tokens(
        ids=(*prompt, *response),
        authors=(Author.USER,) * num + (Author.ASSISTANT,) * trained,
        loss_mask=(0,) * num + (1,) * trained,
        generator_logprobs=(0.0,) * num + (-1.0,) * trained,
        policy_versions=(0,) * (num + trained),
    )


def flops(config: ModelConfig, rows: list[PackedBatch]) -> dict[str, float]:
    """Multiplications and additions of one update, forward and backward, nothing computed twice.

    Attention counts the pairs of tokens that see each other.

    Args:
        config: of the model.
        rows: packed.
    """
    heads = config.num_heads * config.head_dim
    products = _layer_weights(config) * config.num_layers
    tokens = sum(len(row.tokens) for row in rows)
    pairs = sum(_pairs(row) for row in rows)
    trained = sum(len(row.index) for row in rows)
    return {
        "layers": 6.0 * products * tokens,
        "attention": 12.0 * heads * config.num_layers * pairs,
        "head": 6.0 * config.embed_dim * config.vocab_size * trained,
    }


def _pairs(row: PackedBatch) -> int:
    """A token sees what is before it in its own rollout, and itself."""
    return int((row.position + 1).sum())


def _shapes(config: ModelConfig) -> list[tuple[int, int, int]]:
    """(in, out, how many) of a layer's projections."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width, ffn = config.embed_dim, config.ffn_dim
    return [
        (width, heads, 1),
        (width, kv, 2),
        (heads, width, 1),
        (width, ffn, 2),
        (ffn, width, 1),
    ]


def _layer_weights(config: ModelConfig) -> int:
    return sum(rows * columns * many for rows, columns, many in _shapes(config))


def product_rate(config: ModelConfig, *, tokens: int, trained: int, dtype: torch.dtype) -> float:
    """FLOP/s of the model's own matrix products, each weighted by its share of the work.

    All FLOPs of an update's products over the seconds that they take by themselves: each
    projection's three (forward, gradient of the input, of the weight) at the row's size, and the
    head's on a chunk of trained tokens.

    Args:
        config: of the model.
        tokens: in a row.
        trained: of them, with logits.
        dtype: of the products.
    """
    cases = [
        (tokens, rows, columns, many * config.num_layers) for rows, columns, many in _shapes(config)
    ]
    chunks = -(-trained // LOGPROB_CHUNK)
    cases.append((min(LOGPROB_CHUNK, trained), config.embed_dim, config.vocab_size, chunks))
    total = seconds = 0.0
    for num, rows, columns, many in cases:
        x = torch.randn(num, rows, dtype=dtype)
        weight = torch.randn(columns, rows, dtype=dtype)
        grad = torch.randn(num, columns, dtype=dtype)
        products = (partial(torch.mm, x, weight.T), partial(torch.mm, grad, weight))
        for product in (*products, partial(torch.mm, grad.T, x)):
            product()
            seconds += many * statistics.median(_seconds(product) for _ in range(PROBES))
            total += many * 2.0 * num * rows * columns
    return total / seconds


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run(job: Job) -> dict[str, object]:
    """Take the updates of a job and time them."""
    dtype = DTYPES[job.dtype]
    model, _ = parallelize.build_policy(partial(smollm2, job.model), World.alone(), dtype=dtype)
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    update = PolicyUpdate(
        model,
        masters,
        optimizer,
        objective=Objective(
            loss=GRPOLoss(eps_low=EPS, eps_high=EPS, beta=0.0),
            aggregation=Aggregation(),
            importance=Importance(cap=None),
        ),
        reference=None,
        settings=UpdateSettings(
            temperature=1.0, logprob_chunk=LOGPROB_CHUNK, max_grad_norm=MAX_GRAD_NORM
        ),
        world=World.alone(),
    )

    def step(cut: int | None = None) -> tuple[float, list[PackedBatch]]:
        rows = rows_of(job, cut=cut)
        planned = [(row, MaskPlan.from_tree(row.tree)) for row in rows]
        metrics, _ = update(
            planned,
            check_stop=lambda: None,
            model_metrics=dict,
            dump=Path("not-finite.pt"),
        )
        return metrics["train/grad_norm"], rows

    step(WARM_UP_TOKENS)
    longest = max(rows_of(job), key=lambda row: len(row.tokens))
    rate = partial(
        product_rate,
        model.config,
        tokens=len(longest.tokens),
        trained=len(longest.index),
        dtype=dtype,
    )
    rates = [rate()] if job.product_rates else []
    watch, norms, rows = Stopwatch(), [], []
    for _ in range(job.num_updates):
        watch.start()
        norm, rows = step()
        watch.stop()
        norms.append(norm)
    rates += [rate()] if job.product_rates else []
    return {
        "wall_s": watch.wall_s,
        "cpu_s": watch.cpu_s,
        "grad_norm": norms,
        "tokens": sum(len(row.tokens) for row in rows),
        "rows": len(rows),
        "flops": flops(model.config, rows),
        "product_flops_per_s": rates,
        "peak_gib": peak_gib(),
        "versions": {"torch": torch.__version__},
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Read the job, train, answer."""
    answer(Path(sys.argv[2]), **run(read_job(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
