"""The demonstrators by domain, as a config names them, and how a worker plays one."""

from __future__ import annotations

from collections.abc import Callable

from components.chat.base import Renderer
from components.data.demonstrations import Oracle, demonstrate
from components.envs.base import Env
from components.rollout.types import Rollout, RolloutSpec


def retail_oracle(spec: RolloutSpec) -> Oracle:
    """The demonstrator of a retail task.

    Raises:
        ValueError: for a task outside the train split: its gold actions are not ours to use.
    """
    from components.data.oracle_retail import RetailOracle
    from components.envs.tau2_data import find_task, split_of

    split = split_of("retail", spec.task_id)
    if spec.domain != "retail" or split != "train":
        raise ValueError(
            f"task {spec.domain}/{spec.task_id} is of split {split!r}: retail demonstrations use "
            "gold actions and are made of train tasks only"
        )
    return RetailOracle(find_task("retail", spec.task_id), seed=spec.seed)


def mock_oracle(spec: RolloutSpec) -> Oracle:
    """The demonstrator of a mock task; it uses no gold actions, only what the user says.

    Raises:
        ValueError: for an official mock task, or one of a held-out kind: those are for evaluation.
    """
    from components.data.oracle_mock import MockOracle
    from components.envs.mock_tasks import kind_of

    kind = kind_of(spec.task_id)
    if spec.domain != "mock" or kind is None or kind.held_out:
        raise ValueError(
            f"task {spec.domain}/{spec.task_id}: demonstrations are made of generated tasks only, "
            "and not of a held-out kind"
        )
    return MockOracle()


def domain_oracle(spec: RolloutSpec) -> Oracle:
    """The demonstrator of a task of any domain that has one, for datasets of several domains.

    Raises:
        ValueError: for a domain without one; and what the domain's own refuses.
    """
    oracles = {"retail": retail_oracle, "mock": mock_oracle}
    if spec.domain not in oracles:
        raise ValueError(
            f"task {spec.domain}/{spec.task_id}: nobody demonstrates {spec.domain!r} (allowed: "
            f"{', '.join(oracles)})"
        )
    return oracles[spec.domain](spec)


def play(
    env: Env, renderer: Renderer, item: tuple[RolloutSpec, Callable[[RolloutSpec], Oracle]]
) -> Rollout:
    """Play one demonstration in a worker (``WorkerPool.run_local``).

    Args:
        env: the worker's environment.
        renderer: the worker's renderer.
        item: the order, and ``make_oracle(spec)``.
    """
    spec, make_oracle = item
    return demonstrate(env, make_oracle(spec), renderer, spec)
