"""The simulation against numbers worked out by hand, and against runs whose times are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from tools import simulate_scale
from tools.scale_model import Costs, Episode, Turn
from tools.scale_run import Run, Step, check, fit, holdout, read_run
from tools.scale_steps import play, train

COSTS = Costs(prefill_token_s=0.01, decode_step_s=0.1)


def episode(*turns, trained=0.0):
    """Turns as (new tokens, sampled tokens) or with the seconds of the environment before."""
    return Episode(
        turns=tuple(
            Turn(new_tokens=t[0], sampled_tokens=t[1], env_s=t[2] if len(t) > 2 else 0.0)
            for t in turns
        ),
        trained_tokens=trained,
    )


def seconds(*ranks, costs=COSTS, servers=1, workers=8, reply_delay=None):
    found = play(ranks, costs, servers=servers, workers=workers, reply_delay=reply_delay)
    return found.seconds


BOTH = pytest.mark.parametrize("reply_delay", [0, None])


@BOTH
def test_one_turn_is_its_prompt_and_a_step_for_each_further_token(reply_delay):
    rollout = [episode((10, 5, 0.3))]
    assert seconds(rollout, reply_delay=reply_delay) == pytest.approx(0.3 + 10 * 0.01 + 4 * 0.1)


@BOTH
def test_the_shared_prompt_is_computed_once(reply_delay):
    costs = Costs(prefill_token_s=0.01, decode_step_s=0.1, shared_tokens=100)
    rollouts = [episode((10, 2)), episode((20, 2))]
    found = play([rollouts], costs, servers=1, workers=8, reply_delay=reply_delay)
    assert found.seconds == pytest.approx(1.3 + 0.1)
    assert found.prefill_tokens == 130


@BOTH
def test_a_step_makes_a_token_for_all_and_costs_more_for_more(reply_delay):
    costs = Costs(prefill_token_s=0.0, decode_step_s=0.1, decode_token_s=0.01)
    # 2 steps of two rollouts, then 3 of the longer one
    rollouts = [episode((1, 3)), episode((1, 6))]
    found = seconds(rollouts, costs=costs, reply_delay=reply_delay)
    assert found == pytest.approx(2 * 0.12 + 3 * 0.11)


@BOTH
def test_who_finds_no_worker_waits(reply_delay):
    rollouts = [episode((0, 3))] * 4
    assert seconds(rollouts, workers=4, reply_delay=reply_delay) == pytest.approx(0.2)
    assert seconds(rollouts, workers=2, reply_delay=reply_delay) == pytest.approx(0.4)


def test_servers_share_the_rollouts_of_a_rank():
    costs = Costs(prefill_token_s=0.01, decode_step_s=0.0)
    assert seconds([episode((100, 1))] * 4, costs=costs) == pytest.approx(4.0)
    assert seconds([episode((100, 1))] * 4, costs=costs, servers=2) == pytest.approx(2.0)


def test_what_arrives_meanwhile_joins_at_the_next_step():
    costs = Costs(prefill_token_s=0.0, decode_step_s=0.1)
    first, late = episode((0, 11)), episode((0, 21, 0.25))  # two ranks, one server
    found = play([[first], [late]], costs, servers=1, workers=1, reply_delay=None)
    assert found.seconds == pytest.approx(0.3 + 20 * 0.1)
    assert found.decode_tokens == 10 + 20
    assert found.server_busy_s == pytest.approx(2.3)


def steps(played, update, *, staleness, sync=0.0, num=4):
    """Step times where a batch takes ``played`` seconds and its update ``update``."""
    costs = Costs(
        prefill_token_s=played, decode_step_s=0.0, update_token_s=update, sync_s=sync, other_s=0.0
    )
    batches = [[[episode((1, 1), trained=1.0)]]] * num
    return train(batches, costs, servers=1, workers=1, staleness=staleness, reply_delay=None).step_s


def test_steps_one_after_the_other():
    assert steps(2.0, 3.0, staleness=0, sync=0.5) == pytest.approx([5.5] * 4)


def test_ahead_a_step_is_the_longer_of_the_two():
    assert steps(2.0, 3.0, staleness=1) == pytest.approx([5.0, 3.0, 3.0, 3.0])
    # the second batch begins when the first is there, so one second of its four is over by then
    assert steps(4.0, 3.0, staleness=1) == pytest.approx([7.0, 4.0, 4.0, 4.0])
    assert steps(4.0, 3.0, staleness=1, sync=0.5)[1:] == pytest.approx([4.5, 4.5, 4.5])


def test_a_stale_batch_costs_another_forward_pass():
    costs = Costs(prefill_token_s=0.0, decode_step_s=0.0, update_token_s=3.0, forward_token_s=1.0)
    batches = [[[episode((1, 1), trained=2.0)]]] * 3
    found = [
        train(batches, costs, servers=1, workers=1, staleness=k, reply_delay=None).update_s
        for k in (0, 1)
    ]
    assert found == [[6.0, 6.0, 6.0], [6.0, 8.0, 8.0]]  # the first is of the current weights


def test_a_rank_without_rollouts_is_not_busy():
    costs = Costs(prefill_token_s=0.0, decode_step_s=0.0, update_token_s=3.0)
    batches = [[[episode((1, 1), trained=2.0)], [], [episode((1, 1), trained=1.0)], []]] * 2
    found = train(batches, costs, servers=1, workers=1, staleness=0, reply_delay=None)
    assert found.update_s == [6.0, 6.0]  # all wait for the first
    assert found.busy_s == [pytest.approx((6 + 0 + 3 + 0) / 4)] * 2


@pytest.mark.parametrize(
    ("played", "env", "update", "other", "staleness", "limit"),
    [
        (3.0, 0.0, 2.0, 0.0, 0, "sampling"),
        (3.0, 0.0, 4.0, 0.0, 0, "training"),
        (3.0, 3.5, 2.0, 0.0, 0, "environments"),
        (1.0, 0.0, 2.0, 5.0, 0, "the rest of a step"),
        # ahead the shorter of the two phases costs nothing, whatever it consists of
        (2.0, 2.5, 4.0, 0.0, 1, "environments"),
        (2.0, 2.5, 4.6, 0.0, 1, "training"),
        (3.0, 0.0, 2.0, 0.0, 1, "sampling"),
    ],
)
def test_the_limit_is_what_a_step_waits_for(played, env, update, other, staleness, limit):
    costs = Costs(prefill_token_s=played, decode_step_s=0.0, update_token_s=update, other_s=other)
    batches = [[[episode((1, 1, env), trained=1.0)]]] * 3
    found = train(batches, costs, servers=1, workers=1, staleness=staleness, reply_delay=None)
    row = simulate_scale.row_of(found, costs, servers=1, ranks=1, staleness=staleness, shared=False)
    assert row["bottleneck"] == limit
    longer = max(played + env, update + other)
    step = longer if staleness else played + env + update + other
    assert row["step_s"] == pytest.approx(step)
    assert row["idle"] == pytest.approx(1 - (played + update) / 2 / step)


def test_one_long_rollout_is_named():
    costs = Costs(prefill_token_s=0.0, decode_step_s=0.1)
    # the long one is alone for 80 of its 90 steps
    batches = [[[episode((0, 11))] * 3 + [episode((0, 11), (0, 81))]]] * 2
    found = train(batches, costs, servers=1, workers=4, staleness=0, reply_delay=None)
    row = simulate_scale.row_of(found, costs, servers=1, ranks=1, staleness=0, shared=True)
    assert row["bottleneck"] == "long rollouts"


P, D, FIXED, TOKEN, OTHER = 0.002, 0.03, 0.5, 0.004, 0.2


LENGTHS = ((30, 8), (60, 20), (45, 31), (80, 5))


def write_run(directory, *, staleness, lengths=LENGTHS):
    """A run of two rollouts per step, whose times follow from the costs above."""
    directory.mkdir()
    metrics, records, ends = [], [], 0.0
    rollouts = [P * (100 + 2 * prompt) + D * (sampled - 1) for prompt, sampled in lengths]
    updates = [FIXED + TOKEN * 2 * (101 + prompt + sampled) for prompt, sampled in lengths]
    finished, ready = 0.0, rollouts[0]
    for number, (prompt, sampled) in enumerate(lengths):
        if staleness:
            begin = max(finished, ready)
            ready = begin + (rollouts[number + 1] if number + 1 < len(lengths) else 0.0)
        else:
            begin = finished + rollouts[number]
        ends = begin + updates[number] + OTHER
        row = {"step": number + 1, "time/step_s": ends - finished, "pack/saving": 1.0}
        row |= {"time/rollout_s": begin - finished, "time/update_s": updates[number]}
        metrics.append({**row, "time/sync_s": 0.0, "perf/rollout_s": rollouts[number]})
        finished = ends
        for member in range(2):
            spec = {"rollout_id": f"train/{number + 1}/0/mock/t/{member}", "group": 0}
            turn = {"start": 101 + prompt, "end": 101 + prompt + sampled}
            records.append(
                {
                    "step": number + 1,
                    "spec": spec,
                    "reward": float(member),
                    "turns": [turn],
                    "stats": {"env_time_s": 0.0},
                }
            )
    for name, lines in (("metrics.jsonl", metrics), ("rollouts.jsonl", records)):
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"rollout": {"max_staleness": staleness, "num_workers": 4}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


def test_costs_are_found_in_a_run_and_predict_it_and_another(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    ahead = write_run(tmp_path / "ahead", staleness=1)
    report, costs = tmp_path / "report.json", tmp_path / "costs.json"
    arguments = [str(run), "--check", str(ahead), "--json", str(report)]
    assert simulate_scale.main([*arguments, "--write-costs", str(costs)]) == 0
    found = json.loads(report.read_text())
    assert found["costs"]["decode_step_s"] == pytest.approx(D, rel=0.1)
    assert found["costs"]["update_token_s"] == pytest.approx(TOKEN)
    assert found["costs"]["update_fixed_s"] == pytest.approx(FIXED)
    assert [check["staleness"] for check in found["checks"]] == [0, 1]
    assert all(abs(check["error"]) < 0.02 for check in found["checks"])
    rows = found["rows"]
    assert [row["gpus"] for row in rows] == [1] + [n for n in (2, 4, 8, 16, 32, 64) for _ in "abc"]
    assert all(0.0 <= row["idle"] < 1.0 for row in rows)
    split = [row for row in rows if not row["shared"]]
    for plain, playing_ahead in zip(split[::2], split[1::2], strict=True):
        assert playing_ahead["step_s"] < plain["step_s"]
    assert "limit" in capsys.readouterr().out
    assert simulate_scale.main([str(run), "--costs", str(costs), "--gpus", "2"]) == 0


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"prefill_token_s": 1.0, "decode_step_s": 1.0, "decode_s": 1.0}, "decode_s is none of"),
        ({"prefill_token_s": -1.0, "decode_step_s": 1.0}, "prefill_token_s = -1.0: must be a"),
        ({"prefill_token_s": float("nan"), "decode_step_s": 1.0}, "prefill_token_s = nan: must be"),
        ({"prefill_token_s": 1.0}, "decode_step_s is missing"),
        ([], "must be an object"),
    ],
)
def test_costs_of_a_file_are_checked(tmp_path, capsys, costs, message):
    run, path = write_run(tmp_path / "run", staleness=0), tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    assert simulate_scale.main([str(run), "--costs", str(path)]) == 1
    assert f"simulate_scale: {path}: {message}" in capsys.readouterr().err


def test_what_prompts_share_is_of_the_run_and_not_of_the_machine(tmp_path):
    long = [(prompt + 1000, sampled) for prompt, sampled in LENGTHS]
    run = read_run(write_run(tmp_path / "run", staleness=0))
    other = read_run(write_run(tmp_path / "long", staleness=0, lengths=long))
    assert other.shared_tokens == run.shared_tokens + 1000
    assert check(other, fit(run)) == check(
        other, dataclasses.replace(fit(run), shared_tokens=other.shared_tokens)
    )


def test_a_run_of_several_ranks_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").open()]
    more = [{**line, "spec": {**line["spec"], "group": 1}} for line in lines]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in [*more, *lines]))
    assert simulate_scale.main([str(run)]) == 1
    assert "step 1 was played by several ranks" in capsys.readouterr().err


def test_half_a_last_line_is_left_out(tmp_path):
    run = write_run(tmp_path / "run", staleness=0)
    before = read_run(run)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 5, "ti')
    assert read_run(run) == before


def test_without_a_baseline_equal_rewards_are_trained(tmp_path):
    run = write_run(tmp_path / "run", staleness=0)
    lines = [json.loads(line) | {"reward": 1.0} for line in (run / "rollouts.jsonl").open()]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(run).steps[0].trained_tokens == 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["advantages"] = {"baseline": "none"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert read_run(run).steps[0].trained_tokens == 2 * (101 + 30 + 8)


def slower(run, factor, *, steps):
    """Other recorded step times."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for row in rows:
        if row["step"] in steps:
            for name in ("time/step_s", "time/rollout_s", "time/update_s", "perf/rollout_s"):
                row[name] *= factor
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_prediction_that_misses_is_an_error(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    ahead = write_run(tmp_path / "ahead", staleness=1)
    slower(ahead, 1.5, steps=(1, 2, 3, 4))
    assert simulate_scale.main([str(run), "--check", str(ahead), "--gpus", "1"]) == 1
    assert "-33%" in capsys.readouterr().out


def test_steps_that_are_held_out_are_not_fitted_to(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    slower(run, 1.5, steps=(2, 4))
    assert simulate_scale.main([str(run), "--gpus", "1"]) == 1
    assert "(-33%), max_staleness 0, steps 2, 4" in capsys.readouterr().out


def test_what_was_measured_and_what_is_assumed_is_said(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    costs, report = tmp_path / "costs.json", tmp_path / "report.json"
    arguments = [str(run), "--gpus", "2", "--json", str(report), "--write-costs", str(costs)]
    assert simulate_scale.main(arguments) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    fields = json.loads(costs.read_text())
    for name in fields:
        assert ("assumed: " in lines[name]) == (name == "decode_token_s")
        assert ("measured: " in lines[name]) == (name != "decode_token_s")
    for name in ("other", "communication", "rollouts"):
        assert "assumed: " in lines[name]
    assert set(json.loads(report.read_text())["assumed"]) >= {"decode_token_s", "communication"}
    assert simulate_scale.main([str(run), "--gpus", "2", "--costs", str(costs)]) == 0
    given = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert all("given with --costs" in given[name] for name in fields)


def test_the_probe_tells_what_a_forward_pass_costs(tmp_path):
    run = write_run(tmp_path / "run", staleness=0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    for row, length in zip(rows, LENGTHS, strict=True):  # the first of two rows is probed
        row |= {"pack/num_batches": 2.0, "time/probe_s": 0.001 * (101 + sum(length))}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert fit(read_run(run)).forward_token_s == pytest.approx(0.001)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"ratio": "generator"}))
    assert fit(read_run(run)).forward_token_s == 0.0  # nobody asks for older weights


@pytest.mark.parametrize(
    ("clocked", "reply_delay", "tolerance"),
    [(True, 0, 1e-6), (True, 3, 0.01), (False, 0, 0.05)],
    ids=["local", "delayed", "apart"],
)
def test_costs_are_found_where_waiting_depends_on_them(clocked, reply_delay, tolerance):
    """An engine 20 times as slow as the fit's first guess, which has time for environments.

    With servers apart a small change of the costs moves an arrival to another step, so the fit
    stays a few percent off.
    """
    true = Costs(prefill_token_s=0.01, decode_step_s=0.2)
    batches = [
        [episode((10 * i, 9 * j + 2, 0.4 * j), (7, 12 - j, 0.3)) for j in range(1, 4)]
        for i in (1, 5, 2)
    ]
    delay = reply_delay if clocked else None
    played = [play([b], true, servers=1, workers=2, reply_delay=delay) for b in batches]
    metrics = {"time/update_s": 0.0, "time/sync_s": 0.0, "time/step_s": 0.0}
    steps = [
        Step(metrics={**metrics, "time/rollout_s": p.seconds}, groups=[batch])
        for p, batch in zip(played, batches, strict=True)
    ]
    run = Run(
        steps=steps,
        staleness=0,
        workers=2,
        clocked=clocked,
        reply_delay=reply_delay,
        shared_tokens=0,
        ratio="proximal",
    )
    costs = fit(run)
    assert costs.prefill_token_s == pytest.approx(true.prefill_token_s, rel=4 * tolerance)
    assert costs.decode_step_s == pytest.approx(true.decode_step_s, rel=tolerance)


@pytest.mark.parametrize(
    ("rollout", "engine", "delay"),
    [
        ({}, None, 0),  # an old run: on the local engine
        ({"reply_delay": 5}, "components.policy.local.LocalEngine", 5),
        ({"reply_delay": 5}, "components.policy.vllm.VLLMEngine", None),
    ],
)
def test_how_a_run_was_played_is_read_in_its_config(tmp_path, rollout, engine, delay):
    directory = write_run(tmp_path / "run", staleness=0)
    config = {"rollout": {"num_workers": 4} | rollout}
    config |= {"engine": {"_component_": engine}} if engine else {}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    run = read_run(directory)
    assert run.own_delay == delay
    assert run.reply_delay == rollout.get("reply_delay", 0)


def test_an_engine_that_is_not_there_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    text = "rollout: {num_workers: 4}\nengine: {_component_: components.policy.vllm.VLLMEngin}"
    (run / "config.yaml").write_text(text)
    assert simulate_scale.main([str(run)]) == 1
    error = capsys.readouterr().err
    assert "'components.policy.vllm' has no 'VLLMEngin'; did you mean 'VLLMEngine'?" in error


def test_machines_apart_wait_for_nobody_and_the_same_ones_as_the_run_did(tmp_path):
    """Two rollouts of which one has a slow environment: only servers go on with the other."""
    run = read_run(write_run(tmp_path / "run", staleness=0))
    slow, steady = episode((0, 2), (0, 2, 10.0), trained=1.0), episode((0, 51), trained=1.0)
    steps = [dataclasses.replace(step, groups=[[slow, steady]]) for step in run.steps]
    costs = Costs(prefill_token_s=0.0, decode_step_s=1.0)
    arguments = {"gpus": [2], "groups": 1, "steps": 2, "workers": 2, "seed": 0}
    for delay, seconds in ((0, 60.0), (10, 50.0)):
        run = dataclasses.replace(run, steps=steps, reply_delay=delay)
        same, apart, _ = simulate_scale.table(run, costs, **arguments)
        assert (same["shared"], apart["shared"]) == (True, False)
        assert apart["step_s"] == pytest.approx(50.0)  # a second for each further token of STEADY
        assert same["step_s"] == pytest.approx(seconds)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert simulate_scale.main([str(tmp_path)]) == 1
    assert "has no metrics.jsonl" in capsys.readouterr().err
    ahead = write_run(tmp_path / "ahead", staleness=1)
    assert simulate_scale.main([str(ahead)]) == 1
    assert "rollout.max_staleness = 1: costs are fitted" in capsys.readouterr().err


def test_given_costs_are_held_against_the_runs_that_are_named(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    costs = tmp_path / "costs.json"
    assert simulate_scale.main([str(run), "--gpus", "1", "--write-costs", str(costs)]) == 0
    slower(run, 2.0, steps=(1, 2, 3, 4))
    arguments = [str(run), "--gpus", "1", "--costs", str(costs)]
    assert simulate_scale.main(arguments) == 0  # of another machine: it says nothing about RUN
    assert simulate_scale.main([*arguments, "--check", str(run)]) == 1
    assert "(-50%)" in capsys.readouterr().out


def test_what_cannot_be_simulated_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", staleness=0)
    for name in ("gpus", "groups", "workers", "steps"):
        assert simulate_scale.main([str(run), f"--{name}", "0"]) == 1
        assert f"--{name} 0: must be at least 1" in capsys.readouterr().err
    further = write_run(tmp_path / "further", staleness=1)
    (further / "config.yaml").write_text("rollout: {max_staleness: 2, num_workers: 4}")
    assert simulate_scale.main([str(run), "--check", str(further)]) == 1
    assert "rollout.max_staleness = 2: only 0 and 1" in capsys.readouterr().err


RECORDED = Path(__file__).parents[2] / "data/recorded_times"
"""Of two runs what ``read_run`` reads, all of it. ``mock``: twelve steps of configs/mock.yaml with
the tiny model of tests/recipes, on two cores that other processes shared, and ``counted/*``, what
its engine counted of each step (``LocalEngine.stats``). ``retail``: the three steps of a run of
configs/retail.yaml with SmolLM2-135M and 12 rollouts per step, which were played in rounds."""

STEPS_DELAYED = [66, 75, 50, 33, 27, 39, 27, 28, 23, 32, 25, 31]
"""Decode steps that the engine counted in ``mock`` with rollout.reply_delay=4: the same turns."""


def test_turns_are_what_the_engine_had_to_compute():
    """The first rollout of ``mock``: turns of 426-458, 487-495 and 525-528 in 0.0035177 s."""
    run = read_run(RECORDED / "mock")
    first = run.steps[0].groups[0][0]
    assert run.shared_tokens == 414
    # The last token of a turn is sampled and not fed: it is computed with the observation.
    assert [t.new_tokens for t in first.turns] == [426 - 414, 487 - 457, 525 - 494]
    assert [t.sampled_tokens for t in first.turns] == [32, 8, 3]
    # A reset and the three turns
    assert [t.env_s for t in first.turns] == pytest.approx([0.0035177 / 4] * 3)
    assert first.end_s == pytest.approx(0.0035177 / 4)


def test_what_the_engine_counted_is_counted():
    run = read_run(RECORDED / "mock")
    for step, delayed in zip(run.steps, STEPS_DELAYED, strict=True):
        counted = {n: int(step.metrics[f"counted/{n}"]) for n in ("decode_steps", "decode_tokens")}
        shared = int(step.metrics["counted/shared_tokens"])
        # The engine shares the system turn alone, the simulation as much as all prompts may.
        costs = dataclasses.replace(COSTS, shared_tokens=shared)
        more = run.shared_tokens - shared
        found = play([step.episodes], costs, servers=1, workers=run.workers, reply_delay=0)
        assert found.decode_steps == counted["decode_steps"]
        assert found.decode_tokens == counted["decode_tokens"]
        prefilled = shared + int(step.metrics["counted/prefill_tokens"])
        assert found.prefill_tokens + more * len(step.episodes) == prefilled
        found = play([step.episodes], costs, servers=1, workers=run.workers, reply_delay=4)
        assert found.decode_steps == delayed


def test_held_out_steps_of_a_recorded_run_are_predicted():
    """Within 20 % on the mean, and better than by saying that all steps are alike."""
    run = read_run(RECORDED / "mock")
    found = holdout(run)
    assert found["steps"] == [2, 4, 6, 8, 10, 12]
    assert abs(found["error"]) < 0.2
    fitted = fmean(step.metrics["time/step_s"] for step in run.steps[::2])
    each = found["each"]
    errors = [abs(e["predicted_s"] / e["measured_s"] - 1) for e in each]
    assert fmean(errors) < 0.8 * fmean(abs(fitted / e["measured_s"] - 1) for e in each)


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_step_is_predicted_from_others_that_took_half_or_twice_as_long(left_out):
    run = read_run(RECORDED / "retail")
    others = [step for number, step in enumerate(run.steps) if number != left_out]
    costs = fit(dataclasses.replace(run, steps=others))
    found = check(dataclasses.replace(run, steps=[run.steps[left_out]]), costs)
    assert abs(found["error"]) < 0.2
