import re
import subprocess
import sys

import pytest

from components.data.oracle_mock import MockOracle
from components.data.oracles import mock_oracle
from components.envs.base import Message, ToolCall
from components.envs.baselines import baseline
from components.envs.mock_tasks import generated_ids, generated_task
from components.envs.rewards import gold_actions
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import domain_data, find_task, split_of, task_ids
from components.envs.user_phrases import MOCK_PHRASES
from components.envs.users_mock import make_mock_user
from components.rollout.specs import group_specs
from components.training.config import load_config
from tests.parity.tau2_scripts import Script, gold_script, our_run, talk

IDS = generated_ids(0, 60) + generated_ids(1, 20)
DIALOGUES = generated_ids(3, 60, kind="dialogue")
HELD_OUT = generated_ids(3, 60, kind="dialogue_held_out")


def play(env, task_id, seed):
    """An episode of the oracle with the scripted user: (reward, messages)."""
    _, info = env.reset(seed=seed, options={"task_id": task_id})
    tools, messages, done, reward = info["tools"], list(info["messages"]), False, 0.0
    while not done:
        action = MockOracle().act(tuple(messages), tools)
        assert len(action.tool_calls) <= 1
        assert bool(action.content) != bool(action.tool_calls)
        messages.append(action)
        _, reward, terminated, truncated, info = env.step(action)
        messages += info["messages"]
        done = terminated or truncated
    return reward, messages


def test_tasks_are_a_function_of_their_id():
    script = (
        "from components.envs.mock_tasks import generated_task as g;"
        "print(''.join(g(f'generated-4-{i}').model_dump_json() for i in range(5)))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other == "".join(generated_task(f"generated-4-{i}").model_dump_json() for i in range(5))
    dumps = {generated_task(i).model_dump_json(exclude={"id"}) for i in IDS}
    assert len(dumps) == len(IDS)


def test_disjoint_from_the_official_tasks():
    official = [task.model_dump_json() for task in domain_data("mock").tasks.values()]
    for task_id in IDS:
        task = generated_task(task_id)
        data = task.initial_state.initialization_data.agent_data
        names = [t["title"] for t in data["tasks"].values()]
        names += [u["name"] for u in data["users"].values()]
        writes = gold_actions("mock", task_id).writes
        names += [arguments["title"] for name, arguments in writes if name == "create_task"]
        assert not any(name in text for name in names for text in official)
        assert "user_1" not in data["users"]
    with pytest.raises(ValueError, match="<kind>-<seed>-<index>"):
        generated_task("generated-x")


@pytest.mark.parametrize("task_ids", [DIALOGUES, HELD_OUT])
def test_ids_of_dialogues_are_not_to_be_guessed(task_ids):
    """Three callers and their tasks, numbered at random, and apart from what the tool numbers."""
    seen = {"users": set(), "tasks": set()}
    for task_id in task_ids:
        data = generated_task(task_id).initial_state.initialization_data.agent_data
        assert len(data["users"]) == 3
        for what, ids in seen.items():
            numbers = [int(key.split("_")[1]) for key in data[what]]
            assert all(20 <= number < 100 for number in numbers)
            ids |= set(numbers)
        listed = [task for user in data["users"].values() for task in user["tasks"]]
        assert listed == list(data["tasks"])
        assert len(listed) < 20 - 3  # the official one and two new ones are fewer than 20
    assert min(map(len, seen.values())) > 60


def test_gold_replay_scores_one_and_less_does_not():
    for task_id in IDS:
        task = generated_task(task_id)
        script = gold_script(task)
        for kept, expected in ((script, 1.0), (script[:-2] + script[-1:], 0.0)):
            played = Script(agent=kept, user=talk(2))
            _, end = our_run(domain="mock", task_id=task_id, script=played, max_steps=100)
            assert end[1] == expected, task_id
            assert end[4]["trajectory"].num_tool_errors == 0
        assert len([a for a in task.evaluation_criteria.actions if a.name != "get_users"]) in (2, 3)


def test_baselines_score_zero():
    for task_id in IDS[:30]:
        assert baseline("mock", task_id).value == 0.0
        assert baseline("mock", task_id, agent="transfer").value == 0.0


def test_oracle_solves_every_generated_task_from_what_was_said():
    env = Tau2Env(domain="mock", tasks="generated:0:60")
    kinds = set()
    for i, task_id in enumerate(IDS):
        reward, messages = play(env, task_id, seed=i)
        assert reward == 1.0, task_id
        known = ""
        for message in messages:
            for call in message.tool_calls:
                kinds.add(call.name)
                if call.name.startswith("transfer"):
                    continue
                for value in call.arguments.values():
                    assert value in known, (task_id, call)
            if message.role in ("user", "tool"):
                known += message.content
        texts = [m.content for m in messages if m.role == "user"]
        assert "user_" not in texts[0]  # who it is, the user says when asked
    assert len(kinds) == 4


def test_oracle_on_the_official_tasks():
    env = Tau2Env(domain="mock")
    rewards = {task_id: play(env, task_id, seed=0)[0] for task_id in task_ids("mock", "test")}
    # That task asks the agent to say two sentences that no user asks for.
    assert [i for i, r in rewards.items() if r != 1.0] == ["update_task_with_initialization_data"]


@pytest.mark.parametrize("paraphrases", ["train", "held_out"])
def test_both_sets_of_paraphrases_can_be_solved(paraphrases):
    env = Tau2Env(domain="mock", tasks="generated:0:40", paraphrases=paraphrases)
    said = []
    for i, task_id in enumerate(IDS[:40]):
        reward, messages = play(env, task_id, seed=i)
        assert reward == 1.0, task_id
        said += [m.content for m in messages if m.role == "user"]
    phrases, others = (MOCK_PHRASES[name] for name in (paraphrases, *_other(paraphrases)))
    spoken = "\n".join(said)
    for key in ("hello", "update", "create", "description", "user_id", "delete"):
        assert any(_piece(p) in spoken for p in phrases[key]), key
        assert not any(_piece(p) in spoken for p in others[key]), key


def _other(paraphrases):
    return {"train", "held_out"} - {paraphrases}


def _piece(phrase):
    """The longest part of a phrase between its gaps."""
    return max(re.split(r"\{\d\}", phrase), key=len)


def test_phrase_sets_are_disjoint_and_have_the_same_gaps():
    train, held_out = MOCK_PHRASES["train"], MOCK_PHRASES["held_out"]
    assert train.keys() == held_out.keys()
    for key in train:
        assert not set(train[key]) & set(held_out[key])
        gaps = {tuple(re.findall(r"\{\d\}", p)) for p in (*train[key], *held_out[key])}
        assert len(gaps) == 1, key


def _user(task_id="generated-0-0", seed=0):
    return make_mock_user(find_task("mock", task_id), seed)


def _find(pattern):
    """A generated task whose request starts so."""
    return next(
        i
        for i in IDS
        if pattern in generated_task(i).user_scenario.instructions.reason_for_call.split(".")[0]
    )


def test_user_leaves_after_three_turns_without_news():
    user = _user()
    user.reply("Hi! How can I help you today?")
    replies = [user.reply("Hm.") for _ in range(3)]
    assert "###STOP###" not in replies[0] + replies[1]
    assert "###STOP###" in replies[2]


def test_user_confirms_and_goes_on_when_something_is_done():
    task_id = _find("create a new task")
    user = _user(task_id)
    first = user.reply("Hi! How can I help you today?")
    assert "task" in first
    assert user.reply("I will create it. Shall I proceed?") == "Yes, please go ahead."
    assert user.reply("I will create it. Please confirm.") == "Yes, please go ahead."
    second = user.reply("I have created the task. Is there anything else?")
    assert second.split(". ", 1)[1] not in first
    assert "###" not in second


@pytest.mark.parametrize(
    ("known", "question", "answer"),
    [
        (True, "What is your user id?", "My user id is user_"),
        (False, "What is your user id?", "I don't remember my user id. My name is "),
        (True, "Sure. Please provide your user ID.", "My user id is user_"),
        (True, "May I have your name?", "My name is "),
        (False, "Could you give me your full name?", "My name is "),
    ],
)
def test_user_says_who_it_is_when_asked(known, question, answer):
    def knows(task_id):
        return "user id" in generated_task(task_id).user_scenario.instructions.known_info

    user = _user(next(i for i in IDS if knows(i) == known))
    assert "My name" not in user.reply("Hi! How can I help you today?")
    assert user.reply(question).startswith(answer)


def test_user_accepts_a_transfer_and_a_refusal():
    user = _user()
    user.reply("Hi!")
    assert user.reply("Please hold on while I transfer you to a human.") == "###TRANSFER###"
    user = _user()
    first = user.reply("Hi!")
    assert user.reply("I am sorry, I cannot do that.") != first
    assert user.reply("Should I transfer you to a human?") != "###TRANSFER###"


def test_done_is_not_heard_in_a_question():
    user = _user(_find("create a new task"))
    user.reply("Hi!")
    assert user.reply("Do you want the task to be created?") != "Thank you."
    assert "###STOP###" not in user.reply("Would you like anything else done?")


# ---------------------------------------------------------------- dialogues


@pytest.mark.parametrize("ids", [DIALOGUES, HELD_OUT], ids=["dialogue", "dialogue_held_out"])
def test_gold_of_a_dialogue_scores_one_and_those_who_do_not_try_zero(ids):
    for task_id in ids:
        played = Script(agent=gold_script(generated_task(task_id)), user=talk(2))
        _, end = our_run(domain="mock", task_id=task_id, script=played, max_steps=100)
        assert end[1] == 1.0, task_id
        assert end[4]["trajectory"].num_tool_errors == 0
        for agent in ("do_nothing", "transfer"):
            assert baseline("mock", task_id, agent=agent).value == 0.0, (task_id, agent)


@pytest.mark.parametrize("paraphrases", ["train", "held_out"])
@pytest.mark.parametrize("ids", [DIALOGUES, HELD_OUT], ids=["dialogue", "dialogue_held_out"])
def test_oracle_solves_every_dialogue_from_what_was_said(ids, paraphrases):
    env = Tau2Env(domain="mock", paraphrases=paraphrases)
    for i, task_id in enumerate(ids):
        reward, messages = play(env, task_id, seed=i)
        assert reward == 1.0, task_id
        known = ""
        for message in messages:
            for call in message.tool_calls:
                if not call.name.startswith("transfer"):
                    assert all(value in known for value in call.arguments.values()), task_id
            if message.role in ("user", "tool"):
                known += message.content


def test_dialogues_have_all_that_makes_them_long():
    texts = [generated_task(i).user_scenario.instructions.reason_for_call for i in DIALOGUES]
    for part in (
        "; say that its title is '",
        "; say that its description is '",
        "change the status of a task; say that task_",
        "mark the new task as completed",
        "talk to a human agent",
        "delete task_",
    ):
        assert any(part in text for text in texts), part
    assert any(re.search(r"as (?:archived|blocked|cancelled|urgent)\.", text) for text in texts)
    unknown = [i for i in DIALOGUES if not _caller_is_known(generated_task(i))]
    assert 0 < len(unknown) < len(DIALOGUES) / 3
    for task_id in unknown:  # only existing users can create tasks
        names = [action.name for action in generated_task(task_id).evaluation_criteria.actions]
        assert names == ["get_users", "update_task_status"]


def _caller_is_known(task):
    name = re.match(r"Your name is ([^.]+)\.", task.user_scenario.instructions.known_info)[1]
    users = task.initial_state.initialization_data.agent_data["users"]
    return name in {user["name"] for user in users.values()}


def test_what_the_policy_forbids_costs_the_reward():
    """An agent that sets a status which the policy does not have, where the oracle refuses."""
    forbidden = re.compile(r"mark (task_\d+) as (archived|blocked|cancelled|urgent)")
    task_id = next(i for i in DIALOGUES if forbidden.search(_reason(i)))
    which, status = forbidden.search(_reason(task_id)).groups()
    obeys = ToolCall(
        id="x", name="update_task_status", arguments={"task_id": which, "status": status}
    )
    env = Tau2Env(domain="mock")
    for obedient, expected in ((False, 1.0), (True, 0.0)):
        _, info = env.reset(seed=0, options={"task_id": task_id})
        tools, messages, done, refusals, reward = info["tools"], list(info["messages"]), False, 0, 0
        while not done:
            action = MockOracle().act(tuple(messages), tools)
            if action.content.startswith("I am sorry"):
                refusals += 1
                if obedient and refusals == 1:
                    action = Message(role="assistant", tool_calls=(obeys,))
            messages.append(action)
            _, reward, terminated, truncated, info = env.step(action)
            messages += info["messages"]
            done = terminated or truncated
        assert refusals >= 1
        assert reward == expected


def _reason(task_id):
    return generated_task(task_id).user_scenario.instructions.reason_for_call


def _contents(ids):
    """Names, titles and descriptions of tasks: of their databases, callers and gold actions."""
    found = set()
    for task_id in ids:
        task = generated_task(task_id)
        data = task.initial_state.initialization_data.agent_data
        found |= {t["title"] for t in data["tasks"].values()}
        found |= {u["name"] for u in data["users"].values()}
        found |= set(re.findall(r"'([^']+)'", _reason(task_id)))
        found |= set(re.findall(r"name is ([^.]+)", task.user_scenario.instructions.known_info))
    return found


def test_training_and_held_out_dialogues_share_neither_seed_nor_content():
    trained = load_config("configs/mock_learn.yaml").env.tasks
    evaluated = load_config("configs/mock_learn_eval.yaml").env.tasks
    assert load_config("configs/mock_learn_sft.yaml").env.tasks == trained
    assert trained.split(":")[1] != evaluated.split(":")[1]
    ids = [task_ids("mock", "train", tasks=trained), task_ids("mock", "test", tasks=evaluated)]
    assert len(ids[0]) == 256
    assert len(ids[1]) == 32
    ours, theirs = _contents(ids[0]), _contents(ids[1])
    assert len(ours) > 200
    assert len(theirs) > 100
    assert not ours & theirs
    official = set(domain_data("mock").tasks)
    assert not official & {*ids[0], *ids[1]}


def test_nothing_trains_on_a_held_out_kind():
    with pytest.raises(ValueError, match="mock has with tasks 'dialogue_held_out:1:8' no 'train'"):
        task_ids("mock", "train", tasks="dialogue_held_out:1:8")
    assert split_of("mock", "dialogue_held_out-1-0") == "test"
    assert split_of("mock", "dialogue-1-0") == "train"
    spec = group_specs(
        [("mock", "dialogue_held_out-1-0")], group_size=1, seed=0, phase="demonstration"
    )[0]
    with pytest.raises(ValueError, match="not of a held-out kind"):
        mock_oracle(spec)
    with pytest.raises(ValueError, match="did you mean 'dialogue'"):
        Tau2Env(domain="mock", tasks="dialog:1:8")


@pytest.mark.parametrize(
    ("said", "asked", "answer"),
    [
        ("its title is", "What should it be called?", "The title is '"),
        ("its title is", "Tell me more, please.", "task"),
        ("its description is", "Do you have a description?", "The description is '"),
        ("change the status of a task", "Which one, and what is its new status?", "task_"),
        ("change the status of a task", "Please tell me the task id.", "task_"),
    ],
)
def test_user_says_what_it_withholds_when_asked(said, asked, answer):
    task_id = next(i for i in DIALOGUES if said in _reason(i).split(". ")[0])
    user = _user(task_id)
    first = user.reply("Hi! How can I help you today?")
    withheld = re.search(r"(?:is '|that )([^' ]+)[^.]*when asked", _reason(task_id))[1]
    assert withheld not in first
    assert answer in user.reply(asked)
