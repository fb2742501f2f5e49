"""Serve a model directory with vLLM on this machine's CPU.

    make vllm                                                 # once: .venv-vllm
    python tools/serve_vllm.py [--model smollm2-135m-instruct] [--port 8000] [--log FILE] \\
        [-- further arguments of vLLM's server]

vLLM wants a build of torch of its own, so it lives in a virtual environment of its own and is
reached over HTTP alone. The server listens on the loopback address only, its output goes to the log
file, and its processes, which share one process group, end with this one: at its end, at Ctrl-C and
at SIGTERM. (SIGKILL leaves them running; the log's first line names the group.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from components.models.paths import model_dir

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
LOG = "vllm.log"
TAIL_CHARS = 2000
KILL_S = 10.0

DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB of keys and values
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding needs rights that containers lack
}
"""Ours where the caller has set nothing."""
ARGUMENTS = (
    *("--enforce-eager", "--dtype", "bfloat16"),
    # In 0.32.0 a request with a seed and a temperature whose prompt is cut into chunks ends the
    # whole server on a CPU: "CPU Generator does not use offset".
    "--no-enable-chunked-prefill",
)
FORCED = {
    "VLLM_HOST_IP": HOST,
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
REMOVED = ("PYTHONPATH", "VIRTUAL_ENV")
"""Our packages are not those of that environment."""


def vllm_command() -> tuple[str, ...]:
    """How vLLM's server is started in ``$VLLM_VENV``, or in ``.venv-vllm`` in the repository.

    Not the command ``vllm``: that of vllm-cpu 0.32.0 ends at once, because it looks for the version
    of a package called vllm.

    Raises:
        FileNotFoundError: there is no such environment.
    """
    venv = ROOT / (os.environ.get("VLLM_VENV") or ".venv-vllm")
    python = venv / "bin" / "python"
    if not (venv / ".done").is_file() or not python.is_file():
        raise FileNotFoundError(
            f"vLLM is not installed in {venv}: `make vllm` makes .venv-vllm, "
            "and VLLM_VENV names another place"
        )
    return (str(python), "-m", "vllm.entrypoints.openai.api_server")


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


class VllmServer:
    """One server, as a context manager: ready inside the block, gone after it.

    Attributes:
        port: where it listens.
        url: address of its OpenAI-compatible API, ``http://127.0.0.1:PORT/v1``.
        model: its name of the model.
        start_s: seconds that the last start took.
    """

    def __init__(
        self,
        directory: Path,
        *,
        log: Path,
        command: Sequence[str] | None = None,
        port: int | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        """Describe the server; nothing runs before :meth:`start`.

        Args:
            directory: a Hugging Face directory; its name becomes the server's name of the model.
            log: the server's output is appended to it.
            command: that starts vLLM's server; ``vllm_command()`` if None.
            port: a free one if None. It is kept over restarts.
            args: further arguments of the server; of two that differ the last one counts.
            env: further environment variables.
            start_timeout_s: most seconds until it must answer ``/health``.
        """
        self.command = tuple(vllm_command() if command is None else command)
        self.directory = directory
        self.model = directory.name
        self.log = log
        self.port = free_port() if port is None else port
        self.args = tuple(args)
        self.env = dict(env or {})
        self.start_timeout_s = start_timeout_s
        self.start_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def start(self) -> None:
        """Start it and wait until it is healthy.

        Raises:
            RuntimeError: the port is taken, or it ended, or was not healthy in time; the end of its
                log is in the text.
        """
        assert self._process is None, "it runs already"
        with socket.socket() as probe:
            if probe.connect_ex((HOST, self.port)) == 0:
                raise RuntimeError(f"port = {self.port}: another server listens there")
        inherited = {k: v for k, v in os.environ.items() if k not in REMOVED}
        command = [*self.command, "--model", str(self.directory), "--host", HOST]
        command += ["--port", str(self.port), "--served-model-name", self.model]
        command += [*ARGUMENTS, *self.args]
        begin = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as log:
            self._process = subprocess.Popen(
                command,
                env=DEFAULTS | inherited | FORCED | self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            log.write(f"process group {self._process.pid}: {' '.join(command)}\n".encode())
        try:
            while not self.healthy():
                self._check_alive()
                if time.monotonic() - begin > self.start_timeout_s:
                    raise RuntimeError(
                        f"vllm was not healthy within start_timeout_s={self.start_timeout_s:g}; "
                        f"the end of {self.log}:\n{self._tail()}"
                    )
                time.sleep(0.25)
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - begin

    def healthy(self) -> bool:
        """Whether it answers ``/health`` with 200."""
        # No proxy: the environment may name one, and this is our own machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{HOST}:{self.port}/health", timeout=5.0) as answer:
                return answer.status == 200
        except OSError:
            return False

    def wait(self) -> None:
        """Wait until it ends, which it should not.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process is not None, "it does not run"
        self._process.wait()
        self._check_alive()

    def kill(self) -> None:
        """End all its processes, without any farewell: nothing of it is worth keeping."""
        process, self._process = self._process, None
        if process is None:
            return
        # The group outlives its leader, and gigabytes take a while to be given back.
        deadline = time.monotonic() + KILL_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.poll()
                time.sleep(0.05)
        process.wait()

    def _check_alive(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(
                f"vllm ended with exit code {code}; the end of {self.log}:\n{self._tail()}"
            )

    def _tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="directory, or cached name"
    )
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument("--log", type=Path, default=Path(LOG), help=f"default: {LOG}")
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    parser.add_argument("args", nargs="*", help="after --, for vLLM's server")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        server = VllmServer(
            model_dir(options.model),
            log=options.log,
            port=options.port,
            args=options.args,
            start_timeout_s=options.start_timeout_s,
        )
        with server:
            print(f"{server.model} at {server.url} after {server.start_s:.0f} s", flush=True)
            server.wait()
    except (FileNotFoundError, RuntimeError) as error:
        print(f"serve_vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
