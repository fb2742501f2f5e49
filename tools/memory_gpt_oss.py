"""Memory of LoRA updates on gpt-oss-20b and 120b, without their weights.

Weights, adapters and states are counted on the meta device. What a row adds is measured on two and
four layers of the real width with random weights (four experts: a token uses four of any number),
at two lengths, and is linear in layers and in tokens; the head is added by its formula.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from components.attention.plan import MaskPlan
from components.models.gpt_oss import GPT_OSS_20B, GPT_OSS_120B, GptOssConfig, build, random_gpt_oss
from components.models.gpt_oss.packed import PackedExpertLinear
from components.models.lora import adapters, add_adapters
from components.policy.cache import BLOCK
from components.policy.spans import KvSizes, span_of
from tools.bench_cases import peak_allocated

GIB = 2**30
CARDS_GB = (24, 32, 80, 141)
LENGTHS = (8192, 16384, 32768)
LORA = ("q_proj", "k_proj", "v_proj", "output_proj")
RANK, CHUNK, TRAINED_SHARE = 16, 256, 4
ROLLOUTS, ROLLOUT_TOKENS = 8, 8192
CONTEXT = int(1.2 * GIB)
"""CUDA's context and the libraries' workspaces."""
_TOKENS = (128, 256)


MODELS = {"gpt-oss-20b": GPT_OSS_20B, "gpt-oss-120b": GPT_OSS_120B}


def plans() -> dict[str, dict[str, dict[str, int]]]:
    """Model and where its experts are -> bytes of every component on the device."""
    constant, per_token, per_layer_token = row_coefficients()
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name, config in MODELS.items():
        found[name] = {}
        for experts in ("packed", "streamed"):
            plan = static_bytes(config, experts=experts)
            plan["row_constant"] = round(constant + head_bytes(config))
            plan["row_per_token"] = round(per_token + per_layer_token * config.num_layers)
            found[name][experts] = plan
    return found


def static_bytes(config: GptOssConfig, *, experts: str) -> dict[str, int]:
    """What stays on the device between updates, and on the host."""
    model = build(config, dtype=torch.bfloat16, experts="packed")
    with torch.device("meta"):
        add_adapters(model, LORA, rank=RANK, alpha=2 * RANK)
    maps = [m for m in model.modules() if isinstance(m, PackedExpertLinear)]
    packed = sum(m.blocks.nbytes + m.scales.nbytes for m in maps)
    numbers = sum(
        part.weight.numel()
        for module in adapters(model).values()
        for part in (module.lora_a, module.lora_b)
    )
    adapted = sum(
        part.weight.nbytes
        for module in adapters(model).values()
        for part in (module.lora_a, module.lora_b)
    )
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    dense = sum(p.nbytes for p in model.parameters()) + buffers - packed - adapted
    streamed = experts == "streamed"
    return {
        "dense": dense,
        "experts": 2 * packed // config.num_layers if streamed else packed,
        "adapters": 4 * numbers,
        "gradients": 4 * numbers,
        "optimizer": 8 * numbers,
        "kv_cache": cache_bytes(config, rollouts=ROLLOUTS, tokens=ROLLOUT_TOKENS),
        "context": CONTEXT,
        "host_experts": packed if streamed else 0,
    }


def cache_bytes(config: GptOssConfig, *, rollouts: int, tokens: int) -> int:
    """Keys and values of rollouts that share nothing, as the local engine keeps them in bf16."""
    sizes = KvSizes(
        spans=[span_of(window, 0) for window in config.layer_windows],
        token_bytes=2 * config.num_kv_heads * config.head_dim * 2,
        block=BLOCK,
    )
    return sizes.pool(rows=rollouts, longest=-(-tokens // BLOCK), base=0)


def head_bytes(config: GptOssConfig) -> int:
    """Logits of a chunk: fp32 twice (entropy), bf16 once."""
    return CHUNK * config.vocab_size * (4 + 4 + 2)


def row_coefficients() -> tuple[float, float, float]:
    """Bytes of a row: a constant, of each token, and of each token in each layer.

    Returns:
        The three, from the peaks of a forward and backward with recomputed layers.
    """
    peaks = {
        (layers, tokens): _row_peak(layers, tokens)
        for layers, tokens in ((2, _TOKENS[0]), (2, _TOKENS[1]), (4, _TOKENS[1]))
    }
    few, more, deep = (peaks[2, _TOKENS[0]], peaks[2, _TOKENS[1]], peaks[4, _TOKENS[1]])
    per_layer_token = (deep - more) / (2 * _TOKENS[1])
    slope = (more - few) / (_TOKENS[1] - _TOKENS[0])
    per_token = slope - 2 * per_layer_token
    return few - slope * _TOKENS[0], per_token, per_layer_token


def _row_peak(num_layers: int, num_tokens: int) -> int:
    config = replace(GPT_OSS_20B, num_layers=num_layers, num_experts=4, vocab_size=256)
    model = random_gpt_oss(
        config,
        dtype=torch.bfloat16,
        experts="packed",
        backend="folded",
        checkpoint_activations=True,
    )
    model.requires_grad_(False)
    # One trained tensor at the bottom, so that the backward passes through everything.
    model.tok_embeddings.weight.requires_grad_(True)
    tokens = torch.arange(num_tokens)[None] % 256
    index = torch.arange(0, num_tokens, TRAINED_SHARE)

    def step() -> None:
        model.tok_embeddings.weight.grad = None
        inputs = {"mask": MaskPlan.causal(num_tokens), "input_pos": torch.arange(num_tokens)[None]}
        logits = model(tokens, index=index, **inputs)
        F.cross_entropy(logits, tokens[0, index]).backward()

    return peak_allocated(step, device=torch.device("cpu"))


def total(plan: dict[str, int], tokens: int) -> int:
    """Bytes on the device in the update of a row."""
    held = sum(plan[n] for n in ("dense", "experts", "adapters", "gradients", "optimizer"))
    row = plan["row_constant"] + plan["row_per_token"] * tokens
    return held + plan["kv_cache"] + plan["context"] + row


def longest_row(plan: dict[str, int], card_gb: int) -> int:
    """Tokens of the longest row that fits a card, whole thousands; 0 if none does."""
    room = card_gb * 10**9 - total(plan, 0)
    return max(0, room // plan["row_per_token"] // 1000 * 1000)


def tables(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """Components, totals and what fits, as text."""
    lines = [
        f"LoRA of rank {RANK} on the attention, bf16, layers recomputed, {CHUNK} logits at a time,",
        f"the cache of {ROLLOUTS} rollouts of {ROLLOUT_TOKENS} tokens held. GiB on the device.",
    ]
    for name, kinds in found.items():
        caches = ", ".join(
            f"{cache_bytes(MODELS[name], rollouts=1, tokens=tokens) / GIB:.2f} of {tokens}"
            for tokens in LENGTHS
        )
        lines += ["", f"{name}, keys and values of one rollout: {caches} tokens"]
        for experts, plan in kinds.items():
            lines += ["", f"{name}, experts: {experts}"]
            for part in ("dense", "experts", "adapters", "gradients", "optimizer", "kv_cache"):
                lines.append(f"  {part:<14}{plan[part] / GIB:8.2f}")
            lines.append(f"  {'context':<14}{plan['context'] / GIB:8.2f}")
            for tokens in LENGTHS:
                row = plan["row_constant"] + plan["row_per_token"] * tokens
                lines.append(
                    f"  row of {tokens:<7}{row / GIB:8.2f}   total {total(plan, tokens) / GIB:8.2f}"
                )
            if plan["host_experts"]:
                lines.append(f"  on the host   {plan['host_experts'] / GIB:8.2f}")
            for card in CARDS_GB:
                fits = longest_row(plan, card)
                said = f"rows of up to {fits} tokens" if fits else "does not fit"
                lines.append(f"  {card:>4} GB: {said}")
    return "\n".join(lines)
