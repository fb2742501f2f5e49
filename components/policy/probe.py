"""Proof that an engine serves the trainer's weights: log-probabilities of a fixed batch.

Whatever moves weights can fail and say that it has not. So after every sync the engine's own
log-probabilities of a few fixed sequences are held against the trainer's. They must be equal within
a bound, which catches other weights; and they must have moved if the trainer's have, which catches
the old ones, from which a small step differs by less than bfloat16 rounds.

Suffixes: ``S`` sequences, ``L`` tokens of one, ``V`` vocabulary.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from components.attention.plan import MaskPlan
from components.models.decoder import PolicyModel
from components.policy.engine import EngineError
from components.policy.local import LocalEngine
from components.rollout.types import SampleRequest

NUM_SEQUENCES = 4
NUM_START = 4
NUM_SAMPLED = 28
"""Each sequence: random ids, then what the model makes of them. Random ids alone would have
log-probabilities of -15, where bfloat16 is twice as coarse as at those of real text."""

MOVED = 0.25
"""Share of the probe's tokens whose log-probability the trainer must have changed before the engine
is asked for a change: a step may be too small for any bfloat16 weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReading:
    """What one probe of one engine has shown; nats per token."""

    gap_mean: float
    """Mean |engine - trainer| on the same weights."""
    gap_max: float
    change: float
    """Mean |engine now - engine before|; 0 at the first probe."""
    trainer_change: float
    """Mean |trainer now - trainer before|; 0 at the first probe."""


class WeightProbe:
    """The fixed batch, what the trainer makes of it, and what each engine made of it before.

    Args:
        model: the trainer's, or the copy that the engine's weights are taken from.
        bound: most mean |engine - trainer|, in nats per token.
        seed: of the sequences.
        hint: what may be the matter where an engine serves other weights.

    Raises:
        ValueError: a bound that is not above 0.
    """

    def __init__(self, model: PolicyModel, *, bound: float, seed: int = 0, hint: str = "") -> None:
        if not bound > 0:
            raise ValueError(f"probe_bound must be above 0, not {bound}")
        self.bound = bound
        self._hint = f". {hint}" if hint else ""
        self.sequences = probe_sequences(model, seed=seed)
        self._model = model
        self._trainer: Tensor | None = None
        self._trainer_before: dict[str, Tensor] = {}
        self._engine_before: dict[str, Tensor] = {}

    def weights_changed(self) -> None:
        """Take the trainer's values anew: call it once after each change, before any check."""
        values = [sequence_logprobs(self._model, ids) for ids in self.sequences]
        self._trainer = torch.cat(values).cpu()
        if not self._trainer.isfinite().all():
            raise EngineError("the trainer's log-probabilities of the probe are not finite")

    def check(self, name: str, served: Sequence[Sequence[float]], *, noise: float) -> ProbeReading:
        """Hold an engine's values against the trainer's.

        Args:
            name: of the engine, which is remembered by it and named in errors.
            served: its log-probability of each token but the first of each sequence, S of [L - 1].
            noise: most |difference| between two such answers of the same weights.

        Raises:
            EngineError: it serves other weights, or the old ones.
        """
        assert self._trainer is not None, "weights_changed was never called"
        lengths = [len(ids) - 1 for ids in self.sequences]
        assert [len(values) for values in served] == lengths, "one value for each token"
        engine = torch.tensor([value for values in served for value in values])
        gap = (engine - self._trainer).abs()
        if not engine.isfinite().all() or gap.mean() > self.bound:
            raise EngineError(
                f"{name} does not serve the trainer's weights: its log-probabilities of the probe "
                f"differ by {gap.mean():.3g} nats per token, at most {gap.max():.3g}; "
                f"probe_bound is {self.bound:g}{self._hint}"
            )
        change = trainer_change = torch.zeros_like(engine)
        if name in self._engine_before:
            change = (engine - self._engine_before[name]).abs()
            trainer_change = (self._trainer - self._trainer_before[name]).abs()
        moved = float((trainer_change > 0).float().mean())
        if moved >= MOVED and change.max() <= noise:
            raise EngineError(
                f"{name} still serves the old weights: the trainer's log-probabilities have "
                f"changed at {moved:.0%} of the probe's tokens, by {trainer_change.mean():.3g} "
                f"nats on average, and its own by no more than between two equal requests "
                f"({noise:.3g})"
            )
        self._engine_before[name], self._trainer_before[name] = engine, self._trainer
        return ProbeReading(
            gap_mean=float(gap.mean()),
            gap_max=float(gap.max()),
            change=float(change.mean()),
            trainer_change=float(trainer_change.mean()),
        )


def probe_sequences(model: PolicyModel, *, seed: int) -> tuple[tuple[int, ...], ...]:
    """S sequences of random ids and what the model goes on with.

    The first begins with the vocabulary's last id, which a model with a smaller one refuses.
    """
    draw = random.Random(seed)
    vocab = model.config.vocab_size
    starts = [[draw.randrange(vocab) for _ in range(NUM_START)] for _ in range(NUM_SEQUENCES)]
    starts[0][0] = vocab - 1
    length = min(NUM_START + NUM_SAMPLED, model.config.max_positions)
    # A few tokens once: not worth a copy of the weights.
    engine = LocalEngine(model, max_tokens=length, max_batch_size=NUM_SEQUENCES, pack_weights=False)
    requests = [
        SampleRequest(
            rollout_id=f"probe/{number}",
            context=tuple(start),
            shared_len=0,
            max_new_tokens=length,
            stop_ids=frozenset(),
            temperature=1.0,
            seed=seed + number,
        )
        for number, start in enumerate(starts)
    ]
    turns = engine.generate(requests)
    return tuple((*r.context, *turn.ids) for r, turn in zip(requests, turns, strict=True))


@torch.no_grad()
def sequence_logprobs(model: PolicyModel, ids: Sequence[int]) -> Tensor:
    """Log-probability of each id after the first under the model, untempered: [L - 1] fp32."""
    device = next(model.parameters()).device
    tokens = torch.tensor(ids, device=device)
    positions = torch.arange(len(ids) - 1, device=device)
    # As in the local engine: compiled layers would be compiled anew for this length.
    compiler = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiler else nullcontext():
        logits = model(
            tokens[None, :-1],
            mask=MaskPlan.causal(len(ids) - 1),
            input_pos=positions[None],
            index=positions,
        )
    logprobs = torch.log_softmax(logits.float().view(len(ids) - 1, -1), -1)
    return logprobs.gather(1, tokens[1:, None]).squeeze(1)
