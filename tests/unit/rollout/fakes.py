"""A scripted environment and a scripted engine: no model, no benchmark."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tests.tiny
from components.chat.hermes import HermesRenderer
from components.envs.base import Message, Reward, Task, ToolSpec, Trajectory, UserError
from components.policy.engine import Feed, in_rounds
from components.rollout.types import RolloutSpec, SampleFailure, SampleRequest, SampleResult

TOOLS = (
    ToolSpec(
        name="get_order",
        description="Look an order up. It is quick.",
        parameters={
            "type": "object",
            "properties": {"order_id": {"type": "string"}},
            "required": ["order_id"],
        },
    ),
)
CALL = '<tool_call>\n{"name": "get_order", "arguments": {"order_id": "#W1"}}\n</tool_call>'


class FakeEnv:
    """The task id says what happens: ``kind:turn``, at which delivered turn, e.g. ``hang:2``.

    Kinds: user_stop, max_steps, too_many_errors, no_reward, raise, user, timeout, hang, die, and
    wait, which is user_stop as soon as the file ``gate`` is there.
    A call is answered by a tool message, text by a user message.
    """

    def __init__(
        self, *, tool_text: str = "pending", max_delay_s: float = 0.0, gate: Path | None = None
    ) -> None:
        self.gate = gate
        self.tool_text = tool_text
        self.delays = random.Random(time.time_ns() ^ os.getpid())
        self.max_delay_s = max_delay_s
        self.actions: list[Message] = []
        self.num_resets = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.kind, turn = str((options or {})["task_id"]).split(":")
        self.turn, self.actions = int(turn), []
        self.num_resets += 1
        self.seed = seed
        self._delay()
        if self.kind == "over":
            return "", self._end() | {"system_prompt": "Be kind.", "tools": TOOLS}
        messages = (
            Message(role="assistant", content="Hi! How can I help you today?"),
            Message(role="user", content=f"Hello, I am number {seed}."),
        )
        return "", {"messages": messages, "system_prompt": "Be kind.", "tools": TOOLS}

    def step(self, action: str | Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert isinstance(action, Message)
        self._delay()
        if action.content == "refuse me":
            reply = Message(role="tool", content="Error: not like this", error=True)
            return "", 0.0, False, False, {"messages": (reply,), "refused": True}
        self.actions.append(action)
        if len(self.actions) >= self.turn:
            return self._last()
        if action.tool_calls:
            replies = tuple(
                Message(role="tool", content=self.tool_text, tool_call_id=call.id)
                for call in action.tool_calls
            )
        else:
            replies = (Message(role="user", content="Yes, please go ahead."),)
        return "", 0.0, False, False, {"messages": replies}

    def _last(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.kind == "raise":
            raise KeyError("broken database")
        if self.kind == "user":
            raise UserError("empty completion")
        if self.kind == "timeout":
            raise TimeoutError("tool ran too long")
        if self.kind == "hang":
            time.sleep(1000)
        if self.kind == "die":
            os._exit(3)
        if self.kind == "wait":
            assert self.gate is not None
            while not self.gate.exists():
                time.sleep(0.005)
        truncated = self.kind in ("max_steps", "too_many_errors")
        return "", 0.0, not truncated, truncated, self._end()

    def _end(self) -> dict[str, Any]:
        reason = "user_stop" if self.kind in ("over", "no_reward", "wait") else self.kind
        done = Reward(value=1.0 if reason == "user_stop" else 0.0, breakdown={"official": 1.0})
        trajectory = Trajectory(
            task=Task(id="1", domain="fake", split="train"),
            messages=(),
            termination_reason=reason,
            num_steps=len(self.actions),
            num_tool_errors=0,
        )
        info = {"messages": (Message(role="user", content="###STOP###"),), "trajectory": trajectory}
        return info if self.kind == "no_reward" else info | {"reward": done}

    def _delay(self) -> None:
        if self.max_delay_s:
            time.sleep(self.delays.random() * self.max_delay_s)

    def close(self) -> None:
        pass


class FakeEngine:
    """Samples scripted texts, or, without a script, turns that depend on everything it was sent.

    Args:
        script: texts of the turns by rollout id; a tuple of ids stands for itself.
        min_turn: without a script, text that depends on the context, the seed and the whole batch.
    """

    policy_version = 7

    def __init__(self, script: Mapping[str, Sequence[str | tuple[int, ...]]] | None = None) -> None:
        self.renderer = make_renderer()
        self.script = {name: list(turns) for name, turns in (script or {}).items()}
        self.batches: list[list[str]] = []
        self.requests: list[SampleRequest] = []
        self.released: list[str] = []

    def generate(
        self, requests: Sequence[SampleRequest], *, feed: Feed | None = None
    ) -> list[SampleResult | SampleFailure]:
        return in_rounds(self.sample_all, requests, feed)

    def sample_all(
        self, requests: Sequence[SampleRequest]
    ) -> Sequence[SampleResult | SampleFailure]:
        self.batches.append([request.rollout_id for request in requests])
        self.requests += requests
        return [self._one(request, self.batches[-1]) for request in requests]

    def _one(self, request: SampleRequest, batch: list[str]) -> SampleResult:
        turns = self.script.get(request.rollout_id)
        if turns:
            turn = turns.pop(0)
        else:
            state = (request.context, request.seed, request.shared_len, batch)
            turn = "I say " + hashlib.sha256(repr(state).encode()).hexdigest()[:6]
        message = Message(role="assistant", content=turn) if isinstance(turn, str) else None
        ids = self.renderer.render_assistant(message) if message else tuple(turn)  # type: ignore
        finish = "stop" if len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        if ids[-1] not in request.stop_ids:
            finish = "length"
        return SampleResult(
            ids=ids,
            logprobs=tuple(-0.1 - token / 1000 for token in ids),
            finish_reason=finish,  # type: ignore[arg-type]
            policy_version=self.policy_version,
        )

    def release(self, rollout_ids: Iterable[str]) -> None:
        self.released += rollout_ids

    def sync(self, policy_version: int) -> None:
        self.policy_version = policy_version


def tokenizer_dir() -> Path:
    """One tiny tokenizer for every process of a test run."""
    builder = hashlib.sha256(Path(tests.tiny.__file__).read_bytes()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()) / f"sinkflex-tiny-{os.getuid()}-{builder}"
    if not (directory / "tokenizer.json").is_file():
        own = Path(tempfile.mkdtemp())
        tests.tiny.tiny_tokenizer_dir(own)
        directory.mkdir(exist_ok=True)
        os.replace(own / "tokenizer.json", directory / "tokenizer.json")
    return directory


def make_renderer() -> HermesRenderer:
    return HermesRenderer(tokenizer_dir())


def make_env(**kwargs: Any) -> partial[FakeEnv]:
    return partial(FakeEnv, **kwargs)


def spec(task_id: str, *, member: int = 0, rollout_id: str | None = None) -> RolloutSpec:
    return RolloutSpec(
        rollout_id=rollout_id or f"{task_id}/{member}",
        task_id=task_id,
        domain="fake",
        group=0,
        member=member,
        seed=11 + member,
        env_seed=5,
    )


def bad_env() -> FakeEnv:
    raise ValueError("domain='retial': did you mean 'retail'?")


def broken_env() -> FakeEnv:
    raise KeyError("no data")


def look_inside(env: FakeEnv, renderer: HermesRenderer, item: Any) -> Any:
    """Run in a worker: what a test wants to know of it."""
    if item == "modules":
        return [name for name in ("torch", "torchtune", "pytest") if name in sys.modules]
    if item == "preloaded":
        from components.rollout import preload

        return sorted(preload.done)
    if item == "threads":
        return os.environ["OMP_NUM_THREADS"], threading.active_count()
    if item == "pid":
        return os.getpid()
    if item == "hang":
        time.sleep(1000)
    if item == "raise":
        raise KeyError("no such item")
    if isinstance(item, float):
        time.sleep(item)
    return item, type(env).__name__, type(renderer).__name__


def serve_late(*args: Any) -> None:
    """A worker's ``serve`` that is slow to get ready."""
    from components.rollout.worker import serve  # not while a forkserver preloads this module

    time.sleep(2.0)
    serve(*args)


_KEPT: list[bytes] = []


def keep_mib(env: FakeEnv, renderer: HermesRenderer, item: int) -> int:
    """Leak memory in a worker, and swallow its MemoryError as tau2 does: the pid, or -1."""
    try:
        _KEPT.append(b"x" * (item << 20))
    except MemoryError:
        return -1
    return os.getpid()


def start_child(env: FakeEnv, renderer: HermesRenderer, item: tuple[Path, str]) -> str:
    """Start a process as a tool may, write down its pid and ours, and go on as the item says."""
    folder, then = item
    child = subprocess.Popen(["sleep", "1000"])
    (folder / str(child.pid)).touch()
    (folder / str(os.getpid())).touch()
    if then == "exit":
        os._exit(0)
    if then == "burn":  # with the interpreter's lock held: no other thread of Python gets to run
        re.match(r"(a+)+$", "a" * 64 + "b")
    if then == "hang":
        time.sleep(1000)
    return then


def slow_exit_codes() -> None:
    """Preloaded by a forkserver: it closes its pipes to the pool well after the exit codes."""
    from multiprocessing import forkserver

    write = forkserver.write_signed

    def slowly(fd: int, number: int) -> None:
        write(fd, number)
        if number <= 0:  # not a pid
            time.sleep(0.5)

    forkserver.write_signed = slowly
