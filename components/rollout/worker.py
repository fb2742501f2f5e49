"""What runs inside a worker process: an environment, a renderer, and the agent loop.

Messages to a worker: ``("episode", spec, temperature)``, ``("sampled", result)`` and
``("call", fn, item)``.
Messages from it: ``("ready", missing)``, ``("request", SampleRequest)``, ``("done", value)``,
``("failed", text)``, and ``("refused", text)`` for a mistake in the configuration.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from components.chat.base import Renderer
from components.envs.base import Env
from components.rollout import preload as preloading
from components.rollout.agent_loop import Limits, LimitsError, run_episode
from components.rollout.types import RolloutSpec

WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else importing litellm tries the network
}
"""Environment variables of every worker, set before anything is imported in it."""


def serve(connection: Connection, pickled: bytes, preload: tuple[str, ...]) -> None:
    """Answer orders until the other end closes.

    Args:
        connection: to the pool.
        pickled: (make_env, make_renderer, limits).
        preload: entries that the forkserver should have prepared; the others are reported.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    os.environ.update(WORKER_ENV)
    missing = tuple(entry for entry in preload if entry not in preloading.done)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            worker = _Worker(connection, *pickle.loads(pickled))
        except Exception as error:
            kind = "refused" if isinstance(error, (ValueError, FileNotFoundError)) else "failed"
            text = str(error) if kind == "refused" else traceback.format_exc()
            connection.send((kind, text))
            return
        connection.send(("ready", missing))
        worker.run()


class _Worker:
    def __init__(
        self,
        connection: Connection,
        make_env: Callable[[], Env],
        make_renderer: Callable[[], Renderer],
        limits: Limits,
    ) -> None:
        self.connection = connection
        self.make_env = make_env
        self.limits = limits
        self.env = make_env()
        self.renderer = make_renderer()

    def run(self) -> None:
        while True:
            try:
                order, *arguments = self.connection.recv()
            except EOFError:  # the pool is closed, or its process is gone
                self.env.close()
                return
            try:
                value = self.episode(*arguments) if order == "episode" else self.call(*arguments)
                reply = ("done", value)
            except LimitsError as error:
                reply = ("refused", str(error))
            except EOFError:
                return
            except Exception:
                reply = ("failed", traceback.format_exc())
            failed = reply[0] == "failed" or not getattr(reply[1], "valid", True)
            if failed:  # whatever went wrong may have left the environment in any state
                self.env.close()
                self.env = self.make_env()
            self.connection.send(reply)

    def episode(self, spec: RolloutSpec, temperature: float) -> Any:
        loop = run_episode(
            self.env, self.renderer, spec, limits=self.limits, temperature=temperature
        )
        try:
            request = next(loop)
            while True:
                self.connection.send(("request", request))
                _, result = self.connection.recv()
                request = loop.send(result)
        except StopIteration as stop:
            return stop.value

    def call(self, fn: Callable[[Env, Renderer, Any], Any], item: Any) -> Any:
        return fn(self.env, self.renderer, item)
