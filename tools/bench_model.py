"""The whole-model study of ``tools/bench_attention.py``: one training step, eager against ours.

The same weights and tokens; only the attention backend differs. ``eager`` is our backend
``reference``: dense scores with a sink column, in fp32. The step is forward, log-probabilities of
the last quarter of the tokens (chunked over the vocabulary, as in training) and backward, layers
checkpointed, one row that is one rollout. Attention and sinks are trained, the rest is frozen.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from components.attention.plan import MaskPlan
from components.rl.logprobs import chunked_logprobs
from tools.bench_cases import peak_allocated

Build = Callable[[str], nn.Module]
"""Backend -> a model called like :class:`components.models.decoder.PolicyModel`."""

TINY: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "embed_dim": 256,
    "ffn_dim": 256,
    "num_experts": 4,
    "experts_per_token": 2,
    "vocab_size": 2048,
}
"""Every feature of gpt-oss, small enough for a CPU."""

SLOW_S = 3.0
"""A step longer than this is taken once."""


def gpt_oss_builder(device: torch.device) -> Build:
    """The builder of the study: a tiny gpt-oss on a CPU, the shape of the 20b on CUDA.

    Weights are random: neither time nor memory of a step depends on them, but for the routing.

    Args:
        device: where the model goes.
    """
    from components.models.gpt_oss import GPT_OSS_20B, GptOssConfig, random_gpt_oss

    config = GPT_OSS_20B if device.type == "cuda" else GptOssConfig(**TINY)

    def build(backend: str) -> nn.Module:
        return random_gpt_oss(
            config,
            dtype=torch.bfloat16,
            device=device,
            backend=backend,
            checkpoint_activations=True,
        )

    return build


def train_attention_only(model: nn.Module) -> list[nn.Parameter]:
    """Freeze all but attention, and return what is left: the 20b's experts do not fit twice."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn." in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("the model has no parameter with '.attn.' in its name: nothing to train")
    return trained


def make_step(model: nn.Module, num_tokens: int, *, device: torch.device) -> Callable[[], None]:
    """One training step without optimizer; gradients are dropped at its end.

    Args:
        model: called like ``PolicyModel``.
        num_tokens: length of the row.
        device: where the model is.
    """
    trained = train_attention_only(model)
    generator = torch.Generator().manual_seed(0)
    num_ids = model.get_parameter("tok_embeddings.weight").shape[0]
    tokens = torch.randint(num_ids, (1, num_tokens), generator=generator).to(device)
    positions = torch.arange(num_tokens, device=device)[None]
    index = torch.arange(num_tokens - num_tokens // 4 - 1, num_tokens - 1, device=device)
    plan = MaskPlan.causal(num_tokens)

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logprobs, _ = chunked_logprobs(
            hidden,
            weight,
            targets=tokens[0, index + 1],
            temperature=1.0,
            compute_entropy=False,
        )
        return logprobs

    def step() -> None:
        logprobs = model(tokens, mask=plan, input_pos=positions, index=index, head=head)
        torch.autograd.grad(-logprobs.mean(), trained, allow_unused=False)

    return step


def study(
    build: Build,
    *,
    lengths: Sequence[int],
    device: torch.device,
    backend: str,
) -> list[dict[str, Any]]:
    """Time and peak memory of a step, per backend and length.

    Args:
        build: makes the model.
        lengths: tokens of the row.
        device: where to run.
        backend: ours, against ``reference``.

    Returns:
        One record each: arm, tokens, step_s (three passes after the one whose memory is taken, or
        that one if it was slow), peak_bytes (parameters included). Both are None where the device
        ran out of memory, which is a result and not an error.
    """
    records = []
    for arm, name in (("eager", "reference"), (backend, backend)):
        model = build(name)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        for num_tokens in lengths:
            step = make_step(model, num_tokens, device=device)
            record: dict[str, Any] = {"arm": arm, "tokens": num_tokens}
            try:
                first: list[float] = []
                peak = peak_allocated(
                    lambda step=step, first=first: first.append(_seconds(step, device)),
                    device=device,
                )
                record["peak_bytes"] = weights + peak
                slow = first[0] > SLOW_S
                record["step_s"] = first if slow else [_seconds(step, device) for _ in range(3)]
            except torch.OutOfMemoryError:
                record |= {"peak_bytes": None, "step_s": None}
            records.append(record)
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return records


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def print_study(records: Sequence[dict[str, Any]]) -> None:
    """One line per record, and what ours saves against eager."""
    print(
        f"\nwhole model, one training step\n{'tokens':>7} {'arm':<9} {'step s':>8} {'peak MiB':>10}"
    )
    eager = {r["tokens"]: r for r in records if r["arm"] == "eager"}
    for record in records:
        start = f"{record['tokens']:>7,} {record['arm']:<9}"
        if record["peak_bytes"] is None:
            print(f"{start} out of memory")
            continue
        seconds, peak = statistics.median(record["step_s"]), record["peak_bytes"]
        line = f"{start} {seconds:>8.2f} {peak / 2**20:>10.1f}"
        base = eager[record["tokens"]]
        if record["arm"] != "eager" and base["peak_bytes"]:
            faster = statistics.median(base["step_s"]) / seconds
            line += f"  {faster:.2f}x as fast, {1 - peak / base['peak_bytes']:.0%} less memory"
        print(line)


def run_study(
    *, device: torch.device, backend: str, lengths: Sequence[int] = (4096, 8192)
) -> list[dict[str, Any]]:
    """The study of the paper on this machine, printed.

    Args:
        device: where to run.
        backend: ours.
        lengths: tokens of the row.
    """
    records = study(
        gpt_oss_builder(device),
        lengths=lengths,
        device=device,
        backend=backend,
    )
    print_study(records)
    return records
