"""Runs written by the recorder for the viewer's tests, hostile texts among them."""

from __future__ import annotations

import math
from pathlib import Path

from components.chat.tokenizer import load_tokenizer
from components.envs.base import Message, ToolCall
from components.rollout.episode import message_record
from components.rollout.recorder import Recorder
from components.rollout.types import Author, Ledger, Rollout, RolloutSpec
from tests.tiny import tiny_tokenizer_dir

HOSTILE = (
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<!--<script>window.hit = 1</script>",
    "{{ 7 * 7 }}{% for x in [] %}{# gone #}${7 * 7}",
    "]]>&lt;b&gt;&amp;&quot; \\u003cb\\u003e",
    "right\u202eotfel\u202c to\u2066 left",
    "zero\u200bwidth\u00adhyphen\ufeff\u2028line\u2029end",
    "\x1b[31mred\x1b]8;;http://x.test\x07 [bold]markup[/bold] \x00\x08",
    "half \ud83d of a pair, 你好 \U0001f600",
)
"""What a model might write to get out of its box; the last one is not valid Unicode."""


def make_rollout(
    *,
    step: int = 1,
    group: int = 0,
    member: int = 0,
    texts=("Hello.",),
    phase: str = "train",
    task_id: str = "create_task_1",
    domain: str = "text",
    reward: float | None = 1.0,
    status: str = "completed",
    calls: tuple[ToolCall, ...] = (),
    answer: str = "",
    encode=lambda text: list(text.encode("utf-8", "replace")),
) -> Rollout:
    """A rollout of one sampled turn for each text, answered by a tool where it has calls.

    The k-th token of a turn has the probability 1 / (k + 1).
    """
    where = f"train/{step}" if phase == "train" else phase
    spec = RolloutSpec(
        rollout_id=f"{where}/{group}/{domain}/{task_id}/{member}",
        task_id=task_id,
        domain=domain,
        group=group,
        member=member,
        seed=1,
        env_seed=2,
    )
    ledger, turns = Ledger(), []
    ledger.append_rendered([1, 2, 3], [Author.SYSTEM] * 3)
    messages = [message_record(Message(role="user", content="Hi! " + texts[0]))]
    for number, text in enumerate(texts):
        ids = encode(text)
        start = len(ledger)
        logprobs = [-math.log(k + 1) for k in range(len(ids))]
        ledger.append_sampled(ids, logprobs, policy_version=step - 1)
        turns.append((start, len(ledger)))
        shown = Message(role="assistant", content=text, tool_calls=calls)
        messages.append(message_record(shown) | {"turn": number, "text": text})
        for call in calls:
            content = answer or f"[1, {text!r}]"
            reply = Message(role="tool", content=content, tool_call_id=call.id)
            messages.append(message_record(reply))
    return Rollout(
        spec=spec,
        tokens=ledger.freeze(),
        status=status,
        reward=reward,
        reward_breakdown={} if reward is None else {"official": reward, "strict": 0.0},
        messages=tuple(messages),
        turns=tuple(turns),
        stats={"turns": len(turns), "tool_calls": len(calls), "sampled_tokens": len(ledger) - 3},
        error="the worker ended" if reward is None else "",
    )


def write_run(folder: Path, rollouts, *, config: str = "seed: 1\n") -> Path:
    """An output_dir with these (step, rollout) pairs, a config and a tokenizer."""
    with Recorder(folder / "rollouts.jsonl") as recorder:
        for step, rollout in rollouts:
            recorder.write(step, [rollout])
    (folder / "config.yaml").write_text(config)
    tiny_tokenizer_dir(folder / "step_1")
    return folder


def hostile_run(folder: Path) -> Path:
    """Two steps of groups of three: hostile texts in every place that a model or a task fills."""
    encode = load_tokenizer(tiny_tokenizer_dir(folder / "step_1")).encode
    rollouts = []
    for place, text in enumerate(HOSTILE):
        call = ToolCall(name=f"tool {text}", arguments={text: [text, 1]}, id="call_0")
        # The tokenizer takes valid Unicode only: what it cannot write is not sampled either.
        sampled = text.encode("utf-8", "replace").decode()
        rollout = make_rollout(
            step=1 + place // 6,
            group=place // 3,
            member=place % 3,
            texts=(sampled, f"{sampled} again"),
            task_id=text,
            reward=(1.0, 0.0, None)[place % 3],
            status=("completed", "truncated_tokens", "error_user")[place % 3],
            calls=(call,),
            encode=encode,
        )
        rollouts.append((1 + place // 6, rollout))
    return write_run(folder, rollouts)
