"""The viewer's data, its page as a parser sees it, and what it prints."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from components.chat.tokenizer import load_tokenizer
from components.envs.base import ToolCall
from components.rl.groups import trained_items
from components.rollout.recorder import read_lines
from tests.tiny import tiny_tokenizer_dir
from tests.unit.tools.recorded import HOSTILE, hostile_run, make_rollout, write_run
from tools.viewer import entries as found
from tools.viewer.page import build_page, script_json
from tools.viewer.run_files import decoder, find_tokenizer, read_config

ROOT = Path(__file__).parents[3]


def load(run, *, pieces=True):
    """The entries of a run, as the tool loads them."""
    entries = found.read_entries(run / "rollouts.jsonl")
    config = read_config(run)
    found.add_advantages(entries, config)
    if pieces:
        found.add_pieces(entries, decoder(find_tokenizer(run, config)))
    return entries


def group(rewards, *, step=1, number=0, **more):
    return [
        (step, make_rollout(step=step, group=number, member=member, reward=reward, **more))
        for member, reward in enumerate(rewards)
    ]


# ---------------------------------------------------------------- advantages


def test_advantages_are_those_of_each_group_of_each_step(tmp_path):
    """Hand-computed: (R - mean) / std of the population; group 0 of two steps is two groups."""
    run = write_run(
        tmp_path,
        [
            *group([1.0, 0.0, 0.5]),
            *group([1.0, 1.0], number=1),
            *group([0.0, 1.0], step=2),
            *group([0.3, 0.7], phase="eval"),
        ],
    )
    entries = load(run, pieces=False)
    root = math.sqrt(1.5)
    expected = [root, -root, 0.0, 0.0, 0.0, -1.0, 1.0]
    assert [e.advantage for e in entries[:7]] == pytest.approx(expected, abs=1e-5)
    assert [e.advantage for e in entries[7:]] == [None, None]
    whys = [""] * 3 + ["all rewards alike"] * 2 + [""] * 2 + ["not of a training step"] * 2
    assert [e.why for e in entries] == whys


def test_the_runs_own_settings_are_used(tmp_path):
    """RLOO: the reward less the mean of the others, no division; mask_overlong leaves cut ones."""
    rollouts = [
        *group([1.0, 0.0]),
        (1, make_rollout(member=2, reward=0.5, status="truncated_tokens")),
    ]
    config = "advantages: {normalize_std: false, leave_one_out: true}\nmask_overlong: true\n"
    entries = load(write_run(tmp_path, rollouts, config=config), pieces=False)
    assert [e.advantage for e in entries] == pytest.approx([0.75, -0.75, 0.0])
    assert [bool(e.why) for e in entries] == [False, False, True]


@pytest.mark.parametrize("num_trained", [None, 2])
def test_they_are_what_the_trainer_trains(tmp_path, num_trained):
    rollouts = [
        *group([1.0, 0.0, None, 0.2]),
        *group([0.0, 0.0], number=1),
        *group([1.0], number=2),
    ]
    config = "seed: 1" if num_trained is None else f"advantages: {{num_trained: {num_trained}}}\n"
    entries = load(write_run(tmp_path, rollouts, config=config), pieces=False)
    items, _ = trained_items(
        [r for _, r in rollouts], normalize_std=True, eps=1e-6, num_trained=num_trained
    )
    assert [e.number for e in entries if "num_trained" in e.why] == ([4] if num_trained else [])
    assert {i.key: i.advantage for i in items} == {e.id: e.advantage for e in entries if not e.why}
    assert entries[2].why.startswith("failed")
    assert entries[-1].why == "no rollout to compare with"


def test_an_advantage_that_cannot_be_recomputed_is_refused(tmp_path):
    run = write_run(tmp_path, group([1.0, 0.0]), config="advantages: {critic: none}\n")
    with pytest.raises(ValueError, match=r"advantages\.critic"):
        load(run)


# ---------------------------------------------------------------- safety, tokens, filters


def test_findings_point_at_the_recorded_message(tmp_path):
    """A finding counts delivered messages; the refused turn before it is recorded too."""
    calls = tuple(ToolCall(name="get_users", arguments={}, id=f"call_{i}") for i in range(2))
    rollout = make_rollout(domain="mock", texts=("Both at once.",), calls=calls)
    refused = ({"role": "assistant", "content": "x", "refused": True},)
    object.__setattr__(
        rollout, "messages", (*rollout.messages[:1], *refused, *rollout.messages[1:])
    )
    run = write_run(tmp_path, [(1, rollout), (1, make_rollout(domain="text", member=1))])
    entries = load(run, pieces=False)
    found.add_findings(entries)
    assert entries[0].violated == ["S7"]
    [broken] = [f for f in entries[0].findings["S7"] if not f["passed"]]
    assert entries[0].line["messages"][broken["message"]]["content"] == "Both at once."
    assert entries[1].findings is None


def test_tokens_add_up_to_the_text_and_no_character_is_cut(tmp_path):
    tokenizer = load_tokenizer(tiny_tokenizer_dir(tmp_path))
    text = "Hello 你好 \U0001f600 <|im_end|> cancel"
    ids = [*tokenizer.encode(text), tokenizer.special["<|im_end|>"]]
    pieces = found.split_text(ids, lambda some: tokenizer.decode(list(some)))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text + "<|im_end|>"
    assert {"你", "\U0001f600", "<|im_end|>"} <= set(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_another_tokenizer_is_refused(tmp_path):
    run = write_run(tmp_path, group([1.0, 0.0]))  # its ids are bytes, not this vocabulary's
    with pytest.raises(ValueError, match="--tokenizer"):
        load(run)


def test_filters():
    entries = [
        found.Entry(
            number=1, line={**line, "spec": {"domain": "mock", "task_id": task}}, phase=phase
        )
        for line, task, phase in [
            ({"step": 1, "reward": 1.0, "status": "completed"}, "a_1", "train/1"),
            ({"step": 2, "reward": 0.0, "status": "truncated_tokens"}, "a_2", "train/2"),
            ({"step": 3, "reward": None, "status": "error_user"}, "b_1", "eval"),
        ]
    ]
    entries[1].findings = {"S7": [{"passed": False, "text": "", "message": 0}]}

    def steps(**filters):
        return [entry.line["step"] for entry in found.select(entries, **filters)]

    assert steps() == [1, 2, 3]
    assert steps(rewards=(0.0, 0.5)) == [2]
    assert steps(rewards=(float("-inf"), float("inf"))) == [1, 2]
    assert steps(steps=(2, 3)) == [2, 3]
    assert steps(task="MOCK/A") == [1, 2]
    assert steps(status="truncated") == [2]
    assert steps(split="eval") == [3]
    assert steps(violated="any") == steps(violated="S7") == [2]
    assert steps(violated="S1") == []
    with pytest.raises(ValueError, match=r"'complete_d'.*did you mean 'completed'"):
        steps(status="complete_d")


# ---------------------------------------------------------------- the page


class Seen(HTMLParser):
    """Tags, and what stands in scripts and styles, as an HTML parser sees a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.blocks = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag in ("script", "style"):
            self.blocks.append([tag, dict(attrs), ""])

    def handle_data(self, data):
        if self.cdata_elem in ("script", "style"):
            self.blocks[-1][2] += data


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    run = hostile_run(tmp_path_factory.mktemp("hostile"))
    entries = load(run)
    page = build_page(entries, title=HOSTILE[0] + HOSTILE[1], notes=[HOSTILE[1]])
    seen = Seen()
    seen.feed(page)
    return entries, page, seen


def test_json_in_a_page_is_the_same_json_without_markup():
    for text in HOSTILE:
        written = script_json({text: [text]})
        assert written.isascii()
        assert not set("<>&\n") & set(written)
        assert json.loads(written) == {text: [text]}
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_what_a_model_wrote_is_no_markup(hostile):
    entries, page, seen = hostile
    plain = Seen()
    plain.feed(build_page(entries[:1], title="run"))
    extra = ["script"] * (len(entries) - 1) + ["p"]  # a block for each rollout, and the note
    assert sorted(seen.tags) == sorted([*plain.tags, *extra])
    assert "{{" in HOSTILE[3]
    assert json.dumps(HOSTILE[3])[1:-1] in page  # no template ran over it


def test_every_rollout_is_in_the_page_as_it_was_recorded(hostile):
    entries, _, seen = hostile
    data = [json.loads(text) for _, attributes, text in seen.blocks if "type" in attributes]
    rows, bodies = data[0]["rows"], data[1:]
    assert [row["task"] for row in rows] == [f"text/{text}" for text in HOSTILE]
    for entry, body in zip(entries, bodies, strict=True):
        for shown, recorded in zip(body["messages"], entry.line["messages"], strict=True):
            assert shown == {k: v for k, v in recorded.items() if k != "text"}
        for shown, recorded in zip(body["turns"], entry.line["turns"], strict=True):
            assert shown["ids"] == recorded["ids"]
            assert shown["logprobs"] == pytest.approx(recorded["logprobs"], abs=1e-4)
            assert "".join(shown["pieces"]) == recorded["text"]


def test_only_its_own_scripts_may_run_and_nothing_is_loaded(hostile):
    _, _, seen = hostile
    [policy] = [
        v for tag, name, v in seen.attributes if tag == "meta" and "default-src" in (v or "")
    ]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    run = [text for tag, attributes, text in seen.blocks if "type" not in attributes]
    assert len(run) == 3  # the style and two scripts
    for text in run:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not [a for a in seen.attributes if a[1] in ("src", "href", "style") or a[1][:2] == "on"]


# ---------------------------------------------------------------- the terminal


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_terminal_obeys_is_left(text):
    shown = found.visible(text)
    assert not [c for c in shown if ord(c) < 32 or 0x7F <= ord(c) < 0xA0]
    assert not set("\u202e\u202c\u2066\u200b\u00ad\ufeff\u2028\u2029\ud83d") & set(shown)
    assert found.visible("你好 \U0001f600\n\té") == "你好 \U0001f600\n\té"


def tool(*arguments, code=0):
    done = subprocess.run(
        [sys.executable, "tools/view_rollouts.py", *map(str, arguments), "--no-safety"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": "", "TERM": "xterm"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_in_a_pipe_it_is_plain_text(tmp_path):
    run = hostile_run(tmp_path)
    listed = tool(run, "--step", "1", "--reward", "0.5:")
    assert "\x1b" not in listed
    assert [line.split()[0] for line in listed.splitlines() if line.lstrip()[:1].isdigit()] == [
        *("1", "4"),
        "2",  # "2 rollouts, mean reward 1.000"
    ]
    assert "2 rollouts, mean reward 1.000" in listed
    one = tool(run, "--show", "8", "--tokens")
    assert "\x1b" not in one
    assert "<U+001B>[31mred" in one
    assert "[bold]markup[/bold]" in one
    assert {"1.00", "0.50", "0.33"} <= set(one.split())


def test_mistakes_are_said(tmp_path):
    run = write_run(tmp_path, group([1.0, 0.0]))
    assert "none of 2 rollouts passes the filters" in tool(run, "--step", "7:9", code=2)
    assert "no such file" in tool(tmp_path / "nowhere", code=2)
    assert "'5:1': must be 3, 3:5, 3: or :5" in tool(run, "--step", "5:1", code=2)


def test_lines_are_read_as_they_were_written(tmp_path):
    run = write_run(tmp_path, group([1.0]))
    raw = (run / "rollouts.jsonl").read_text()
    assert list(read_lines(run / "rollouts.jsonl")) == [json.loads(raw)]
    (run / "rollouts.jsonl").write_text(raw.replace('"schema":1', '"schema":9'))
    with pytest.raises(ValueError, match="schema 9"):
        list(read_lines(run / "rollouts.jsonl"))
