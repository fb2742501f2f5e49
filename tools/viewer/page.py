"""Rollouts as one HTML file that needs nothing else: no server, no network.

The list is one block of JSON that is read when the page opens; each rollout is a block of its own
that is read when it is looked at. What a model wrote is never markup: it is JSON in which no ``<``
stands, and is put into the page as text nodes. A content security policy lets only the two scripts
and the style of this file run, known by their hashes, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.viewer.entries import Entry

_FOLDER = Path(__file__).parent
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def script_json(value: Any) -> str:
    """JSON for a ``<script type="application/json">``: ASCII, and nothing that HTML would read.

    Raises:
        ValueError: a NaN or an infinity, which are not JSON.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def build_page(entries: Sequence[Entry], *, title: str, notes: Sequence[str] = ()) -> str:
    """The page.

    Args:
        entries: the rollouts, all siblings among them or the groups are not whole.
        title: name of the run.
        notes: what a reader must know, such as settings that were not found.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined
    )
    style = _source("page.css")
    scripts = [_source("rollout.js"), _source("page.js")]
    index = {"rows": [_row(entry) for entry in entries]}
    return environment.get_template("page.html.j2").render(
        title=title,
        notes=notes,
        num_rollouts=len(entries),
        style=Markup(style),
        scripts=[Markup(script) for script in scripts],
        style_hash=_hash(style),
        script_hashes=[_hash(script) for script in scripts],
        index=Markup(script_json(index)),
        bodies=(Markup(script_json(_body(entry))) for entry in entries),
    )


def _source(name: str) -> str:
    text = (_FOLDER / name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name} would end its element early"
    return text


def _hash(text: str) -> str:
    """As a content security policy names a source: of what stands between its tags."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _row(entry: Entry) -> dict[str, Any]:
    """What the list shows, sorts and filters by."""
    line, stats = entry.line, entry.line["stats"]
    return {
        "number": entry.number,
        "id": entry.id,
        "split": entry.split,
        "step": line["step"],
        "group": "/".join(map(str, entry.group)),
        "member": line["spec"]["member"],
        "task": entry.task,
        "status": line["status"],
        "reward": line["reward"],
        "advantage": entry.advantage,
        "why": entry.why,
        "turns": len(line["turns"]),
        "calls": stats.get("tool_calls"),
        "tokens": stats.get("sampled_tokens"),
        "checked": entry.findings is not None,
        "violated": entry.violated,
    }


def _body(entry: Entry) -> dict[str, Any]:
    """What is read when the rollout is looked at."""
    line = entry.line
    messages = [{k: v for k, v in m.items() if k != "text"} for m in line["messages"]]
    turns = [
        {
            "ids": turn["ids"],
            "logprobs": [round(value, 4) for value in turn["logprobs"]],
            "version": turn["policy_version"],
        }
        for turn in line["turns"]
    ]
    for turn, pieces in zip(turns, entry.pieces or (), strict=False):
        turn["pieces"] = pieces
    return {
        "messages": messages,
        "turns": turns,
        "breakdown": line["breakdown"],
        "stats": line["stats"],
        "error": line["error"],
        "version": line["policy_version"],
        "findings": entry.findings,
    }
