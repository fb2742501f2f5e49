"""What one update holds and allocates, of a model or of its first layers.

The numbers of ``tools/memory_plan.py`` come from here: the recipe's own components, on a synthetic
row as long as the config allows, in bytes of torch's allocator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from components.attention.plan import MaskPlan
from components.models.decode_step import DecodeStep, why_not
from components.models.decoder import PolicyModel
from components.models.nf4 import stored_bytes
from components.policy.cache import RowPool
from components.policy.spans import spans_of
from components.rl.logprobs import chunked_logprobs
from components.training import parallelize
from components.training.component import build
from components.training.parallelize import World
from components.training.precision import MasterWeights
from components.training.reference import ReferencePolicy
from tools.bench_cases import peak_allocated

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What of a config decides how much memory its updates take."""

    model: Mapping[str, Any]
    "The builder's node."
    dtype: torch.dtype
    optimizer: Mapping[str, Any]
    beta: float
    "0: no reference policy."
    tokens: int
    "Of a row: tokens_per_batch."
    trained: int
    "Trained tokens of a row."
    chunk: int
    "logprob_chunk."
    max_grad_norm: float
    num_workers: int
    "Rollouts whose keys and values the engine still holds in the update."
    max_tokens: int
    "Of a rollout."
    packed: bool
    "The engine holds a copy of the weights that is laid out for decoding (pack_weights)."


class Update:
    """The policy with everything that an update needs.

    Args:
        make_model: ``make_model(dtype=...)``.
        setting: of the run.
    """

    def __init__(self, make_model: Callable[..., PolicyModel], setting: Setting) -> None:
        self.setting = setting
        self.model, _ = parallelize.build_policy(make_model, World.alone(), dtype=setting.dtype)
        self.masters = MasterWeights(self.model)
        self.optimizer: torch.optim.Optimizer = build(setting.optimizer, self.masters.parameters())
        self.reference = ReferencePolicy(self.model) if setting.beta > 0 else None
        self.cache = _full_cache(self.model, setting)
        packs = setting.packed and why_not(self.model) is None
        self.packed = DecodeStep(self.model, num_rows=setting.num_workers) if packs else None
        tokens = setting.tokens
        generator = torch.Generator().manual_seed(0)
        vocab = self.model.config.vocab_size
        self._tokens = torch.randint(0, vocab, (1, tokens), generator=generator)
        length = min(tokens, setting.max_tokens, self.model.config.max_positions)
        self._plan, self._places = _rollouts(tokens, length)
        stride = max(1, tokens // setting.trained)
        self._index = torch.arange(0, tokens - 1, stride)[: setting.trained]

    def held(self) -> dict[str, int]:
        """Bytes that stay between updates, once the optimizer has stepped."""
        ours = {id(p) for p in self.model.parameters()}
        states = [
            stored_bytes_of(value)
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ]
        reference = self.reference.tensors() if self.reference else {}
        return {
            "weights": sum(stored_bytes(p) for p in self.model.parameters()) + _buffers(self.model),
            "masters": sum(p.nbytes for p in self.masters.parameters() if id(p) not in ours),
            "optimizer": sum(states),
            "reference": sum(t.nbytes for t in reference.values()),
            # Alone, the engine samples from the trainer's weights, or from a packed copy of them.
            "engine_copy": self.packed.num_bytes if self.packed else 0,
            "kv_cache": self.cache.num_bytes(),
        }

    def gradients(self) -> int:
        """Bytes of all gradients, which are there at the end of the backward pass."""
        return sum(p.nbytes for p in self.masters.parameters())

    def forward_backward(self) -> None:
        """One row: reference, policy, gradients."""
        if self.reference is not None:
            with self.reference.swapped_in(), torch.no_grad():
                self._logprobs()
        logprobs = self._logprobs()
        (logprobs.sum() / len(logprobs)).backward()

    def optimizer_step(self) -> None:
        """Clip, step, publish; the gradients go."""
        parallelize.clip_grad_norm(self.masters.parameters(), self.setting.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.masters.publish()

    def _logprobs(self) -> torch.Tensor:
        head = partial(
            chunked_logprobs,
            targets=self._tokens[0, self._index + 1],
            temperature=1.0,
            chunk_size=self.setting.chunk,
            compute_entropy=True,
        )
        settings = {"mask": self._plan, "input_pos": self._places, "index": self._index}
        return self.model(self._tokens, head=head, **settings)[0]


def stored_bytes_of(tensor: torch.Tensor) -> int:
    """Memory of a tensor, or of the parts of an 8-bit state."""
    if not hasattr(tensor, "__tensor_flatten__") or type(tensor) is torch.Tensor:
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    return sum(getattr(tensor, name).nbytes for name in names)


def measure(update: Update) -> dict[str, int]:
    """Bytes held, and the peaks above them of the two halves of a step.

    Args:
        update: takes two steps here; the first one makes the optimizer's states.
    """
    update.forward_backward()
    update.optimizer_step()
    cpu = torch.device("cpu")
    row = peak_allocated(update.forward_backward, device=cpu)
    step = peak_allocated(update.optimizer_step, device=cpu)
    gradients = update.gradients()
    return update.held() | {"gradients": gradients, "row": row, "step": gradients + step}


def head_chunk(vocab_size: int, setting: Setting) -> int:
    """Bytes of the logits that exist at a time, in fp32 twice and once in the model's dtype."""
    rows = min(setting.chunk, setting.trained)
    narrow = setting.dtype.itemsize if setting.dtype != torch.float32 else 0
    return rows * vocab_size * (4 + 4 + narrow)


def slice_directory(source: Path, target: Path, *, num_layers: int) -> Path:
    """A Hugging Face directory with the first layers of another, and all beside them.

    Args:
        source: whole.
        target: to write.
        num_layers: how many layers.
    """
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = {}
    for path in sorted(source.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                layer = _LAYER.match(name)
                if layer is None or int(layer[1]) < num_layers:
                    state[name] = file.get_tensor(name)
    save_file(state, target / "model.safetensors")
    return target


def _rollouts(num_tokens: int, length: int) -> tuple[MaskPlan, torch.Tensor]:
    """A row of rollouts of one length side by side (the last one shorter), and the positions."""
    from components.attention.masks import TreeMask

    place = torch.arange(num_tokens)
    rollout = place // length
    position = place % length
    plan = MaskPlan.from_tree(TreeMask(enter=rollout, exit=rollout + 1, position=position))
    return plan, position[None]


def _full_cache(model: PolicyModel, setting: Setting) -> RowPool:
    """The engine's cache when every worker's rollout is as long as it may be."""
    config = model.config
    pool = RowPool(spans=spans_of(model), num_kv_heads=config.num_kv_heads)
    for _ in range(setting.num_workers):
        pool.acquire(base=0)
    pool.reserve(setting.max_tokens)
    for layer in range(config.num_layers):
        for tensor in pool.layer(layer, torch.empty(config.head_dim, dtype=setting.dtype)):
            tensor.fill_(0.5)  # touched, so that a process has it
    return pool


def _buffers(model: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in model.buffers())
