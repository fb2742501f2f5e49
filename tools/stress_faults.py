"""Faults for ``tools/stress_rollouts.py``, in a module of its own: workers import it by name."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from components.envs.base import Message
from components.envs.tau2 import Tau2Env
from components.rollout.types import RolloutSpec

_LEAKED: list[bytes] = []
_BLOCK_BYTES = 16 << 20


def hang() -> None:
    """Wait for what never comes."""
    time.sleep(100_000)


def burn() -> None:
    """Use the processor for ever."""
    while True:
        pass


def burn_deaf() -> None:
    """Use the processor for ever and swallow whatever is raised to stop it."""
    while True:
        try:
            burn()
        except BaseException:
            continue


def leak() -> None:
    """Take memory, and keep it, until there is none."""
    while True:
        # Zeros are not written: so a slow machine gets to the limit before the tool's deadline.
        _LEAKED.append(bytes(_BLOCK_BYTES))


def raise_error() -> None:
    """Fail as tools do: the benchmark makes it a tool message with an error."""
    raise RuntimeError("the tool is broken")


def sys_exit() -> None:
    """End the process politely."""
    sys.exit(0)


def os_exit() -> None:
    """End the process at once."""
    os._exit(0)


def killed() -> None:
    """End as the kernel ends a process when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def abandon() -> None:
    """Start a process that uses the processor for ever, and end without it."""
    subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os._exit(0)


def break_env() -> None:
    """Stands for an error of the environment itself, outside of the tool: see ``FaultyEnv``."""
    raise RuntimeError("the environment is broken")


FAULTS: Mapping[str, tuple[Callable[[], None], str]] = {
    "hang": (hang, "error_deadline"),
    "burn": (burn, "error_deadline"),
    "burn_deaf": (burn_deaf, "error_deadline"),
    "leak": (leak, "error_infra"),
    "raise": (raise_error, ""),
    "break_env": (break_env, "error_infra"),
    "sys_exit": (sys_exit, "error_infra"),
    "os_exit": (os_exit, "error_infra"),
    "killed": (killed, "error_infra"),
    "abandon": (abandon, "error_infra"),
}
"""What happens in the tool, and the status of its episode; empty: any that has a reward."""


def draw_faults(specs: Iterable[RolloutSpec], rate: float) -> dict[int, str]:
    """Which episodes go wrong, and how.

    Args:
        specs: orders; each has an ``env_seed`` of its own.
        rate: share of the episodes that have a fault.

    Returns:
        env_seed -> name of the fault, drawn from the rollout id alone.
    """
    plan = {}
    for spec in specs:
        draws = random.Random(spec.rollout_id)
        if draws.random() < rate:
            plan[spec.env_seed] = draws.choice(list(FAULTS))
    return plan


class FaultyEnv:
    """A tau2 environment in some of whose episodes the first tool call goes wrong.

    Args:
        plan: env_seed -> fault, for those episodes.
        settings: of :class:`Tau2Env`.
    """

    def __init__(self, *, plan: Mapping[int, str], **settings: Any) -> None:
        self._env = Tau2Env(**settings)
        self._plan = plan
        self._fault: str | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start a task; its seed says whether it has a fault, and which."""
        assert seed is not None, "an episode of a rollout has a seed"
        answer = self._env.reset(seed=seed, options=options)
        self._fault = self._plan.get(seed)
        if self._fault is not None:
            environment = self._env.tau2_environment  # of this episode alone
            tool = environment.make_tool_call

            def faulty(*arguments: Any, **named: Any) -> Any:
                self._strike()
                return tool(*arguments, **named)

            environment.make_tool_call = faulty
        return answer

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Deliver a turn."""
        if self._fault == "break_env" and isinstance(action, Message) and action.tool_calls:
            self._strike()
        return self._env.step(action)

    def _strike(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            FAULTS[fault][0]()

    def close(self) -> None:
        """Free the episode."""
        self._env.close()
