"""``rollouts.jsonl``: one line of JSON for each rollout, the one artifact of what was played.

A line (schema 1) holds: ``schema``, ``step``, ``policy_version`` (of the last sampled turn, null
without one), the fields of ``spec``, ``status``, ``reward``, ``breakdown``, ``error``, ``stats``,
``messages``, and ``turns``: for each sampled turn its ``start`` and ``end`` in the ledger, its
``text``, ``ids``, ``logprobs``, ``policy_version`` and, if the recorder can decode, ``pieces`` (the
text of each id). With ``full_tokens`` there is also ``tokens``: ``ids`` of the whole ledger, and
``authors`` as runs of [author, count].
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from components.rollout.types import Author, Ledger, Rollout, RolloutSpec, Tokens

SCHEMA = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of the file."""

    step: int
    policy_version: int | None
    rollout: Rollout


class Recorder:
    """Appends rollouts to a file, each as one whole line.

    Args:
        path: made if it does not exist; half a line at its end (a run that was killed) is cut off.
        resume_step: cut what an earlier run wrote after this step.
        full_tokens: write the whole ledger, prompt and observations too, not only sampled turns.
        decode: text of some ids; with it each sampled id's text is written as well.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume_step: int | None = None,
        full_tokens: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.full_tokens = full_tokens
        self.decode = decode
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut_torn_line(self.path)
        if resume_step is not None:
            truncate_after(self.path, resume_step)
        self._file = self.path.open("ab")

    def write(self, step: int, rollouts: Iterable[Rollout]) -> None:
        """Append the rollouts of a step; each is in the file before the next is begun.

        Raises:
            ValueError: something in one is not JSON (a NaN, say).
        """
        for rollout in rollouts:
            record = to_record(rollout, step=step, full_tokens=self.full_tokens, decode=self.decode)
            line = json.dumps(record, allow_nan=False, separators=(",", ":"))
            self._file.write(line.encode("ascii") + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def to_record(
    rollout: Rollout,
    *,
    step: int,
    full_tokens: bool = False,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> dict[str, Any]:
    """A rollout as a JSON-able mapping of schema 1."""
    texts = {m["turn"]: m["text"] for m in rollout.messages if "turn" in m}
    tokens, turns = rollout.tokens, []
    for number, (start, end) in enumerate(rollout.turns):
        turn: dict[str, Any] = {
            "start": start,
            "end": end,
            "text": texts.get(number, ""),
            "ids": list(tokens.ids[start:end]),
            "logprobs": list(tokens.generator_logprobs[start:end]),
            "policy_version": tokens.policy_versions[start],
        }
        if decode is not None:
            turn["pieces"] = [decode([token]) for token in turn["ids"]]
        turns.append(turn)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "step": step,
        "policy_version": turns[-1]["policy_version"] if turns else None,
        "spec": dataclasses.asdict(rollout.spec),
        "status": rollout.status,
        "reward": rollout.reward,
        "breakdown": dict(rollout.reward_breakdown),
        "error": rollout.error,
        "stats": dict(rollout.stats),
        "messages": list(rollout.messages),
        "turns": turns,
    }
    if full_tokens:
        runs = [[author, len(list(run))] for author, run in groupby(tokens.authors)]
        record["tokens"] = {"ids": list(tokens.ids), "authors": runs}
    return record


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a file as they were written, one at a time.

    Half a line at the end of the file is skipped, and the log says so.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line inside the file is damaged, or of another schema.
    """
    for _, line in _schema_lines(path):
        yield line


def read_rollouts(path: str | Path) -> Iterator[Record]:
    """The records of a file, one at a time.

    A rollout written without ``full_tokens`` comes back with an empty ledger, its ``turns`` kept.
    Half a line at the end of the file is skipped, and the log says so.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line inside the file is damaged, or of another schema.
    """
    for where, line in _schema_lines(path):
        try:
            yield record_of(line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def record_of(line: dict[str, Any]) -> Record:
    """The record of a line of ``read_lines``.

    Raises:
        ValueError: it lacks something, or contradicts itself.
    """
    try:
        rollout = _rollout(line)
        return Record(step=line["step"], policy_version=line["policy_version"], rollout=rollout)
    except KeyError as error:
        raise ValueError(f"no {error} in it") from None
    except TypeError as error:
        raise ValueError(f"not a rollout: {error}") from None


def _schema_lines(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line stands, and the line, checked to be of this schema."""
    for number, line, _ in _lines(Path(path)):
        where = f"{path}, line {number}"
        if not isinstance(line, dict):
            raise ValueError(f"{where}: not a rollout: {str(line)[:80]}")
        if line.get("schema") != SCHEMA:
            raise ValueError(f"{where}: schema {line.get('schema')!r}, this version reads {SCHEMA}")
        yield where, line


def truncate_after(path: str | Path, step: int) -> int:
    """Cut a file after its last record of a step <= ``step``, for a run that resumes there.

    Args:
        path: a file of ``Recorder``, its steps never falling; nothing happens without one.
        step: the last step whose records stay.

    Returns:
        How many whole records were cut.
    """
    path = Path(path)
    if not path.exists():
        return 0
    _cut_torn_line(path)
    keep = num_cut = 0
    for _, line, end in _lines(path):
        if line["step"] <= step and not num_cut:
            keep = end
        else:
            num_cut += 1
    if num_cut:
        os.truncate(path, keep)
        _log.info("%s: cut %d records after step %d", path, num_cut, step)
    return num_cut


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Number (from 1), content and end offset of each whole line."""
    end = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                _log.warning("%s: line %d is incomplete and was skipped", path, number)
                return
            end += len(raw)
            try:
                line = json.loads(raw)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: damaged: {error}") from error
            yield number, line, end


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last newline."""
    with path.open("r+b") as file:
        position = size = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - 65536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < size:
            file.truncate(position)
            _log.warning("%s: cut %d bytes of an incomplete line", path, size - position)


def _rollout(line: dict[str, Any]) -> Rollout:
    return Rollout(
        spec=RolloutSpec(**line["spec"]),
        tokens=_tokens(line) if "tokens" in line else Ledger().freeze(),
        status=line["status"],
        reward=line["reward"],
        reward_breakdown=line["breakdown"],
        messages=tuple(line["messages"]),
        turns=tuple((turn["start"], turn["end"]) for turn in line["turns"]),
        stats=line["stats"],
        error=line["error"],
    )


def _tokens(line: dict[str, Any]) -> Tokens:
    ids: list[int] = line["tokens"]["ids"]
    authors = [author for author, count in line["tokens"]["authors"] for _ in range(count)]
    logprobs = [0.0] * len(ids)
    versions = [-1] * len(ids)
    for turn in line["turns"]:
        place = slice(turn["start"], turn["end"])
        logprobs[place] = turn["logprobs"]
        versions[place] = [turn["policy_version"]] * len(turn["ids"])
    tokens = Tokens(
        ids=tuple(ids),
        authors=tuple(authors),
        loss_mask=tuple(int(author == Author.ASSISTANT) for author in authors),
        generator_logprobs=tuple(logprobs),
        policy_versions=tuple(versions),
    )
    tokens.check()
    return tokens
