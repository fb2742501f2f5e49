"""Rollouts as text: a table of many, or one from its first message to its last."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tools.viewer.entries import Entry, visible

_ROLES = {"user": "cyan", "assistant": "green", "tool": "yellow"}
MAX_RESULT_CHARS = 1500
"""Longer tool results are cut in the terminal; the page has all of them."""


def print_list(console: Any, entries: Sequence[Entry]) -> None:
    """One row for each rollout, and the means below."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    left = ("rollout", "task", "status", "safety")
    for name in (
        *("no", "step", "rollout", "task", "status", "reward", "advantage"),
        *("turns", "calls", "tokens", "safety"),
    ):
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for entry in entries:
        line, stats = entry.line, entry.line["stats"]
        table.add_row(
            str(entry.number),
            str(line["step"]),
            Text(visible(f"{entry.phase} {line['spec']['group']}.{line['spec']['member']}")),
            Text(visible(entry.task)),
            Text(visible(line["status"]), style=_status_style(line["status"])),
            Text(_number(line["reward"]), style="bold" if line["reward"] else ""),
            Text(_advantage(entry), style="dim" if entry.why else ""),
            str(len(line["turns"])),
            _count(stats, "tool_calls"),
            _count(stats, "sampled_tokens"),
            Text(" ".join(entry.violated) or ("ok" if entry.findings is not None else "-")),
        )
    console.print(table)
    rewards = [e.line["reward"] for e in entries if e.line["reward"] is not None]
    mean = f", mean reward {math.fsum(rewards) / len(rewards):.3f}" if rewards else ""
    failed = len(entries) - len(rewards)
    console.print(
        f"{len(entries)} rollouts{mean}" + (f", {failed} failed" if failed else ""),
        highlight=False,
    )


def print_rollout(console: Any, entry: Entry, *, tokens: bool, siblings: Sequence[Entry]) -> None:
    """One rollout: how it was scored, then every message.

    Args:
        console: to print on.
        entry: the rollout.
        tokens: show each sampled token with its probability in place of a turn's text.
        siblings: the rollouts of its group, itself among them.
    """
    from rich.text import Text

    line, say = entry.line, _plain(console)
    console.rule(Text(visible(f"{entry.number}  {entry.id}")))
    say(f"step {line['step']}   status {line['status']}   policy {line['policy_version']}")
    why = f" ({entry.why})" if entry.why else ""
    say(f"reward {_number(line['reward'])}   advantage {_advantage(entry)}{why}")
    if line["breakdown"]:
        say("made of   " + "   ".join(f"{k} {v:.3g}" for k, v in line["breakdown"].items()))
    say("counted   " + "   ".join(f"{k} {v:.4g}" for k, v in line["stats"].items()))
    if line["error"]:
        say(f"error     {line['error']}", "red")
    others = [f"{e.number}: {_number(e.line['reward'])}" for e in siblings]
    say("group     " + "   ".join(others) + "   (number: reward)")
    for name, findings in (entry.findings or {}).items():
        for found in findings:
            if not found["passed"]:
                say(f"{name} broken at message {found['message']}: {found['text']}", "red")
    for place, message in enumerate(line["messages"]):
        _print_message(console, place, message, entry if tokens else None)


def _print_message(console: Any, place: int, message: Mapping[str, Any], entry: Entry | None):
    from rich.text import Text

    say, role = _plain(console), message["role"]
    marks = [m for m in ("error", "refused", "dropped") if message.get(m)]
    note = f"  [{', '.join(marks)}]" if marks else ""
    console.print()
    say(f"{place} {role}{note}", f"bold {_ROLES.get(role, '')}")
    if entry is not None and "turn" in message:
        console.print(_token_text(entry, message["turn"]))
        return
    content = message["content"]
    if role == "tool" and len(content) > MAX_RESULT_CHARS:
        content = f"{content[:MAX_RESULT_CHARS]}... ({len(content)} characters)"
    if content:
        say(content)
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        console.print(Text.assemble((visible(call["name"]), "bold"), visible(f"({arguments})")))


def _token_text(entry: Entry, turn: int) -> Any:
    """Each token of a turn with its probability behind it; the improbable ones in colour."""
    from rich.text import Text

    recorded = entry.line["turns"][turn]
    ids = recorded["ids"]
    pieces = entry.pieces[turn] if entry.pieces else [f"[{token}]" for token in ids]
    text = Text()
    for piece, logprob in zip(pieces, recorded["logprobs"], strict=True):
        probability = math.exp(logprob)
        style = "red" if probability < 0.1 else "yellow" if probability < 0.5 else ""
        text.append(visible(piece, keep="\n"), style)
        text.append(f" {probability:.2f} ", "dim")
    return text


def _plain(console: Any):
    """Print a text of the model's, or around one: no markup, nothing that a terminal obeys."""
    from rich.text import Text

    return lambda text, style="": console.print(Text(visible(text), style=style))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _advantage(entry: Entry) -> str:
    return "-" if entry.advantage is None else f"{entry.advantage:+.3f}"


def _count(stats: Mapping[str, float], name: str) -> str:
    return f"{stats[name]:.0f}" if name in stats else "-"


def _status_style(status: str) -> str:
    if status.startswith("error_"):
        return "red"
    return "yellow" if status.startswith("truncated_") else ""
