"""An environment that fails on one rank."""

from __future__ import annotations

import os

from components.envs.tau2 import Tau2Env


class FailingEnv(Tau2Env):
    """No step succeeds on the rank of the variable ``FAILS_ON_RANK``.

    Workers inherit it, and ``RANK`` from the launcher.
    """

    def step(self, *args, **kwargs):
        rank = os.environ["RANK"]
        if rank == os.environ["FAILS_ON_RANK"]:
            raise RuntimeError(f"the environment of rank {rank} is broken")
        return super().step(*args, **kwargs)
