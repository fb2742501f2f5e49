"""Demonstrations: they solve the tasks as the policy asks, and become ordinary rollouts."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from components.chat.hermes import HermesRenderer
from components.data.demonstration_file import (
    made_with,
    read_demonstrations,
    split_by_task,
    write_demonstrations,
)
from components.data.demonstrations import broken_rules, collect, cut_to, demonstrate
from components.data.oracle_facts import RetailFacts
from components.data.oracle_retail import RetailOracle
from components.envs.base import Message, Task
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, find_task, task_ids
from components.rollout.specs import group_specs
from components.rollout.types import Author
from tests.tiny import tiny_tokenizer_dir

TIERS = json.loads((Path(__file__).parents[2] / "data/retail_scripted_tiers.json").read_text())
FAIR = {*TIERS["A_static"], *TIERS["B_db_conditional_or_staged"]}
FAIR |= set(TIERS["C1_persona_or_withholding_only"])
# Fair tasks (an exchange, addresses, information, a return, an order named), then a change of mind
# and cancellations with a reason that is told when asked.
QUICK_FAIR = ("0", "22", "34", "73", "75")
QUICK = (*QUICK_FAIR, "72", "113")
NUM_TRAIN_SOLVED = 74


def spec_of(*ids):
    tasks = [("retail", task_id) for task_id in ids]
    return group_specs(tasks, group_size=1, seed=0, phase="demo")


def play(renderer, spec):
    oracle = RetailOracle(find_task("retail", spec.task_id), seed=spec.seed)
    return demonstrate(Tau2Env(domain="retail"), oracle, renderer, spec)


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    directory = tiny_tokenizer_dir(tmp_path_factory.mktemp("tokenizer"))
    renderer = HermesRenderer(directory, tool_format="signatures")
    return functools.partial(play, renderer)


@pytest.fixture(scope="module")
def rollouts(player):
    return {spec.task_id: player(spec) for spec in spec_of(*QUICK)}


def calls(rollout):
    """(place, name, arguments) of every call, in order."""
    return [
        (place, call["name"], call["arguments"])
        for place, message in enumerate(rollout.messages)
        for call in message.get("tool_calls", ())
    ]


def values(arguments):
    """Every text in some arguments."""
    for value in arguments.values():
        yield from [value] if isinstance(value, str) else value


def is_write(name):
    return domain_data("retail").tool_types[name] == "write"


def texts(rollout, before, *roles):
    return "\n".join(m["content"] for m in rollout.messages[:before] if m["role"] in roles)


def check_policy(rollout):
    """S1 authentication, S2 consent, S3 and S4 one customer, S7 one call and no text beside it."""
    made = calls(rollout)
    user_id = None
    for place, name, arguments in made:
        message = rollout.messages[place]
        assert (len(message["tool_calls"]), message["content"]) == (1, ""), "S7"
        if name.startswith("find_user_id"):
            said = texts(rollout, place, "user").lower()
            assert all(value.lower() in said for value in values(arguments)), "S1: not said"
            answer = rollout.messages[place + 1]
            user_id = user_id or (None if answer.get("error") else answer["content"])
            continue
        assert user_id, f"S1: {name} before authentication"
        if is_write(name):
            yes, asked = rollout.messages[place - 1], rollout.messages[place - 2]
            assert (yes["role"], yes["content"][:3]) == ("user", "Yes"), "S2"
            assert arguments.get("order_id", "default address") in asked["content"], "S2"
            street = arguments.get("address1", "")
            assert street in asked["content"], "S2"
            assert arguments.get("payment_method_id", "") in asked["content"], "S2"
    orders = domain_data("retail").build().tools.db.orders
    for _, _, arguments in made:
        assert arguments.get("user_id", user_id) == user_id, "S3"
        order_id = arguments.get("order_id")
        assert order_id is None or orders[order_id].user_id == user_id, "S3"
    told = texts(rollout, None, "assistant")
    for order_id in re.findall(r"#W\d{7}", told):
        assert orders[order_id].user_id == user_id, "S4"


def check_reads_before_writes(rollout):
    """S8: the order's details were read before it was changed."""
    read: set[str] = set()
    for _, name, arguments in calls(rollout):
        if name == "get_order_details":
            assert arguments["order_id"] not in read, "read twice"
            read.add(arguments["order_id"])
        if is_write(name) and "order_id" in arguments:
            assert arguments["order_id"] in read


def check_grounded(rollout):
    """Whatever a write needs was said by the user or shown by a tool before."""
    for place, name, arguments in calls(rollout):
        if not is_write(name):
            continue
        seen = texts(rollout, place, "user", "tool").lower()
        for key, value in arguments.items():
            for text in [value] if isinstance(value, str) else value:
                # Country and state follow from the city; a reason is one of two fixed words.
                assert key in ("country", "state", "reason") or text.lower() in seen, (key, text)
        if "reason" in arguments:
            word = "mistake" if "mistake" in arguments["reason"] else "no longer need"
            assert word in texts(rollout, place, "user"), "the reason was not said"


def check_all(rollout):
    assert rollout.status == "completed", rollout.error
    assert rollout.reward == rollout.reward_breakdown["official"] == 1.0
    check_policy(rollout)
    assert broken_rules(rollout) == []
    check_reads_before_writes(rollout)
    check_grounded(rollout)
    for message in rollout.messages:
        if message["role"] == "assistant":
            assert len(message["content"].split()) <= 60


def test_quick_tasks_are_solved_as_the_policy_asks(rollouts):
    assert set(QUICK_FAIR) <= FAIR
    for rollout in rollouts.values():
        check_all(rollout)


@pytest.mark.slow
def test_all_train_tasks(player):
    solved = []
    for spec in spec_of(*task_ids("retail", "train")):
        rollout = player(spec)
        if rollout.reward == 1.0:
            check_all(rollout)
            solved.append(spec.task_id)
    assert len(solved) >= NUM_TRAIN_SOLVED


def test_required_information_is_told(rollouts):
    assert "1093.34" in texts(rollouts["34"], None, "assistant")
    assert not find_task("retail", "113").evaluation_criteria.communicate_info


def test_the_ledger_holds_what_was_said(rollouts, player):
    (renderer,) = player.args
    rollout = rollouts["113"]
    sampled = [m for m in rollout.messages if "turn" in m]
    assert len(sampled) == len(rollout.turns) == rollout.stats["turns"]
    for (start, end), record in zip(rollout.turns, sampled, strict=True):
        ids = rollout.tokens.ids[start:end]
        assert set(rollout.tokens.loss_mask[start:end]) == {1}
        assert ids[-1] in renderer.stop_ids
        parsed = renderer.parse(ids).message
        assert parsed is not None
        assert parsed.content == record["content"]
        called = [call["arguments"] for call in record.get("tool_calls", ())]
        assert [dict(call.arguments) for call in parsed.tool_calls] == called
    assert sum(rollout.tokens.loss_mask) == sum(end - start for start, end in rollout.turns)
    assert set(rollout.tokens.generator_logprobs) == {0.0}


def test_deterministic_by_seed(rollouts, player):
    spec = rollouts["113"].spec
    assert player(spec).tokens == rollouts["113"].tokens
    others = [player(replace(spec, seed=seed, env_seed=seed)).tokens.ids for seed in range(4)]
    assert len(set(others)) > 1


def test_cut_keeps_whole_turns(rollouts):
    rollout = rollouts["113"]
    assert cut_to(rollout, len(rollout.tokens)) is rollout
    third = rollout.turns[2]
    for max_tokens in (third[1], rollout.turns[3][1] - 1):
        cut = cut_to(rollout, max_tokens)
        assert cut is not None
        assert cut.turns == rollout.turns[:3]
        assert len(cut.tokens) == third[1] <= max_tokens
        assert cut.tokens.ids == rollout.tokens.ids[: third[1]]
        assert cut.tokens.authors[-1] == Author.ASSISTANT
        assert cut.stats["sampled_tokens"] == sum(cut.tokens.loss_mask)
        assert cut.stats["cut"] == 1
    assert cut_to(rollout, rollout.turns[0][1] - 1) is None


def test_collect_keeps_full_rewards_and_counts_the_rest(rollouts):
    good, long = rollouts["113"], rollouts["0"]
    assert len(long.tokens) > len(good.tokens)
    bad = replace(good, reward=0.0, reward_breakdown={"official": 0.0})
    failed = replace(good, status="error_infra", reward=None, reward_breakdown={}, error="lost")
    beside = {"content": "One moment."}
    messages = tuple(m | beside if m.get("tool_calls") else m for m in good.messages)
    rude = replace(good, messages=messages)  # text beside a call
    assert broken_rules(rude) == ["S7"]
    played = {"good": good, "bad": bad, "rude": rude, "failed": failed, "long": long}
    specs = [replace(good.spec, rollout_id=name) for name in played]

    def player(spec):
        return replace(played[spec.rollout_id], spec=spec)

    limit = len(good.tokens)
    demos = collect(specs, play=player, max_tokens=limit)
    assert [r.spec.rollout_id for r in demos.rollouts] == ["good"]
    assert demos.dropped == {
        "reward": ("bad",),
        "safety": ("rude",),
        "too_long": ("long",),
        "error": ("failed",),
    }
    assert demos.num_cut == 0
    demos = collect(specs, play=player, max_tokens=limit, cut=True)
    assert [r.spec.rollout_id for r in demos.rollouts] == ["good", "long"]
    assert demos.num_cut == 1
    assert demos.dropped["too_long"] == ()


SETTINGS = {"env": {"domain": "retail"}, "renderer": {"tool_format": "json"}}


def test_a_directory_of_demonstrations(rollouts, tmp_path):
    good, other = rollouts["113"], rollouts["0"]
    tokenizer = tiny_tokenizer_dir(tmp_path / "model")
    settings = made_with({**SETTINGS, "seed": 1}, model_dir=tokenizer)
    made = collect([good.spec, other.spec], play=rollouts_by_spec(rollouts), max_tokens=10**6)
    path = write_demonstrations(tmp_path / "made", made, settings=settings, facts={"seed": 1})
    tasks = [Task(id=i, domain="retail", split="train") for i in ("113", "0", "22")]
    found = read_demonstrations(path, tasks=tasks, settings=settings)
    assert [r.tokens for r in found] == [good.tokens, other.tokens]  # all of the ledger
    with pytest.raises(ValueError, match="task retail/0 is not among the training tasks"):
        read_demonstrations(path, tasks=tasks[:1], settings=settings)
    env = {"env": {"domain": "retail", "max_steps": 9}}
    changed = made_with(SETTINGS | env, model_dir=tokenizer)
    with pytest.raises(ValueError, match=r"env\.max_steps was None, is 9"):
        read_demonstrations(path, tasks=tasks, settings=changed)
    checker = {"env": {"domain": "retail", "checker": "x"}}  # changes no token
    assert made_with(SETTINGS | checker, model_dir=tokenizer) == settings
    (tokenizer / "tokenizer.json").write_text("{}")
    changed = made_with(SETTINGS, model_dir=tokenizer)
    with pytest.raises(ValueError, match="tokenizer was"):
        read_demonstrations(path, tasks=tasks, settings=changed)
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        write_demonstrations(path, made, settings=settings, facts={})
    nothing = replace(made, rollouts=())
    with pytest.raises(ValueError, match="not one demonstration succeeded"):
        write_demonstrations(tmp_path / "more", nothing, settings=settings, facts={})
    assert {p.name for p in tmp_path.iterdir()} == {"model", "made"}


def rollouts_by_spec(rollouts):
    return lambda spec: rollouts[spec.task_id]


def test_held_out_tasks_are_apart_whatever_the_order(rollouts):
    several = [
        replace(r, spec=replace(r.spec, rollout_id=f"{r.spec.task_id}/{n}"))
        for r in rollouts.values()
        for n in range(2)
    ]
    trained, held_out = split_by_task(several, held_out_frac=0.3, seed=1)
    apart = [{r.spec.task_id for r in some} for some in (trained, held_out)]
    assert not apart[0] & apart[1]
    assert (len(apart[0]), len(apart[1]), len(held_out)) == (5, 2, 4)
    again = split_by_task(several[::-1], held_out_frac=0.3, seed=1)
    assert {r.spec.task_id for r in again[1]} == apart[1]
    by_seed = [split_by_task(several, held_out_frac=0.3, seed=seed)[1] for seed in range(8)]
    assert len({frozenset(r.spec.task_id for r in some) for some in by_seed}) > 1
    assert split_by_task(several, held_out_frac=0, seed=1) == (several, [])
    assert len(split_by_task(several, held_out_frac=0.01, seed=1)[1]) == 2  # one task at least
    with pytest.raises(ValueError, match="of 1 demonstrated tasks none is left"):
        split_by_task(several[:2], held_out_frac=0.1, seed=1)


def test_a_wrong_demonstration_earns_nothing(player):
    class Idle:
        def act(self, messages, tools):
            return Message(role="assistant", content="It is done. Anything else?")

    (spec,) = spec_of("113")
    rollout = demonstrate(Tau2Env(domain="retail"), Idle(), player.args[0], spec)
    assert rollout.status == "completed"
    assert rollout.reward == 0.0
    assert collect([spec], play=lambda _: rollout, max_tokens=10**6).rollouts == ()


def test_sums_come_from_amounts_that_tools_have_shown():
    facts = RetailFacts()
    item = {"name": "Lamp", "item_id": "1", "product_id": "9", "price": 10.5}
    other = {"name": "Desk", "item_id": "2", "product_id": "8", "price": 20.25}
    order = {"order_id": "#W1", "items": [item, other], "payment_history": [{"amount": 99.0}]}
    facts.learn(order)
    assert facts.sums("30.75") == "10.5 + 20.25"
    assert facts.sums("31.00") is None
    writes = [("return_delivered_order_items", {"order_id": "#W1", "item_ids": ["2", "1"]})]
    assert facts.sums("30.75", writes) == "20.25 + 10.5"
    assert facts.sums("10") is None


def test_the_oracle_of_a_task_is_that_of_its_domain():
    from components.data.oracle_mock import MockOracle
    from components.data.oracles import domain_oracle

    def oracle(domain, task_id):
        (spec,) = group_specs([(domain, task_id)], group_size=1, seed=0, phase="demo")
        return domain_oracle(spec)

    assert isinstance(oracle("retail", "0"), RetailOracle)
    assert isinstance(oracle("mock", "generated-7-0"), MockOracle)
    with pytest.raises(ValueError, match="nobody demonstrates 'airline' \\(allowed: retail, mock"):
        oracle("airline", "0")
    with pytest.raises(ValueError, match="is of split 'test'"):
        oracle("retail", "5")
