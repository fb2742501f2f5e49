"""The optimizer steps that are taken on one batch of rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.attention.plan import MaskPlan
from components.models.decoder import PolicyModel
from components.rl.forward import packed_logprobs
from components.rl.importance import mismatch
from components.rl.objective import Objective, count
from components.rl.packing import PackedBatch
from components.training.gradient_noise import GradientNoise
from components.training.guards import Guards, GuardStop
from components.training.parallelize import World, clip_grad_norm
from components.training.precision import MasterWeights
from components.training.reference import PastPolicies, ReferencePolicy
from components.training.update import UpdateSettings, UpdateTotals, dump_rows

Rows = Sequence[tuple[PackedBatch, MaskPlan]]


@dataclass(slots=True, kw_only=True)
class _Row:
    """A row and what is constant over the updates on it."""

    batch: PackedBatch
    plan: MaskPlan
    start: Tensor | None = None
    """[M] log-probabilities before the first update"""
    old: Tensor | None = None
    """[M] those that the ratio is against: the same, or of the weights that sampled the row"""
    reference: Tensor | None = None
    """[M] of the reference policy"""
    keep: Tensor | None = None
    """[M] bool, tokens in the loss; None: all"""


class PolicyUpdate:
    """Takes the optimizer steps of a batch: forward, loss, backward per row, then one step.

    Every rank calls it with the same number of rows.

    Args:
        model: the policy; changed in place.
        masters: its fp32 weights, which ``optimizer`` updates.
        optimizer: over ``masters.parameters()``.
        objective: the loss and what belongs to it.
        reference: of the KL term, or None.
        settings: sizes, clipping, number of updates.
        world: this process among its peers.
        guards: decide whether an optimizer step may be taken; by default a number that is not
            finite ends the run and nothing else does.
    """

    def __init__(
        self,
        model: PolicyModel,
        masters: MasterWeights,
        optimizer: torch.optim.Optimizer,
        *,
        objective: Objective,
        reference: ReferencePolicy | None,
        settings: UpdateSettings,
        world: World,
        guards: Guards | None = None,
    ) -> None:
        self._model, self._masters, self._optimizer = model, masters, optimizer
        self._objective, self._reference = objective, reference
        self._settings, self._world = settings, world
        self._guards = guards or Guards()
        # With the ratio against the generator nobody asks for older weights.
        proximal = objective.ratio == "proximal"
        self._past = PastPolicies(
            model,
            max_staleness=settings.max_staleness if proximal else 0,
            offload=settings.offload,
        )

    def remember(self, version: int) -> None:
        """From now on the engine samples with the weights that the model has, of that version."""
        self._past.keep(version)

    def __call__(
        self,
        rows: Rows,
        *,
        check_stop: Callable[[], None],
        model_metrics: Callable[[], dict[str, float]],
        dump: Path,
        versions: tuple[int, int] = (0, 0),
    ) -> tuple[dict[str, float], tuple[PackedBatch, MaskPlan, Tensor] | None]:
        """Update the policy on the rows of this rank. Collective.

        Args:
            rows: with their mask plans, some of them perhaps empty.
            check_stop: called before each row up to the first optimizer step; what it raises gives
                the batch up. Later it would leave half of the updates behind.
            model_metrics: called after the first backward passes, before the weights change.
            dump: where the rows go if a number is not finite.
            versions: of the policy that sampled the rows, and of the one that trains on them. Where
                they differ the proximal log-probabilities are those of the first, made by the
                trainer (see ``remember``): the clip acts from the first update on, and importance
                weights and mismatch compare trainer and generator on the same weights.

        Returns:
            Metrics, means over the updates; the first row, its plan and its log-probabilities
            before the updates. When the masks of ``Importance`` left no token of any rank, nothing
            has changed and there is None.

        Raises:
            FloatingPointError: a loss or gradient that is not finite, unless the guards skip it.
            GuardStop: a guard ends the run; the weights are those before this update.
        """
        self._optimizer.zero_grad(set_to_none=True)  # what a batch that was given up left behind
        state = [_Row(batch=batch, plan=plan) for batch, plan in rows]
        if (sampled_by := self._past.of(versions[0], now=versions[1])) is not None:
            for row, logprobs in zip(
                state, self._under(sampled_by, state, check_stop), strict=True
            ):
                row.old = logprobs
        if self._objective.importance.masks:
            self._mask(state, check_stop)
        denominator = self._denominator(state)
        if denominator == 0.0:
            metrics = {"importance/masked_frac": 1.0, **self._mismatch(state)}
            self._guards.allow(metrics)
            return metrics, None
        if self._reference is not None:
            under = self._under(self._reference, state, check_stop)
            for row, logprobs in zip(state, under, strict=True):
                row.reference = logprobs
        found: list[dict[str, float]] = []
        own: dict[str, float] = {}
        noise = GradientNoise(self._masters.parameters(), self._world)
        for number in range(self._settings.updates_per_batch):
            totals = UpdateTotals(denominator=denominator)
            for row in state:
                if number == 0:
                    check_stop()
                self._backward(row, denominator, totals)
                if number == 0 and self._settings.probe_noise:
                    noise.add(len(row.batch.rollout_ids))
            if number == 0:
                own = model_metrics() | noise.metrics()
            try:
                found.append(self._step(totals, rows=rows, dump=dump))
            except GuardStop as stop:
                if number == 0:
                    raise
                self._guards.stop_after_step(stop)
                self._optimizer.zero_grad(set_to_none=True)
                break
        if len(found) > 1:
            self._model.step_metrics()  # what the later updates counted is not the next step's
        means = {name: sum(m[name] for m in found) / len(found) for name in found[0]}
        first = state[0]
        assert first.start is not None
        return means | own, (first.batch, first.plan, first.start)

    def logprobs(
        self, batch: PackedBatch, plan: MaskPlan, *, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies [M] of a row under the policy as it is."""
        return packed_logprobs(
            self._model,
            batch,
            plan=plan,
            temperature=self._settings.temperature,
            chunk_size=self._settings.logprob_chunk,
            compute_entropy=True,
            entropy_grad=entropy_grad,
        )

    def _under(
        self, policy: ReferencePolicy, state: Sequence[_Row], check_stop: Callable[[], None]
    ) -> list[Tensor]:
        """Log-probabilities [M] of each row under other weights, which are swapped in once.

        A pass of its own: weights must not change between a forward and its backward.
        """
        found = []
        with policy.swapped_in(), torch.no_grad():
            for row in state:
                check_stop()
                found.append(self.logprobs(row.batch, row.plan)[0])
        return found

    def _mask(self, state: Sequence[_Row], check_stop: Callable[[], None]) -> None:
        """Decide which tokens are in the loss.

        A pass of its own: the denominator, which they change, must be known before any backward.
        """
        for row in state:
            check_stop()
            if row.old is None:
                with torch.no_grad():
                    row.old = row.start = self.logprobs(row.batch, row.plan)[0]
            if bool(row.old.isfinite().all()):
                row.keep = self._objective.keep(row.old, row.batch)

    def _mismatch(self, state: Sequence[_Row]) -> dict[str, float]:
        """Between trainer and generator, where no token is left in the loss. Collective."""
        gaps = [
            mismatch(row.old, row.batch.generator_logprobs) for row in state if row.old is not None
        ]
        kl, num = self._world.sum([sum(g.kl_sum for g in gaps), sum(g.num_tokens for g in gaps)])
        worst = max((g.logprob_diff_max for g in gaps), default=0.0)
        return {"mismatch/kl": kl / num, "mismatch/logprob_diff_max": self._world.max([worst])[0]}

    def _denominator(self, state: Sequence[_Row]) -> float:
        """That of all rows of all ranks. Collective."""
        counts = [count(row.batch, row.keep) for row in state]
        num_tokens, num_rollouts = self._world.sum([sum(c) for c in zip(*counts, strict=True)])
        return self._objective.aggregation.denominator(
            num_tokens=num_tokens, num_rollouts=num_rollouts
        )

    def _backward(self, row: _Row, denominator: float, totals: UpdateTotals) -> None:
        """Add the gradient of one row, and count it."""
        batch, bonus = row.batch, self._objective.entropy_bonus > 0.0
        logprobs, entropy = self.logprobs(batch, row.plan, entropy_grad=bonus)
        if row.start is None:
            row.start = logprobs.detach()
        if row.old is None:
            row.old = row.start
        if not bool((row.start + row.old + logprobs.detach()).isfinite().all()):
            # Every rank goes through all backward passes; the guard sees the loss of all.
            (logprobs.sum() * math.nan).backward()
            totals.add_not_finite(num_tokens=logprobs.numel())
            return
        out, num_capped = self._objective(
            logprobs,
            batch=batch,
            before=row.old,
            denominator=denominator,
            entropy=entropy,
            reference=row.reference,
            keep=row.keep,
        )
        # FSDP2 averages gradients over ranks; the denominator already counts all ranks.
        (out.loss * self._world.size).backward()
        if entropy is not None and row.keep is not None:
            entropy = entropy[row.keep]
        gap = mismatch(row.old, batch.generator_logprobs)
        totals.add(out, entropy=entropy, gap=gap, num_capped=num_capped)

    def _step(self, totals: UpdateTotals, *, rows: Rows, dump: Path) -> dict[str, float]:
        """One optimizer step, unless a guard refuses it. Collective."""
        metrics = totals.metrics(self._world)
        params = self._masters.parameters()
        metrics["train/grad_norm"] = clip_grad_norm(params, self._settings.max_grad_norm)
        if self._guards.non_finite == "stop" and not all(map(math.isfinite, metrics.values())):
            dump_rows(rows, dump)
            wrong = {n: v for n, v in metrics.items() if not math.isfinite(v)}
            raise GuardStop(
                f"{wrong} not finite: the weights are those before this update; its batch "
                f"is in {dump}"
            )
        allowed = self._guards.allow(metrics)
        if allowed:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.publish()
        return metrics | {"guard/skipped": float(not allowed)}
