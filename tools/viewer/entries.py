"""Recorded rollouts with what the file does not hold: advantages, safety findings, token texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any, get_args

from components.rl.advantages import group_advantages
from components.rollout.recorder import read_lines
from components.rollout.types import Status

_MAX_PENDING = 3
"""A character of UTF-8 has at most four bytes, so at most three tokens before its last."""
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@dataclass(slots=True, kw_only=True)
class Entry:
    """A line of rollouts.jsonl and what was found out about it."""

    number: int
    """Its place in the file, from 1."""
    line: Mapping[str, Any]
    phase: str
    """``"train/3"`` or ``"eval"``: what its id begins with."""
    advantage: float | None = None
    """None where it has none: see ``why``."""
    why: str = ""
    """Why the rollout was not trained; empty where it was."""
    pieces: list[list[str]] | None = None
    """Text of each sampled token, by turn; None without a tokenizer. A token that ends inside a
    character has an empty text, the one that ends the character has the whole of it."""
    findings: dict[str, list[dict[str, Any]]] | None = None
    """By check: ``passed``, ``text`` and ``message`` (index into ``messages``); None: no check."""

    @property
    def id(self) -> str:
        return self.line["spec"]["rollout_id"]

    @property
    def task(self) -> str:
        spec = self.line["spec"]
        return f"{spec['domain']}/{spec['task_id']}"

    @property
    def split(self) -> str:
        """``train``, ``eval``...: the first word of the phase."""
        return self.phase.partition("/")[0]

    @property
    def group(self) -> tuple[int, str, int]:
        """What it shares with its siblings and with no other rollout of the file."""
        return self.line["step"], self.phase, self.line["spec"]["group"]

    @property
    def violated(self) -> list[str]:
        """The safety checks that it breaks."""
        found = self.findings or {}
        return [name for name, fs in found.items() if any(not f["passed"] for f in fs)]


def read_entries(path: Path) -> list[Entry]:
    """All rollouts of a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is damaged or lacks something.
    """
    entries = []
    for number, line in enumerate(read_lines(path), start=1):
        missing = [k for k in ("step", "spec", "status", "messages", "turns") if k not in line]
        if missing:
            raise ValueError(f"{path}, rollout {number}: no {missing[0]!r} in it")
        spec = line["spec"]
        tail = f"/{spec['group']}/{spec['domain']}/{spec['task_id']}/{spec['member']}"
        phase = spec["rollout_id"].removesuffix(tail)
        entries.append(Entry(number=number, line=line, phase=phase))
    return entries


def add_advantages(entries: Iterable[Entry], config: Mapping[str, Any]) -> None:
    """Work out again what the trainer made of the rewards of each group of a training step.

    Args:
        entries: of a run. Those of other phases (evaluations, demonstrations) have no advantage.
        config: of the run; ``advantages`` and ``mask_overlong`` of it are used.

    Raises:
        ValueError: ``advantages`` has a setting that ``group_advantages`` does not know.
    """
    settings = dict(config.get("advantages") or {})
    known = set(signature(group_advantages).parameters) - {"rewards", "shaping"}
    unknown = set(settings) - known
    if unknown:
        raise ValueError(f"config.yaml: advantages.{sorted(unknown)[0]} is not known here")
    groups: dict[tuple[int, str, int], list[Entry]] = {}
    for entry in entries:
        if entry.split == "train":
            groups.setdefault(entry.group, []).append(entry)
        else:
            entry.why = "not of a training step"
    rewards = [[entry.line["reward"] for entry in group] for group in groups.values()]
    found = group_advantages(rewards, **settings)
    for group, values, kept in zip(groups.values(), found.values, found.kept, strict=True):
        valid = sum(entry.line["reward"] is not None for entry in group)
        for entry, value in zip(group, values, strict=True):
            entry.advantage = value
            if entry.line["reward"] is None:
                entry.why = "failed: it left its group"
            elif value is None:
                entry.why = "advantages.num_trained left it out"
            elif not kept:
                entry.why = "no rollout to compare with" if valid < 2 else "all rewards alike"
            elif config.get("mask_overlong") and entry.line["status"] == "truncated_tokens":
                entry.why = "cut short, and mask_overlong leaves such rollouts out"


def add_findings(entries: Iterable[Entry]) -> None:
    """Run the safety checks on the rollouts of domains that have some; failed ones have none."""
    from components.safety.checks import checks_of, run_checks
    from components.safety.conversation import from_records

    for entry in entries:
        spec = entry.line["spec"]
        if entry.line["status"].startswith("error_") or not checks_of(spec["domain"]):
            continue
        messages = entry.line["messages"]
        talk = from_records(messages, domain=spec["domain"], task_id=spec["task_id"])
        # A finding counts delivered messages only; the record has the refused ones too.
        places = [i for i, message in enumerate(messages) if not message.get("refused")]
        entry.findings = {
            name: [
                {"passed": f.passed, "text": f.text, "message": places[f.place]} for f in findings
            ]
            for name, findings in run_checks(talk).items()
        }


def add_pieces(entries: Iterable[Entry], decode: Callable[[list[int]], str] | None) -> None:
    """The text of each sampled token: as recorded, or decoded from its id.

    Args:
        entries: of a run.
        decode: of the run's tokenizer; None leaves tokens without a text.

    Raises:
        ValueError: the tokenizer gives another text than was recorded: it is not the run's.
    """
    decode_once = None if decode is None else lru_cache(maxsize=None)(lambda x: decode(list(x)))
    for entry in entries:
        turns = entry.line["turns"]
        if all("pieces" in turn for turn in turns):
            entry.pieces = [turn["pieces"] for turn in turns]
        elif decode_once is not None:
            entry.pieces = [split_text(turn["ids"], decode_once) for turn in turns]
            for turn, pieces in zip(turns, entry.pieces, strict=True):
                got, recorded = "".join(pieces), turn["text"]
                if got.replace("\ufffd", "") != recorded.replace("\ufffd", ""):
                    raise ValueError(
                        f"{entry.id}: the tokenizer reads {got[:60]!r} where {recorded[:60]!r} was "
                        "recorded; give the run's own with --tokenizer, or --tokenizer none"
                    )


def split_text(ids: Sequence[int], decode: Callable[[tuple[int, ...]], str]) -> list[str]:
    """The text that each id adds, for a byte-level vocabulary.

    Args:
        ids: [L] of one turn.
        decode: text of a few ids, U+FFFD for half a character.
    """
    pieces: list[str] = []
    pending: tuple[int, ...] = ()
    for place, token in enumerate(ids):
        pending = (*pending, token)
        text = decode(pending)
        last = len(pending) > _MAX_PENDING or place == len(ids) - 1
        if text.endswith("\ufffd") and not last:
            pieces.append("")
        else:
            pieces.append(text)
            pending = ()
    return pieces


def select(
    entries: Iterable[Entry],
    *,
    steps: tuple[float, float] | None = None,
    rewards: tuple[float, float] | None = None,
    task: str = "",
    status: str = "",
    split: str = "",
    violated: str = "",
) -> list[Entry]:
    """The rollouts that pass every filter that is given.

    Args:
        entries: to choose from.
        steps: lowest and highest step.
        rewards: lowest and highest reward; a failed rollout has none and is left out.
        task: part of ``domain/task``.
        status: whole, or what it begins with: ``truncated``, ``error``.
        split: ``train``, ``eval``...
        violated: name of a safety check, or ``any``.

    Raises:
        ValueError: no status begins with ``status``.
    """
    known = get_args(Status)
    if status and not any(name.startswith(status) for name in known):
        close = get_close_matches(status, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"status {status!r}: not a status{hint} (allowed: {', '.join(known)})")

    def passes(entry: Entry) -> bool:
        reward = entry.line["reward"]
        return (
            (steps is None or steps[0] <= entry.line["step"] <= steps[1])
            and (rewards is None or (reward is not None and rewards[0] <= reward <= rewards[1]))
            and task.lower() in entry.task.lower()
            and entry.line["status"].startswith(status)
            and (not split or entry.split == split)
            and (
                not violated
                or (bool(entry.violated) if violated == "any" else violated in entry.violated)
            )
        )

    return [entry for entry in entries if passes(entry)]


def visible(text: str, *, keep: str = "\n\t") -> str:
    """A text in which what would not be seen is spelled out, as ``<U+202E>``.

    Control characters (a terminal obeys them), marks that turn the direction of text round, and
    characters without a width or a meaning. The page does the same in rollout.js.
    """
    return "".join(
        f"<U+{ord(c):04X}>" if unicodedata.category(c) in _HIDDEN and c not in keep else c
        for c in text
    )
