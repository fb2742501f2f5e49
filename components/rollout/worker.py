"""What runs inside a worker process: an environment, a renderer, and the agent loop.

Messages to a worker: ``("episode", spec, temperature)``, ``("sampled", result)`` and
``("call", fn, item)``.
Messages from it: ``("ready", missing)``, ``("request", SampleRequest)``, ``("done", value)``,
``("failed", text)``, and ``("refused", text)`` for a mistake in the configuration.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from components.chat.base import Renderer
from components.envs.base import Env
from components.rollout import lifeline
from components.rollout import preload as preloading
from components.rollout.agent_loop import Limits, LimitsError, TaskRefused, run_episode
from components.rollout.types import RolloutSpec

WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else importing litellm tries the network
}
"""Environment variables of every worker, set before anything is imported in it."""

MEMORY_EXIT = 86
"""Exit code of a worker that has used up its memory."""

NEARLY_ALL = 0.9
"""Share of its memory past which a worker ends itself; what is left is for closing episodes."""


def start_process(
    context: ForkServerContext, pickled: bytes, preload: tuple[str, ...]
) -> tuple[BaseProcess, Connection]:
    """Start a process that runs :func:`serve`.

    Args:
        context: multiprocessing's.
        pickled: see ``serve``.
        preload: entries for the forkserver.

    Returns:
        The process, and our end of the pipe to it; the end of the process closes it.
    """
    connection, child = context.Pipe()
    process = context.Process(target=serve, args=(child, pickled, preload), daemon=True)
    variables = WORKER_ENV | {
        # The forkserver takes neither our sys.path nor function calls in any other way.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        preloading.VARIABLE: " ".join(preload),
    }
    with _hidden_main(), _environment(variables):
        process.start()
    child.close()
    return process, connection


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's main module, torch and all, in workers."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that a forkserver started inside inherits."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(connection: Connection, pickled: bytes, preload: tuple[str, ...]) -> None:
    """Answer orders until the other end closes.

    Args:
        connection: to the pool.
        pickled: (make_env, make_renderer, limits, memory_mib).
        preload: entries that the forkserver should have prepared; the others are reported.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    parent = multiprocessing.parent_process()
    assert parent is not None
    lifeline.hold(parent.sentinel)
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
        memory_mib: int | None,
    ) -> None:
        self.connection = connection
        self.make_env = make_env
        self.limits = limits
        self.env = make_env()
        self.renderer = make_renderer()
        self.memory = None if memory_mib is None else _Memory(memory_mib)

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
            except (LimitsError, TaskRefused) as error:
                reply = ("refused", str(error))
            except EOFError:
                return
            except Exception:
                reply = ("failed", traceback.format_exc())
            failed = reply[0] == "failed" or not getattr(reply[1], "valid", True)
            if failed:  # whatever went wrong may have left the environment in any state
                self.env.close()
                self.env = self.make_env()
            self.send(*reply)

    def send(self, kind: str, value: Any) -> None:
        """Answer, or end the process if hardly any memory is left.

        What a tool has leaked stays for good, even where somebody caught its MemoryError: the next
        episode must not suffer from it. So this one is lost, as with any worker that dies.
        """
        if self.memory is not None and self.memory.nearly_gone():
            os._exit(MEMORY_EXIT)
        self.connection.send((kind, value))

    def episode(self, spec: RolloutSpec, temperature: float) -> Any:
        loop = run_episode(
            self.env, self.renderer, spec, limits=self.limits, temperature=temperature
        )
        try:
            request = next(loop)
            while True:
                self.send("request", request)
                _, result = self.connection.recv()
                request = loop.send(result)
        except StopIteration as stop:
            return stop.value

    def call(self, fn: Callable[[Env, Renderer, Any], Any], item: Any) -> Any:
        return fn(self.env, self.renderer, item)


class _Memory:
    """Memory that a worker's episodes may take, on top of what it has when its first one starts.

    Counted as address space, which is what RLIMIT_AS limits: touched or not. What a worker starts
    with depends on the packages and the number of cores (1.6 GiB with tau2 on two);
    what it adds does not, though what a first episode imports or loads late counts as added.

    Raises:
        ValueError: the system has no such limit.
    """

    def __init__(self, allowed_mib: int) -> None:
        if not sys.platform.startswith("linux"):
            raise ValueError(f"worker_memory_mib={allowed_mib}: only Linux can limit it; set null")
        import resource

        self.allowed = allowed_mib << 20
        self.base = _address_space()
        limit = self.base + self.allowed
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def nearly_gone(self) -> bool:
        return _address_space() - self.base > NEARLY_ALL * self.allowed


def _address_space() -> int:
    """Bytes that are mapped."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
