"""What an agent may not send: found before anything is delivered.

A refused turn is answered in our own conversation only. The benchmark's record does not hold it,
because scoring executes every recorded call again.
"""

from __future__ import annotations

import ast
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from components.envs.base import Message

MAX_DEPTH = 16
"""Deepest nesting of tool arguments."""
MAX_CALLS = 32
"""Most calls in one turn: a guard, far above what the benchmark's own agents make."""
MAX_EXPRESSION_CHARS = 400
"""Longest argument of ``calculate``."""


def refusal(
    message: Message, *, max_text_chars: int, refuse_text_with_call: bool = False
) -> str | None:
    """Why a turn cannot be delivered.

    Args:
        message: the agent's turn.
        max_text_chars: most characters of its text, and of the JSON of one call's arguments.
        refuse_text_with_call: refuse text beside a call, and several calls, as the benchmark's
            policies ask. The benchmark itself accepts both.

    Returns:
        What to tell the agent, or None when the turn is fine.
    """
    if message.role != "assistant":
        return f"expected a message with role 'assistant', got {message.role!r}"
    if not isinstance(message.content, str):
        return f"content must be a string, got {type(message.content).__name__}"
    blank = not message.content.strip()
    if blank and not message.tool_calls:
        return "the message is empty: send text to the user or call a tool"
    if len(message.content) > max_text_chars:
        return f"the text has {len(message.content)} characters; at most {max_text_chars} fit"
    limit = 1 if refuse_text_with_call else MAX_CALLS
    if len(message.tool_calls) > limit:
        return f"{len(message.tool_calls)} tool calls in one message; at most {limit} is allowed"
    if refuse_text_with_call and message.tool_calls and not blank:
        return "send either text or a tool call, not both at the same time"
    for call in message.tool_calls:
        reason = _call_refusal(call.name, call.arguments, max_text_chars)
        if reason is not None:
            return reason
    return None


def _call_refusal(name: Any, arguments: Any, max_chars: int) -> str | None:
    if not isinstance(name, str) or not name.strip() or len(name) > 200:
        return "a tool call needs the name of a tool"
    if not isinstance(arguments, Mapping):
        return f"the arguments of {name} must be a JSON object, got {type(arguments).__name__}"
    if _too_deep(arguments, MAX_DEPTH):
        return f"the arguments of {name} are nested more than {MAX_DEPTH} deep"
    try:
        text = json.dumps(arguments, allow_nan=False, default=dict)
    except (TypeError, ValueError) as error:
        return f"the arguments of {name} are not JSON: {error}"
    if len(text) > max_chars:
        return f"the arguments of {name} have {len(text)} characters; at most {max_chars} fit"
    if name == "calculate" and isinstance(arguments.get("expression"), str):
        return expression_refusal(arguments["expression"])
    return None


def _too_deep(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        return levels == 0 or any(_too_deep(v, levels - 1) for v in value.values())
    if isinstance(value, (list, tuple)):
        return levels == 0 or any(_too_deep(v, levels - 1) for v in value)
    return False


def expression_refusal(expression: str) -> str | None:
    """Why ``calculate`` may not evaluate an expression, e.g. ``9**9**8``, which never ends.

    An expression that is merely wrong is not refused: the tool itself answers with an error.
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        return f"the expression is longer than {MAX_EXPRESSION_CHARS} characters"
    if "**" not in expression:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base, exponent = _small_number(node.left), _small_number(node.right)
            if base is None or exponent is None or abs(base) > 1e6 or abs(exponent) > 64:
                return "the expression holds a power that is too large to calculate"
    return None


def _small_number(node: ast.expr) -> float | None:
    """The value of a plain number, signed or not; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        node = node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value) if abs(node.value) < 1e300 else None
    return None


class ToolTimeout(BaseException):
    """A tool ran past its limit. Not an ``Exception``: tau2 turns those into tool results."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`ToolTimeout` inside the block after ``seconds`` of wall time.

    It needs SIGALRM and the main thread of the process. Elsewhere nothing can interrupt a tool and
    whoever runs the environment must end the process by its own deadline.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(signum: int, frame: Any) -> None:
        raise ToolTimeout

    start = time.monotonic()
    previous = signal.signal(signal.SIGALRM, ring)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if outer:  # somebody else's alarm was running: let it ring at its own time
            left = max(outer - (time.monotonic() - start), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left)
