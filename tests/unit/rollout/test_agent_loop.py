from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from components.envs.base import Message, ToolCall
from components.rollout.agent_loop import Limits, LimitsError, run_episode
from components.rollout.types import Author, Rollout, SampleResult
from tests.unit.rollout.fakes import CALL, FakeEngine, FakeEnv, make_renderer, spec

RENDERER = make_renderer()
END = 2
LIMITS = Limits(max_turns=10, max_turn_tokens=120, max_tokens=4000, max_refused=2)


def play(
    task: str,
    turns: Sequence[str | tuple[int, ...]],
    *,
    env: FakeEnv | None = None,
    **changes: Any,
) -> tuple[Rollout, FakeEngine, FakeEnv]:
    env = env or FakeEnv()
    engine = FakeEngine({task + "/0": turns})
    limits = Limits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | changes)
    loop = run_episode(env, RENDERER, spec(task), limits=limits, temperature=0.7)
    try:
        request = next(loop)
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as stop:
        return stop.value, engine, env


def ids_of(text: str) -> tuple[int, ...]:
    return RENDERER._encode(text)  # type: ignore[return-value]


class TestLedger:
    def test_a_whole_episode(self):
        """Faults 1, 2, 4, 5: ids as sampled, masks, separators, where observations start."""
        rollout, _, env = play("user_stop:3", ["Hello", CALL, "Bye"])
        tokens = rollout.tokens
        text = RENDERER.decode(tokens.ids)
        assert text.endswith(
            "<|im_start|>assistant\nHi! How can I help you today?<|im_end|>\n"
            "<|im_start|>user\nHello, I am number 5.<|im_end|>\n<|im_start|>assistant\n"
            "Hello<|im_end|>\n<|im_start|>user\nYes, please go ahead.<|im_end|>\n"
            f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
            "<|im_start|>tool\n<tool_response>\npending\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nBye<|im_end|>"
        )
        sampled = [RENDERER.decode(tokens.ids[start:end]) for start, end in rollout.turns]
        assert sampled == ["Hello<|im_end|>", f"{CALL}<|im_end|>", "Bye<|im_end|>"]
        mask = [0] * len(tokens)
        for start, end in rollout.turns:
            mask[start:end] = [1] * (end - start)
        assert list(tokens.loss_mask) == mask
        assert [a == Author.ASSISTANT for a in tokens.authors] == [m == 1 for m in mask]
        for i, token in enumerate(tokens.ids):
            assert tokens.generator_logprobs[i] == (-0.1 - token / 1000 if mask[i] else 0.0)
            assert tokens.policy_versions[i] == (7 if mask[i] else -1)
        assert rollout.status == "completed"
        assert rollout.reward == 1.0
        assert len(env.actions) == 3

    def test_contexts_only_grow(self):
        rollout, engine, _ = play(
            "user_stop:4", ["Hello", CALL, "not <tool_call> JSON", CALL, "Bye"]
        )
        contexts = [request.context for request in engine.requests]
        for before, after in itertools.pairwise(contexts):
            assert after[: len(before)] == before
        starts = [start for start, _ in rollout.turns]
        assert [len(context) for context in contexts] == starts
        system = RENDERER.render_system("Be kind.", env_tools())
        assert {request.shared_len for request in engine.requests} == {len(system.ids)}
        assert contexts[0][: len(system.ids)] == system.ids

    def test_odd_ids_stay_as_sampled(self):
        """Fault 1: "Hello" spelt in letters is not merged; fault 4: a start id inside stays."""
        letters = tuple(i for letter in "Hello" for i in ids_of(letter))
        odd = (*letters, 1, *letters, END)
        rollout, _, env = play("user_stop:2", [(*letters, END), odd, "Bye"])
        assert letters != ids_of("Hello")
        (a, b), (c, d), _ = rollout.turns
        assert rollout.tokens.ids[a:b] == (*letters, END)
        assert rollout.tokens.ids[c:d] == odd
        newline, start = ids_of("\n")[0], 1
        assert rollout.tokens.ids[b : b + 2] == (newline, start)
        assert rollout.tokens.ids[d : d + 2] == (newline, start)
        assert env.actions[0].content == "Hello"
        assert rollout.stats["refused"] == 1

    def test_thinking_stays_in_the_history(self):
        """Fault 3: nothing is rewritten, so stored log-probabilities fit the stored context."""
        rollout, engine, env = play("user_stop:2", ["<think>Hm. ###STOP###</think>Hello", "Bye"])
        start, end = rollout.turns[0]
        assert engine.requests[1].context[:end] == rollout.tokens.ids[:end]
        assert RENDERER.decode(rollout.tokens.ids[start:end]).startswith("<think>Hm.")
        assert env.actions[0].content == "Hello"

    def test_the_other_stop_id_completes_a_turn(self):
        """Fault 8: <|endoftext|> ends a turn too; no synthetic end token follows."""
        rollout, _, env = play("user_stop:2", [(*ids_of("Hello"), 0), "Bye"])
        _, end = rollout.turns[0]
        assert rollout.tokens.ids[end - 1 : end + 1] == (0, *ids_of("\n"))
        assert rollout.stats["cut_turns"] == 0
        assert len(env.actions) == 2

    def test_seeds_differ_by_turn_and_rollout_and_repeat(self):
        seeds = []
        for member in (0, 1, 0):
            loop = run_episode(
                FakeEnv(),
                RENDERER,
                spec("user_stop:3", member=member),
                limits=LIMITS,
                temperature=1,
            )
            request, own = next(loop), []
            for _ in range(2):
                own.append(request.seed)
                ids = (*ids_of("Hi"), END)
                result = SampleResult(
                    ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop", policy_version=0
                )
                request = loop.send(result)
            seeds.append(own)
        assert seeds[0] == seeds[2]
        assert len({*seeds[0], *seeds[1]}) == 4
        assert all(0 <= seed < 2**63 for seed in seeds[0])


def env_tools() -> Any:
    return FakeEnv().reset(options={"task_id": "user_stop:1"})[1]["tools"]


class TestToolNames:
    """A chat format may want to know which tool answers; environments only know the call's id."""

    def test_results_name_their_tool(self, monkeypatch):
        seen: list[tuple[str, str]] = []
        render = RENDERER.render_observation

        def watched(messages: Any, **kwargs: Any) -> Any:
            seen.extend((m.role, m.tool_name) for m in messages)
            return render(messages, **kwargs)

        monkeypatch.setattr(RENDERER, "render_observation", watched)
        play("user_stop:4", ["Hello", CALL, "not <tool_call> JSON", "refuse me", CALL, "Bye"])
        assert seen[:3] == [("assistant", ""), ("user", ""), ("user", "")]
        assert seen[3:] == [
            ("tool", "get_order"),
            ("tool", ""),
            ("tool", ""),
            ("tool", "get_order"),
        ]

    def test_calls_in_a_task_s_history_count_too(self, monkeypatch):
        env, seen = FakeEnv(), []
        call = ToolCall(name="get_user", arguments={}, id="old")
        history = (
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="Ana", tool_call_id="old"),
        )
        reset, render = env.reset, RENDERER.render_observation

        def with_history(**kwargs: Any) -> Any:
            observation, info = reset(**kwargs)
            return observation, info | {"messages": history}

        def watched(messages: Any, **kwargs: Any) -> Any:
            seen.extend(m.tool_name for m in messages)
            return render(messages, **kwargs)

        monkeypatch.setattr(env, "reset", with_history)
        monkeypatch.setattr(RENDERER, "render_observation", watched)
        play("user_stop:1", ["Bye"], env=env)
        assert seen == ["", "get_user"]


class TestRefusals:
    def test_a_broken_call_is_explained_and_the_episode_goes_on(self):
        """Fault 23."""
        broken = '<tool_call>\n{"name": "x", "arguments": {"a": 1'
        rollout, _, env = play("user_stop:1", [broken, "Bye"])
        assert rollout.status == "completed"
        assert rollout.stats["parse_errors"] == rollout.stats["refused"] == 1
        assert rollout.stats["turns"] == 2
        assert rollout.stats["env_steps"] == 1
        assert [action.content for action in env.actions] == ["Bye"]
        refused = [m for m in rollout.messages if m.get("refused")]
        assert [m["role"] for m in refused] == ["assistant", "tool"]
        assert refused[0]["text"] == broken + "<|im_end|>"
        assert "cannot be read" in refused[1]["content"]
        assert refused[1]["content"] in RENDERER.decode(rollout.tokens.ids)
        start, end = rollout.turns[0]
        assert rollout.tokens.loss_mask[start:end] == (1,) * (end - start)  # trained all the same

    def test_the_environment_may_refuse(self):
        rollout, _, env = play("user_stop:1", ["refuse me", "Bye"])
        assert rollout.stats["refused"] == 1
        assert rollout.stats["env_steps"] == 1
        assert len(env.actions) == 1
        assert "Error: not like this" in RENDERER.decode(rollout.tokens.ids)

    @pytest.mark.parametrize("max_refused", [0, 2])
    def test_too_many(self, max_refused):
        rollout, _, _ = play("user_stop:1", [" "] * 9, max_refused=max_refused)
        assert rollout.status == "truncated_refused"
        assert rollout.reward == 0.0
        assert rollout.stats["turns"] == max_refused + 1
        assert rollout.tokens.loss_mask[-1] == 1

    def test_a_turn_that_ran_out_of_tokens_is_no_action(self):
        """It is closed by a synthetic end token with mask 0; a whole call in it is not executed."""
        long = (*ids_of(CALL), *ids_of(" and"), *ids_of(" on") * 200)
        rollout, _, env = play("user_stop:1", [long, "Bye"], max_turn_tokens=len(ids_of(CALL)) + 3)
        (start, end), _ = rollout.turns
        assert end - start == len(ids_of(CALL)) + 3
        assert rollout.tokens.ids[end] == END
        assert rollout.tokens.loss_mask[end - 1 : end + 1] == (1, 0)
        assert rollout.stats["cut_turns"] == 1
        assert [action.content for action in env.actions] == ["Bye"]
        assert "was cut" in RENDERER.decode(rollout.tokens.ids)


class TestBudgets:
    def prompt_len(self) -> int:
        return play("user_stop:1", ["Bye"])[1].requests[0].context.__len__()

    def test_a_result_that_does_not_fit_is_dropped_whole(self):
        """Fault 10."""
        room = 60
        call = (*ids_of(CALL), END)
        assert len(call) < room
        budget = self.prompt_len() + room
        env = FakeEnv(tool_text="pending " * 100)
        rollout, engine, _ = play(
            "user_stop:3", [call, "Bye"], env=env, max_tokens=budget, max_turn_tokens=room
        )
        assert rollout.status == "truncated_tokens"
        assert rollout.reward == 0.0
        assert len(rollout.tokens) == self.prompt_len() + len(call) <= budget
        assert rollout.turns == ((self.prompt_len(), len(rollout.tokens)),)
        assert len(engine.requests) == 1
        assert rollout.messages[-1]["dropped"]
        assert rollout.messages[-1]["content"] == env.tool_text

    def test_room_for_one_token_is_used_and_none_is_not(self):
        observation = len(ids_of("\n")) + len(
            RENDERER.render_observation(user_reply(), after_turn=False).ids
        )
        turn = (*ids_of("Hello"), END)
        exact = self.prompt_len() + len(turn) + observation
        for extra, num_requests in ((0, 1), (1, 2)):
            rollout, engine, _ = play(
                "user_stop:3", [turn, "Bye"], max_tokens=exact + extra, max_turn_tokens=len(turn)
            )
            assert len(engine.requests) == num_requests
            assert rollout.status == "truncated_tokens"
            assert len(rollout.tokens) <= exact + extra
        assert engine.requests[1].max_new_tokens == 1

    def test_a_prompt_that_leaves_no_room_is_a_mistake(self):
        prompt = self.prompt_len()
        play("user_stop:1", ["Bye"], max_tokens=prompt + 50, max_turn_tokens=50)
        with pytest.raises(
            LimitsError, match=rf"max_tokens={prompt + 49}.* {prompt} tokens"
        ) as error:
            play("user_stop:1", ["Bye"], max_tokens=prompt + 49, max_turn_tokens=50)
        assert "max_turn_tokens=50" in str(error.value)

    def test_limits_are_checked(self):
        with pytest.raises(ValueError, match="max_turns=0"):
            Limits(max_turns=0, max_turn_tokens=1, max_tokens=1, max_refused=0)
        with pytest.raises(ValueError, match="max_refused=-1"):
            Limits(max_turns=1, max_turn_tokens=1, max_tokens=1, max_refused=-1)

    def test_max_turns(self):
        rollout, engine, _ = play("user_stop:9", ["Hello"] * 9, max_turns=3)
        assert rollout.status == "truncated_max_steps"
        assert rollout.reward == 0.0
        assert len(engine.requests) == 3


def user_reply() -> Any:
    env = FakeEnv()
    env.reset(options={"task_id": "user_stop:9"})
    from components.envs.base import Message

    return env.step(Message(role="assistant", content="Hello"))[4]["messages"]


class TestStatus:
    @pytest.mark.parametrize(
        ("task", "status", "reward"),
        [
            ("user_stop:1", "completed", 1.0),
            ("over:1", "completed", 1.0),
            ("max_steps:1", "truncated_max_steps", 0.0),
            ("too_many_errors:1", "truncated_errors", 0.0),
            ("raise:1", "error_infra", None),
            ("no_reward:1", "error_infra", None),
            ("timeout:1", "error_deadline", None),
            ("user:1", "error_user", None),
        ],
    )
    def test_of_every_end(self, task, status, reward):
        rollout, engine, _ = play(task, ["Hello"])
        assert rollout.status == status
        assert rollout.reward == reward
        assert rollout.valid == (reward is not None)
        assert bool(rollout.error) == (reward is None)
        assert len(rollout.turns) == len(engine.requests) == (0 if task == "over:1" else 1)

    def test_the_error_says_what_happened(self):
        assert "broken database" in play("raise:1", ["Hello"])[0].error
        assert play("user:1", ["Hello"])[0].error == "empty completion"

    def test_the_checkers_breakdown_is_kept(self):
        assert play("max_steps:1", ["Hello"])[0].reward_breakdown == {"official": 1.0}
        assert play("user_stop:9", ["Hello"], max_turns=1)[0].reward_breakdown == {
            "official": 0.0,
            "strict": 0.0,
        }

    def test_counters_and_messages(self):
        rollout, _, _ = play("user_stop:3", [CALL + CALL, "Hello", "Bye"])
        stats = rollout.stats
        assert (stats["turns"], stats["env_steps"], stats["tool_calls"]) == (3, 3, 2)
        assert stats["sampled_tokens"] == sum(rollout.tokens.loss_mask)
        assert stats["prompt_tokens"] == rollout.turns[0][0]
        roles = [message["role"] for message in rollout.messages]
        expected = "assistant user assistant tool tool assistant user assistant user"
        assert roles == expected.split()
        called = rollout.messages[2]
        assert [call["id"] for call in called["tool_calls"]] == ["call_0_0", "call_0_1"]
        assert called["turn"] == 0
        assert rollout.messages[3]["tool_call_id"] == "call_0_0"
        assert json.loads(json.dumps(rollout.messages)) == list(rollout.messages)


def test_with_tau2():
    """The official mock domain: its refusals, its tool results, its reward."""
    pytest.importorskip("tau2")
    from components.envs.tau2 import Tau2Env

    env = Tau2Env(domain="mock", refuse_text_with_call=True)
    order = dataclasses.replace(spec("create_task_1"), domain="mock")
    call = (
        '<tool_call>\n{"name": "create_task", "arguments": {"user_id": "user_1", '
        '"title": "Important Meeting"}}\n</tool_call>'
    )
    nope = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
    engine = FakeEngine({"create_task_1/0": ["Wait. " + call, nope, call] + ["It is done."] * 20})
    loop = run_episode(env, RENDERER, order, limits=LIMITS, temperature=1.0)
    try:
        request = next(loop)
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as stop:
        rollout: Rollout = stop.value
    assert rollout.status == "completed", rollout.error
    assert rollout.reward == rollout.reward_breakdown["official"] == 1.0
    assert rollout.stats["refused"] == 1
    assert (rollout.stats["tool_calls"], rollout.stats["tool_errors"]) == (2, 1)
    assert "either text or a tool call" in RENDERER.decode(rollout.tokens.ids)
