"""An episode of 120 tool calls and more than 30,000 tokens through the recipe, on a CPU.

The slow part plays and trains once (``long_run``) and then looks at what came of it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from components.chat.hermes import HermesRenderer
from components.envs.base import Message, ToolCall
from components.envs.check import check_env
from components.models.gpt_oss import gpt_oss
from components.policy.local import LocalEngine
from components.rollout.agent_loop import Limits, run_episode
from components.rollout.recorder import read_rollouts
from components.rollout.types import Author, Rollout, SampleResult
from tests.recipes import long_model
from tests.recipes.long_env import ArchiveEnv, MeanPage
from tests.recipes.long_run import GROUP_SIZE, NUM_CALLS, WORDS_PER_PAGE
from tests.unit.rollout.fakes import spec

ROOT = Path(__file__).parents[2]


def call(page: int) -> Message:
    arguments = {"page": page, "note": " order"}
    return Message(role="assistant", tool_calls=(ToolCall(name="read_page", arguments=arguments),))


# ---------------------------------------------------------------- the environment and the model


@pytest.mark.parametrize("turns", [(call(1),), (call(99), call(2)), ("Hello.",)])
def test_the_environment_keeps_its_promises(turns):
    env = ArchiveEnv(checker=MeanPage(), num_calls=3, words_per_page=4)
    check_env(env, task_id="archive_0", turns=turns)


def test_the_reward_is_the_mean_of_the_pages():
    env = ArchiveEnv(checker=MeanPage(), num_calls=3, words_per_page=4)
    env.reset(seed=1, options={"task_id": "archive_0"})
    answers = [env.step(call(page)) for page in (2, 9, 7)]
    assert [answer[2] for answer in answers] == [False, False, True]
    assert len(answers[0][4]["messages"][0].content.split()) == 1 + 4
    assert answers[2][4]["reward"].value == 18 / 27


def test_the_model_calls_the_tool_by_itself(tmp_path):
    directory = long_model.write(tmp_path / "model")
    engine = LocalEngine(gpt_oss(directory, dtype=torch.float32), max_tokens=4096, max_batch_size=1)
    loop = run_episode(
        ArchiveEnv(checker=MeanPage(), num_calls=6, words_per_page=100),
        HermesRenderer(directory),
        spec("archive_0"),
        limits=Limits(max_turns=6, max_turn_tokens=128, max_tokens=4096, max_refused=0),
        temperature=1.0,
    )
    request = next(loop)
    try:
        while True:
            request = loop.send(engine.generate([request])[0])
    except StopIteration as end:
        rollout = end.value
    assert rollout.status == "completed"
    assert rollout.stats["tool_calls"] == 6
    calls = [m["tool_calls"][0]["arguments"] for m in rollout.messages if "tool_calls" in m]
    assert len({json.dumps(arguments) for arguments in calls}) > 3  # they are not all the same


def test_a_late_turn_costs_the_host_little_more_than_an_early_one(tmp_path):
    """CPU time outside the engine: parse, act, render, append, and the way through the pipe.

    The context is copied and sent with each turn, so turn 110 takes about 2.6 times as long as
    turn 10; rendering all that came before would take 8 times as long, decoding it 5 times.
    """
    directory = long_model.write(tmp_path / "model")
    times = [host_times(HermesRenderer(directory)) for _ in range(3)]
    early = min(sum(seconds[5:16]) for seconds in times)
    late = min(sum(seconds[105:116]) for seconds in times)
    assert late < 4 * early


def host_times(renderer: HermesRenderer) -> list[float]:
    """Seconds of each turn of an episode whose turns are given."""
    limits = Limits(max_turns=120, max_turn_tokens=128, max_tokens=40_000, max_refused=0)
    env = ArchiveEnv(checker=MeanPage(), num_calls=NUM_CALLS, words_per_page=WORDS_PER_PAGE)
    loop = run_episode(env, renderer, spec("archive_0"), limits=limits, temperature=1.0)
    next(loop)
    seconds, rollout = [], None
    while rollout is None:
        ids = renderer.render_assistant(call(len(seconds) % 10))
        result = SampleResult(
            ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop", policy_version=0
        )
        begin = time.process_time()
        try:
            pickle.loads(pickle.dumps(loop.send(pickle.loads(pickle.dumps(result)))))
        except StopIteration as end:
            rollout = end.value
        seconds.append(time.process_time() - begin)
    assert rollout.status == "completed"
    assert rollout.stats["tool_calls"] == len(seconds) == NUM_CALLS
    assert len(rollout.tokens) > 30_000
    return seconds


# ---------------------------------------------------------------- the run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("long")
    subprocess.run(
        [sys.executable, "-m", "tests.recipes.long_run", str(output_dir)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=1800,
    )
    report = json.loads((output_dir / "report.json").read_text())
    return SimpleNamespace(
        output_dir=output_dir,
        report=report,
        metrics=report["metrics"],
        rollouts=[record.rollout for record in read_rollouts(output_dir / "run/ledgers.jsonl")],
    )


@pytest.mark.slow
def test_every_call_is_in_the_ledger(run):
    renderer = HermesRenderer(run.output_dir / "model")
    assert len(run.rollouts) == GROUP_SIZE
    for rollout in run.rollouts:
        tokens, stats = rollout.tokens, rollout.stats
        tokens.check()
        assert rollout.status == "completed"
        assert len(tokens) >= 30_000
        assert len(rollout.turns) == stats["turns"] == stats["tool_calls"] == NUM_CALLS == 120
        assert stats["refused"] == stats["cut_turns"] == stats["tool_errors"] == 0
        mask = torch.zeros(len(tokens), dtype=torch.long)
        said = [message for message in rollout.messages if message["role"] == "assistant"]
        for (start, end), message in zip(rollout.turns, said, strict=True):
            mask[start:end] = 1
            parsed = renderer.parse(tokens.ids[start:end]).message
            assert parsed is not None
            (spoken,) = parsed.tool_calls
            (recorded,) = message["tool_calls"]
            assert spoken.name == recorded["name"] == "read_page"
            assert dict(spoken.arguments) == recorded["arguments"]
        assert mask.tolist() == list(tokens.loss_mask)
        assert sum(tokens.loss_mask) == stats["sampled_tokens"]
        replies = [message for message in rollout.messages if message["role"] == "tool"]
        assert len(replies) == NUM_CALLS - 1  # the last call ends the episode
        pages = [message["tool_calls"][0]["arguments"]["page"] for message in said]
        assert rollout.reward == pytest.approx(sum(pages) / (9 * NUM_CALLS))


@pytest.mark.slow
def test_the_row_holds_the_shared_prompt_once(run):
    one, other = (rollout.tokens for rollout in run.rollouts)
    differs = next(i for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b)
    prompt = one.loss_mask.index(1)
    assert (
        prompt == other.loss_mask.index(1) < differs
    )  # the same task, the same first turn's start
    assert one.authors[:prompt].count(Author.SYSTEM) > 500
    # What predicts the first trained token is each rollout's own, as is all that follows; the
    # episode ends with a trained token, which predicts nothing.
    assert one.loss_mask[-1] == other.loss_mask[-1] == 1
    expected = len(one) - 1 + len(other) - 1 - (prompt - 1)
    assert run.report["row_tokens"] == expected > 60_000
    assert run.metrics["pack/num_batches"] == 1
    assert run.metrics["pack/saving"] == pytest.approx(expected / (len(one) + len(other)))
    assert run.metrics["pack/trained_tokens"] == sum(one.loss_mask) + sum(other.loss_mask)


@pytest.mark.slow
def test_engine_and_trainer_agree_to_the_end(run):
    assert run.metrics["mismatch/kl"] < 1e-8
    assert run.metrics["mismatch/logprob_diff_max"] < 1e-3
    assert run.metrics["mismatch/route_frac"] == 0.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_the_last_turns_equal_transformers(run):
    """What the ledger says of the last turns, 30,000 tokens in, is what GptOssForCausalLM says."""
    rollout = run.rollouts[0]
    start = rollout.turns[-20][0]
    assert start > 25_000
    expected = their_logprobs(run.output_dir / "model", rollout, start=start)
    trained = torch.tensor(rollout.tokens.loss_mask[start:], dtype=torch.bool)
    ours = torch.tensor(rollout.tokens.generator_logprobs[start:])[trained]
    assert trained.sum() > 150
    assert expected[trained].std() > 1  # and not because there was nothing to choose
    torch.testing.assert_close(ours, expected[trained], rtol=0, atol=1e-3)


@torch.no_grad()
def their_logprobs(directory: Path, rollout: Rollout, *, start: int) -> torch.Tensor:
    """Log-probability of each token from ``start`` on; read in pieces, as T x T would not fit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    ids = torch.tensor([rollout.tokens.ids])
    found, cache = [], None
    for first in range(0, ids.shape[1] - 1, 256):
        piece = ids[:, first : min(first + 256, ids.shape[1] - 1)]
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        targets = ids[0, first + 1 : first + 1 + piece.shape[1]]
        found.append(out.logits[0].log_softmax(-1)[torch.arange(len(targets)), targets])
    return torch.cat(found)[start - 1 :]


@pytest.mark.slow
def test_the_step_trains_every_part(run):
    assert 0 < run.metrics["train/grad_norm"] < float("inf")
    assert run.metrics["policy/logprob_gain"] > 0
    before = load_file(run.output_dir / "model/model.safetensors")
    after = load_file(run.output_dir / "run/step_1/model.safetensors")
    assert before.keys() == after.keys()
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == []


@pytest.mark.slow
def test_memory_is_far_below_a_square(run, record_property):
    """The peak of the update is less than one bit for each pair of tokens in the row."""
    report, bytes_per_mib = run.report, 2**20
    record_property("long_horizon", json.dumps(report))
    print(json.dumps({k: v for k, v in report.items() if k != "metrics"}, indent=2))
    assert report["update_peak_mib"] * bytes_per_mib < report["row_tokens"] ** 2 / 8
    assert run.metrics["mem/peak_gib"] < 3
    # One layer keeps every token; the other has a window, and keeps that many.
    per_token = 2 * long_model.KEY_HEADS * long_model.HEAD_DIM * 4
    kept = sum(len(rollout.tokens) + long_model.WINDOW for rollout in run.rollouts) * per_token
    assert report["cache_mib"] * bytes_per_mib < 1.6 * kept  # rows grow by a half
    played = run.output_dir / "run/rollouts.jsonl"
    assert played.stat().st_size < 20 * sum(len(rollout.tokens) for rollout in run.rollouts)


@pytest.mark.slow
def test_a_late_turn_costs_the_engine_no_more_than_its_context_is_longer(run):
    """Nothing of the turns before is computed anew: attention alone grows."""
    turns = run.rollouts[0].turns
    longer = turns[109][0] / turns[9][0]
    early, late = (run.report["turn_ms"][f"turn_{turn}"]["engine"] for turn in (10, 110))
    assert longer > 8
    assert late < longer * early
