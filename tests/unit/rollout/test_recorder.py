from __future__ import annotations

import dataclasses
import json
import logging
import math

import pytest

from components.rollout.agent_loop import Limits, run_episode
from components.rollout.recorder import Recorder, read_rollouts, truncate_after
from components.rollout.types import Ledger, Rollout
from tests.unit.rollout.fakes import CALL, FakeEngine, FakeEnv, make_renderer, spec

RENDERER = make_renderer()
LIMITS = Limits(max_turns=10, max_turn_tokens=120, max_tokens=4000, max_refused=2)


def play(task: str) -> Rollout:
    engine = FakeEngine({task + "/0": ["你好", "<tool_call>", CALL, "Bye"]})
    loop = run_episode(FakeEnv(), RENDERER, spec(task), limits=LIMITS, temperature=1.0)
    try:
        request = next(loop)
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as stop:
        return stop.value


ROLLOUTS = [play("user_stop:3"), play("raise:2"), play("over:1"), play("max_steps:1")]


def write(path, steps=(0, 0, 1, 2)):
    with Recorder(path, full_tokens=True, decode=RENDERER.decode) as recorder:
        for rollout, step in zip(ROLLOUTS, steps, strict=True):
            recorder.write(step, [rollout])


def test_round_trip(tmp_path):
    path = tmp_path / "logs" / "rollouts.jsonl"
    write(path)
    records = list(read_rollouts(path))
    assert [record.rollout for record in records] == ROLLOUTS
    assert [record.step for record in records] == [0, 0, 1, 2]
    assert [record.policy_version for record in records] == [7, 7, None, 7]


def test_without_the_whole_ledger(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with Recorder(path) as recorder:
        recorder.write(3, [ROLLOUTS[0]])
    [record] = read_rollouts(path)
    assert record.rollout == dataclasses.replace(ROLLOUTS[0], tokens=Ledger().freeze())


def test_schema_of_a_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write(path)
    rollout, line = ROLLOUTS[0], json.loads(path.read_text().splitlines()[0])
    assert line["schema"] == 1
    assert line["spec"]["task_id"] == "user_stop:3"
    assert line["status"] == "completed"
    assert line["reward"] == 1.0
    assert line["breakdown"] == {"official": 1.0}
    assert len(line["turns"]) == len(rollout.turns) == 4
    for turn, (start, end) in zip(line["turns"], rollout.turns, strict=True):
        assert turn["ids"] == list(rollout.tokens.ids[start:end])
        assert turn["logprobs"] == list(rollout.tokens.generator_logprobs[start:end])
        assert turn["text"] == RENDERER.decode(turn["ids"])
        assert len(turn["pieces"]) == len(turn["ids"])
    assert line["turns"][0]["text"] == "你好<|im_end|>"
    assert line["turns"][3]["pieces"][-1] == "<|im_end|>"
    refused = [m["content"] for m in line["messages"] if m.get("refused")]
    assert refused[0] == "<tool_call><|im_end|>"


def test_half_a_line_is_skipped_then_cut(tmp_path, caplog):
    path = tmp_path / "rollouts.jsonl"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    with caplog.at_level(logging.WARNING):
        assert len(list(read_rollouts(path))) == 4
    assert "line 5 is incomplete" in caplog.text
    with Recorder(path, full_tokens=True, decode=RENDERER.decode) as recorder:
        assert path.read_bytes() == whole
        recorder.write(9, [ROLLOUTS[0]])
    assert [record.step for record in read_rollouts(path)] == [0, 0, 1, 2, 9]
    path.write_bytes(whole[:100])
    assert list(read_rollouts(path)) == []
    Recorder(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(("step", "kept"), [(-1, 0), (0, 2), (1, 3), (2, 4), (7, 4)])
def test_truncate_after(tmp_path, step, kept):
    path = tmp_path / "rollouts.jsonl"
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + lines[0][:-1])  # killed before the newline
    assert truncate_after(path, step) == 4 - kept
    assert path.read_bytes() == b"".join(lines[:kept])
    assert truncate_after(path, step) == 0


def test_a_resumed_run_writes_over_what_it_plays_again(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write(path)
    with Recorder(path, resume_step=1) as recorder:
        recorder.write(2, ROLLOUTS[:2])
    assert [record.step for record in read_rollouts(path)] == [0, 0, 1, 2, 2]


def test_truncate_without_a_file(tmp_path):
    assert truncate_after(tmp_path / "none.jsonl", 3) == 0


def test_damage_and_other_schemas_are_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write(path)
    first, second, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{\n" + second)
    with pytest.raises(ValueError, match="line 2: damaged"):
        list(read_rollouts(path))
    path.write_bytes(first + second.replace(b'"schema":1', b'"schema":99'))
    with pytest.raises(ValueError, match="line 2: schema 99"):
        list(read_rollouts(path))


def test_what_is_not_json_is_not_written(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with Recorder(path) as recorder:
        with pytest.raises(ValueError, match="JSON"):
            recorder.write(0, [dataclasses.replace(ROLLOUTS[0], reward=math.nan)])
        recorder.write(0, [ROLLOUTS[0]])
    assert len(list(read_rollouts(path))) == 1
