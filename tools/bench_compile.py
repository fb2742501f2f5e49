"""What compiling the layers costs and brings on this machine: `compile` in a recipe's config.

    python tools/bench_compile.py --json compile.json

Forward and backward of the same rows of SmolLM2-135M through eager and compiled layers in turn, in
bf16, with the chunked head on half of the tokens. The first compiled row pays for the compilation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.attention.masks import causal_tree
from components.attention.plan import MaskPlan
from components.models.decoder import PolicyModel
from components.models.smollm2 import smollm2
from components.rl.logprobs import chunked_logprobs
from components.training.compiled import compile_layers

LENGTHS = (1500, 2100, 1800, 1700, 2000, 1900)


def seconds(model: PolicyModel, num_tokens: int, *, device: torch.device) -> float:
    """One forward and backward of a row."""
    tokens = torch.arange(num_tokens, device=device) * 31 % model.config.vocab_size
    position = torch.arange(num_tokens, device=device)
    index = torch.arange(num_tokens // 2, num_tokens - 1, device=device)
    plan = MaskPlan.from_tree(causal_tree(num_tokens))
    head = partial(
        chunked_logprobs,
        targets=tokens[index + 1],
        temperature=1.0,
        chunk_size=256,
        compute_entropy=True,
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    logprobs, _ = model(tokens[None], mask=plan, input_pos=position[None], index=index, head=head)
    logprobs.sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a directory or a name")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    eager, compiled = (smollm2(args.model, dtype=torch.bfloat16).to(device) for _ in range(2))
    compile_layers(compiled, compile=True, device=device)
    seconds(eager, LENGTHS[0], device=device)
    first = seconds(compiled, LENGTHS[0], device=device)
    again = seconds(compiled, LENGTHS[0], device=device)
    pairs = [
        (seconds(eager, n, device=device), seconds(compiled, n, device=device)) for n in LENGTHS
    ]
    found = {
        "device": device.type,
        "first_row_extra_s": first - again,
        "eager_tokens_per_s": sum(LENGTHS) / sum(e for e, _ in pairs),
        "compiled_tokens_per_s": sum(LENGTHS) / sum(c for _, c in pairs),
        "speedup": statistics.median(e / c for e, c in pairs),
    }
    for name, value in found.items():
        print(f"{name:24}{value if isinstance(value, str) else round(value, 2)}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
