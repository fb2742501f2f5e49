"""Playing a list of orders with a progress bar: what the recipes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from components.policy.engine import PolicyEngine
from components.rollout.types import Rollout, RolloutSpec
from components.rollout.workers import WorkerPool


def play_rollouts(
    pool: WorkerPool,
    engine: PolicyEngine,
    specs: Sequence[RolloutSpec],
    *,
    temperature: float,
    label: str,
    show: bool,
    check_stop: Callable[[], None],
    on_done: Callable[[Rollout], object] | None = None,
) -> list[Rollout]:
    """One rollout for each order, in their order.

    Args:
        pool: plays them.
        engine: samples their turns.
        specs: the orders.
        temperature: of the sampling.
        label: of the progress bar.
        show: whether to draw one; it is drawn on a terminal only.
        check_stop: called before anything is sampled and after each step of the engine; what it
            raises ends the work.
        on_done: called with each rollout that has ended; see ``WorkerPool.run``.
    """
    from tqdm import tqdm

    with tqdm(
        total=len(specs), desc=label, unit="rollout", leave=False, disable=None if show else True
    ) as bar:

        def done(rollout: Rollout) -> None:
            if on_done is not None:
                on_done(rollout)
            bar.update()

        return pool.run(specs, engine, temperature=temperature, on_done=done, on_round=check_stop)
