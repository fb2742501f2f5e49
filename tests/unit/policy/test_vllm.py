"""The vLLM engine against a server that computes with transformers and fails on order."""

from __future__ import annotations

import os
import re
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from components.attention.plan import MaskPlan
from components.models.smollm2 import lora_smollm2, smollm2
from components.policy import vllm_loop
from components.policy.engine import EngineError
from components.policy.vllm import VLLMEngine
from components.rollout.types import SampleFailure, SampleRequest, SampleResult
from tests.unit.models import tiny
from tests.unit.policy.vllm_fake import (
    GENERATE,
    LOAD_LORA,
    RELOAD,
    FakeVLLM,
    Fault,
    hang_up,
    held,
    slow,
    status,
    text,
)

MODULES = ["q_proj", "k_proj", "v_proj", "output_proj", "w1", "w2", "w3"]
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.write_narrow(path, max_position_embeddings=MAX_TOKENS)
    return path


@pytest.fixture
def server(directory: Path) -> Iterator[FakeVLLM]:
    with FakeVLLM(directory) as running:
        yield running


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_loop, "FIRST_PAUSE_S", 0.01)


def full_model(directory: Path) -> Any:
    return smollm2(directory, dtype=torch.float32)


def lora_model(directory: Path) -> Any:
    torch.manual_seed(0)
    return lora_smollm2(
        directory, dtype=torch.float32, lora_rank=4, lora_alpha=6.0, lora_modules=MODULES
    )


def make(model: Any, *servers: FakeVLLM, **settings: Any) -> VLLMEngine:
    defaults: dict[str, Any] = {"max_tokens": MAX_TOKENS, "max_batch_size": 8, "timeout_s": 20.0}
    defaults |= {"probe_bound": 1e-4, "retries": 2}
    addresses = [server.address for server in servers]
    return VLLMEngine(model, **{"addresses": addresses} | defaults | settings)


def request(name: str = "r", *, seed: int = 3, length: int = 5, **changes: Any) -> SampleRequest:
    settings = {
        "rollout_id": name,
        "context": tuple(range(7, 7 + length)),
        "shared_len": 3,
        "max_new_tokens": 12,
        "stop_ids": frozenset({2, 9}),
        "temperature": 0.5,
        "seed": seed,
    }
    return SampleRequest(**settings | changes)


def sampled(result: SampleResult | SampleFailure) -> SampleResult:
    assert isinstance(result, SampleResult), result
    return result


@torch.no_grad()
def step(model: torch.nn.Module, size: float = 1e-2) -> None:
    """What an optimizer does to the trained weights."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=size)


@torch.no_grad()
def trainer_logprobs(model: Any, context: tuple[int, ...], turn: SampleResult, temperature: float):
    """The trainer's of a turn, tempered."""
    ids = torch.tensor([*context, *turn.ids])
    positions = torch.arange(len(ids))
    logits = model(
        ids[None], mask=MaskPlan.causal(len(ids)), input_pos=positions[None], index=positions
    ).reshape(len(ids), -1)
    rows = F.log_softmax(logits[len(context) - 1 : -1] / temperature, -1)
    return rows.gather(1, ids[len(context) :, None]).squeeze(1).tolist()


@pytest.mark.parametrize("make_model", [full_model, lora_model])
def test_samples_from_the_trainers_weights_before_and_after_a_step(make_model, directory, server):
    model = make_model(directory)
    engine = make(model, server)
    assert engine.policy_version == 0
    for version in (0, 1, 2):
        if version:
            step(model)
            metrics = engine.sync(version)
            assert metrics["sync/gap"] < 1e-5
            assert metrics["sync/trainer_change"] > 1e-3
            assert metrics["sync/change"] == pytest.approx(metrics["sync/trainer_change"], rel=1e-2)
        for temperature in (0.5, 1.0):
            (turn,) = map(sampled, engine.generate([request(temperature=temperature)]))
            assert turn.policy_version == version
            expected = trainer_logprobs(model, request().context, turn, temperature)
            assert list(turn.logprobs) == pytest.approx(expected, abs=1e-4)
        assert server.resets == version + 1, "one reset of the prefix cache for each sync"
    kept = [name for name in server.models if name != "base"]
    assert len(kept) == (make_model is lora_model), "the adapters of earlier steps are unloaded"


def test_only_the_adapter_is_sent_for_a_lora_model(directory, server):
    make(lora_model(directory), server)
    assert LOAD_LORA in server.paths()
    assert (RELOAD, None) in server.seen, "asked for at the start"
    assert not [body for path, body in server.seen if path == RELOAD and body]


def test_a_lora_model_may_be_sent_merged(directory, server):
    model = lora_model(directory)
    step(model, 0.1)
    engine = make(model, server, weights="full")
    (turn,) = map(sampled, engine.generate([request(temperature=1.0)]))
    expected = trainer_logprobs(model, request().context, turn, 1.0)
    assert list(turn.logprobs) == pytest.approx(expected, abs=1e-4)
    assert not [body for path, body in server.seen if path == LOAD_LORA and body]


def test_a_request_says_all_that_shapes_the_distribution(directory, server):
    engine = make(full_model(directory), server)
    context = (7, 8, 11) * 20
    (turn,) = map(sampled, engine.generate([request(max_new_tokens=100, context=context)]))
    body = server.seen[-1][1]
    assert body["token_ids"] == list(context)
    params = body["sampling_params"]
    assert params["max_tokens"] == MAX_TOKENS - 60
    assert params["stop_token_ids"] == [2, 9]
    assert (params["seed"], params["temperature"], params["ignore_eos"]) == (3, 0.5, True)
    assert (params["top_p"], params["top_k"], params["min_p"]) == (1.0, 0, 0.0)
    assert (params["repetition_penalty"], params["logprobs"]) == (1.0, 0)
    assert turn.finish_reason in ("stop", "length")


def test_seeds_and_the_order_of_results(directory, server):
    engine = make(full_model(directory), server)
    requests = [request(f"r{i}", seed=i, stop_ids=frozenset()) for i in range(5)]
    first, second = engine.generate(requests), engine.generate(requests[::-1])[::-1]
    assert first == second
    assert len({sampled(turn).ids for turn in first}) == 5


def test_a_turn_ends_with_a_stop_id_or_at_its_limit(directory, server):
    engine = make(full_model(directory), server)
    for seed in range(6):
        stop = frozenset(range(0, 50, 3))
        (turn,) = map(sampled, engine.generate([request(seed=seed, stop_ids=stop)]))
        if turn.finish_reason == "stop":
            assert turn.ids[-1] in stop
        else:
            assert len(turn.ids) == 12
        assert not stop.intersection(turn.ids[:-1])


def test_a_rollout_stays_on_its_server(directory, server):
    with FakeVLLM(directory) as other:
        engine = make(full_model(directory), server, other)
        names = [f"r{i}" for i in range(4)]
        contexts = {name: tuple(range(10 + i, 15 + i)) for i, name in enumerate(names)}
        for _ in range(3):
            turns = engine.generate([request(n, context=contexts[n]) for n in names])
            for name, turn in zip(names, turns, strict=True):
                contexts[name] += sampled(turn).ids
        firsts = [{c[0] for c in s.rollout_contexts()} for s in (server, other)]
        assert [len(seen) for seen in firsts] == [2, 2], "as many rollouts on each"
        assert not firsts[0] & firsts[1]
        engine.release(names[:1])
        engine.release(["never heard of"])


# ---- faults ----------------------------------------------------------------------------------


CUT = text('{"choices": [{"token_ids": [1')
FAULTS: Mapping[str, Fault] = {
    "500": status(500),
    "503": status(503),
    "429": status(429),
    "hung up": hang_up,
    "cut": CUT,
    "no choices": text('{"choices": []}'),
    "no fields": text('{"choices": [{}]}'),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_what_may_pass_is_asked_for_again(fault, directory, server):
    engine = make(full_model(directory), server)
    (expected,) = engine.generate([request()])
    server.faults[GENERATE] = [fault, fault]
    (turn,) = engine.generate([request()])
    assert turn == expected, "the same seed again"
    metrics = engine.sync(1)
    assert (metrics["engine/retried_turns"], metrics["engine/lost_turns"]) == (1, 0)


@pytest.mark.parametrize("fault", [status(500), hang_up, CUT])
def test_what_does_not_pass_loses_its_turn_and_no_other(fault, directory, server):
    engine = make(full_model(directory), server, max_batch_size=1)  # one after the other
    server.faults[GENERATE] = [None, fault, fault, fault]
    first, second, third = engine.generate([request(f"r{i}") for i in range(3)])
    assert isinstance(second, SampleFailure)
    assert server.address in second.error
    assert sampled(first).ids == sampled(third).ids
    metrics = engine.sync(1)
    assert metrics["engine/lost_turns"] == 1


def lie(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda choice: choice | changes


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c | {"token_ids": c["token_ids"][:-1]},
        lambda c: c | {"token_ids": [*c["token_ids"][:-1], 1]},
        lambda c: c | {"logprobs": {"content": [e | {"logprob": None} for e in _entries(c)]}},
        lambda c: c | {"logprobs": {"content": [e | {"logprob": -1e999} for e in _entries(c)]}},
        lie(token_ids=[], logprobs={"content": []}),
    ],
)
def test_an_answer_that_contradicts_itself_is_none(change, directory, server):
    engine = make(full_model(directory), server)
    server.change = change
    (turn,) = engine.generate([request(stop_ids=frozenset())])
    assert isinstance(turn, SampleFailure)


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return choice["logprobs"]["content"]


def test_a_slow_server_costs_its_deadline_once(directory, server):
    engine = make(full_model(directory), server)
    engine._timeout_s = 0.6  # of turns: the start may take longer on a busy machine
    server.faults[GENERATE] = [slow(100.0)] * 4
    begin = time.monotonic()
    turns = engine.generate([request(f"r{i}") for i in range(4)])
    assert time.monotonic() - begin < 60
    assert all(isinstance(turn, SampleFailure) for turn in turns)
    assert "timeout_s=0.6" in turns[0].error  # type: ignore[union-attr]


def test_a_slow_turn_holds_up_no_other_rollout(directory, server):
    """Of r0 and r1 one is held until then; meanwhile the other plays two more turns."""
    engine = make(full_model(directory), server)
    expected = engine.generate([request(f"r{i}") for i in range(2)])
    others_ended = threading.Event()
    server.faults[GENERATE] = [held(others_ended)]
    ended: list[tuple[int, Any]] = []
    threads = set()

    def feed(done):
        threads.add(threading.get_ident())
        ended.extend(done)
        if len(ended) == 3:
            others_ended.set()
        quick = [number for number, _ in done if number < 2 and len(ended) == 1]
        if quick:
            return [request(f"r{quick[0]}", length=9)]
        return [request("r9", length=6)] if [n for n, _ in done] == [2] else []

    turns = engine.generate([request(f"r{i}") for i in range(2)], feed=feed)
    numbers = [number for number, _ in ended]
    assert sorted(numbers) == [0, 1, 2, 3]
    assert numbers[1:3] == [2, 3]  # before the slow one, which is the last
    assert turns == [turn for _, turn in sorted(ended)]
    assert turns[:2] == expected
    again = engine.generate([request("r9", length=6)])
    assert turns[3] == again[0]
    assert threads == {threading.get_ident()}


def test_what_feed_gives_is_checked_and_its_errors_end_the_call(directory, server):
    engine = make(full_model(directory), server, timeout_s=200.0)
    server.faults[GENERATE] = [slow(100.0)]  # the other is back at once
    begin = time.monotonic()
    both = [request("r0"), request("r1")]
    with pytest.raises(ValueError, match=r"rollout r[01]: two requests at once"):
        engine.generate(both, feed=lambda _: both)

    def broken(done):
        raise KeyError("no such worker")

    server.faults[GENERATE] = [slow(100.0)]
    with pytest.raises(KeyError, match="no such worker"):
        engine.generate(both, feed=broken)
    assert time.monotonic() - begin < 60
    sampled(engine.generate([request("r0")])[0])


def test_another_server_takes_over(directory, server):
    with FakeVLLM(directory) as other:
        engine = make(full_model(directory), server, other, retries=1)
        expected = engine.generate([request(f"r{i}") for i in range(4)])
        server.faults[GENERATE] = [hang_up] * 20
        assert engine.generate([request(f"r{i}") for i in range(4)]) == expected


@pytest.mark.parametrize("make_model", [full_model, lora_model])
def test_a_server_started_anew_gets_its_weights_back(make_model, directory, server):
    model = make_model(directory)
    engine = make(model, server)
    step(model, 0.05)
    engine.sync(1)
    expected = engine.generate([request(f"r{i}") for i in range(3)])
    server.restart()
    assert engine.generate([request(f"r{i}") for i in range(3)]) == expected
    assert engine.sync(2)["engine/renewed_servers"] == 1


def test_weights_that_a_server_gets_back_are_proved_however_often_it_takes(directory, server):
    """The probe is disturbed once; that the server names the right version then proves nothing."""
    model = full_model(directory)
    engine = make(model, server)
    step(model, 0.1)
    engine.sync(1)
    server.restart()
    server.deaf.add(RELOAD)
    server.faults[GENERATE] = [None, status(500)]  # the turn, then the probe
    with pytest.raises(EngineError, match="does not serve the trainer's weights"):
        engine.generate([request()])


def test_a_refusal_ends_the_run(directory, server):
    engine = make(full_model(directory), server)
    server.faults[GENERATE] = [status(400)]
    with pytest.raises(EngineError, match=r"status 400: .*broken on order"):
        engine.generate([request(), request("other")])


def test_requests_are_checked_before_anything_is_sent(directory, server):
    engine = make(full_model(directory), server)
    number = len(server.seen)
    bad = [
        {"length": MAX_TOKENS},
        {"temperature": -1.0},
        {"temperature": 0.001},
        {"context": (50,)},
    ]
    for changes in bad:
        with pytest.raises(ValueError, match="rollout r: "):
            engine.generate([request(**changes)])
    assert len(server.seen) == number


@pytest.fixture
def usual_sigint() -> Iterator[None]:
    """SIGINT as Python has it: a script's background jobs are started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_sigint")
def test_ctrl_c_ends_what_is_under_way(directory, server):
    engine = make(full_model(directory), server, timeout_s=200.0)
    server.faults[GENERATE] = [slow(100.0)]
    ident = threading.main_thread().ident
    timer = threading.Timer(0.5, lambda: signal.pthread_kill(ident, signal.SIGINT))
    begin = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([request()])
    assert time.monotonic() - begin < 60
    (turn,) = engine.generate([request()])
    assert isinstance(turn, SampleResult), "and leaves an engine that works"


# ---- weights that do not arrive --------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-2, 1e-6])
@pytest.mark.parametrize(("make_model", "path"), [(full_model, RELOAD), (lora_model, LOAD_LORA)])
def test_old_weights_are_found_out_however_small_the_step(
    size, make_model, path, directory, server
):
    """Faults 19: the server says that it has loaded them and has not."""
    model = make_model(directory)
    step(model, 0.1)  # an adapter starts as nothing: its first factor alone changes nothing
    engine = make(model, server, probe_bound=0.1)
    step(model, size)
    server.deaf.add(path)
    before = len(server.rollout_contexts())
    with pytest.raises(EngineError, match=r"(old weights|does not serve the trainer's weights)"):
        engine.sync(1)
    assert len(server.rollout_contexts()) == before


def test_weights_that_did_not_change_need_not_move(directory, server):
    engine = make(full_model(directory), server)
    metrics = engine.sync(1)
    assert metrics["sync/change"] == metrics["sync/trainer_change"] == 0.0


def test_other_weights_are_found_out(directory, server):
    model = full_model(directory)
    engine = make(model, server)
    step(model, 0.1)
    model_on_disk = engine._files.write
    other = full_model(directory)
    step(other, 0.1)

    def swapped(label: str) -> Path:
        engine._files._model = other
        return model_on_disk(label)

    engine._files.write = swapped  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"differ by .* probe_bound is 0.0001"):
        engine.sync(1)


def test_a_sync_waits_for_a_server_that_is_being_started(directory, server):
    model = full_model(directory)
    engine = make(model, server)
    step(model)
    server.faults[RELOAD] = [hang_up, status(503)]
    assert engine.sync(1)["sync/gap"] < 1e-5
    server.faults[RELOAD] = [status(500)] * 3
    with pytest.raises(EngineError, match="status 500"):
        engine.sync(2)


# ---- at the start ----------------------------------------------------------------------------


def refuses(model: Any, server: FakeVLLM, match: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=match):
        make(model, server, **settings)
    assert not server.rollout_contexts()


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("/weight_info", "VLLM_SERVER_DEV_MODE=1"),
        (RELOAD, "VLLM_SERVER_DEV_MODE=1"),
        ("/update_weight_version", r"VLLM_SERVER_DEV_MODE=1.*vLLM 0\.32"),
        ("/reset_prefix_cache", "VLLM_SERVER_DEV_MODE=1"),
        ("/server_info", "VLLM_SERVER_DEV_MODE=1"),
        (GENERATE, "--enable-scale-out"),
        (LOAD_LORA, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_missing_endpoints_name_the_option(path, match, directory, server):
    server.missing.add(path)
    refuses(lora_model(directory), server, f"{re.escape(server.address)}.*{match}")


def test_options_of_the_server(directory, server):
    model = lora_model(directory)
    server.scale_out = False
    refuses(model, server, "--enable-scale-out")
    server.scale_out = True
    sound = server.config
    for changes, match in (
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode processed_logprobs"),
        ({"lora_config": None}, "--enable-lora --max-lora-rank 4"),
        ({"lora_config": {"max_lora_rank": 2}}, "rank 2 at most, the model's have 4"),
        (
            {"scheduler_config": {"enable_chunked_prefill": True, "max_num_batched_tokens": 32}},
            "--no-enable-chunked-prefill",
        ),
        ({"model_config": {}}, "vLLM 0.32"),
    ):
        server.config = sound | changes
        refuses(model, server, match)
    server.config = sound | {"lora_config": None}
    make(full_model(directory), server)


def test_a_context_that_is_too_short(directory, server):
    server.context = 40
    match = "rollout.max_tokens = 64: the context of .* is 40 tokens; .*--max-model-len 64"
    refuses(full_model(directory), server, match)


def test_another_model(directory, tmp_path):
    small = tiny.tensors()
    names = [name for name in small if "embed_tokens" in name]
    tiny.write_narrow(tmp_path / "small", vocab_size=49)
    _resize(tmp_path / "small", names, 49)
    with FakeVLLM(tmp_path / "small") as server:
        refuses(full_model(directory), server, "serves another model .* 50 token ids")
    # The same sizes, other weights: full ones are replaced, an adapter cannot repair them.
    other = tiny.write_narrow(tmp_path / "other") or tmp_path / "other"
    _noise(tmp_path / "other")
    with FakeVLLM(other) as server:
        refuses(
            lora_model(directory), server, "does not serve the trainer's weights.*own base model"
        )
        make(full_model(directory), server)


def _resize(directory: Path, names: list[str], rows: int) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(directory / "model.safetensors")
    state |= {name: state[name][:rows].contiguous() for name in names}
    save_file(state, directory / "model.safetensors")


def _noise(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(directory / "model.safetensors")
    state = {name: value + 0.1 * torch.randn_like(value) for name, value in state.items()}
    save_file(state, directory / "model.safetensors")


def test_nobody_there_and_not_vllm(directory, server):
    model = full_model(directory)
    gone = FakeVLLM(directory)
    address = gone.address
    gone.server_close()
    match = f"no vLLM server answers there: {re.escape(address)}"
    refuses(model, server, match, addresses=[address])
    server.faults["/v1/models"] = [text('{"object": "list"}')]
    refuses(model, server, "does not list its models as vLLM does")
    server.faults["/v1/models"] = [status(401)]
    refuses(model, server, "engine.api_key_env")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"addresses": []}, "engine.addresses"),
        ({"addresses": "http://127.0.0.1:1"}, "must be a list"),
        ({"addresses": ["127.0.0.1:8000"]}, "must be like http://127.0.0.1:8000"),
        ({"addresses": ["http://127.0.0.1:1", "http://127.0.0.1:1/v1"]}, "named twice"),
        ({"addresses": ["http://10.0.0.7:8000"]}, "engine.sync_dir"),
        ({"weights": "delta"}, "must be auto, adapter or full"),
        ({"weights": "adapter"}, "engine.weights = adapter: the model has no adapters"),
        ({"timeout_s": 0.0}, "engine.timeout_s = 0"),
        ({"retries": -1}, "engine.retries = -1"),
        ({"probe_bound": 0.0}, "probe_bound must be above 0"),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
    ],
)
def test_settings(settings, match, directory, server):
    refuses(full_model(directory), server, match, **settings)


@pytest.mark.parametrize("make_model", [full_model, lora_model])
def test_files_can_be_read_by_a_server_of_another_user(make_model, directory, server, tmp_path):
    model = make_model(directory)
    before = os.umask(0o077)
    try:
        engine = make(model, server, sync_dir=str(tmp_path / "shared"))
    finally:
        os.umask(before)
    (folder,) = (tmp_path / "shared").iterdir()
    (version,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, version)] == [0o755, 0o755]
    assert {stat.S_IMODE(path.stat().st_mode) for path in version.iterdir()} == {0o644}
    del engine


def test_a_folder_that_cannot_be_written_is_named(directory, server, tmp_path):
    (tmp_path / "file").write_text("")
    refuses(
        full_model(directory),
        server,
        r"engine\.sync_dir = .*file/shared",
        sync_dir=str(tmp_path / "file/shared"),
    )


def test_files_are_gone_with_the_engine(directory, server, tmp_path):
    model = full_model(directory)
    engine = make(model, server, sync_dir=str(tmp_path / "shared"))
    step(model)
    engine.sync(1)
    (folder,) = (tmp_path / "shared").iterdir()
    assert len(list(folder.iterdir())) == 1, "one version at a time"
    del engine
    import gc

    gc.collect()
    assert not list((tmp_path / "shared").iterdir())
