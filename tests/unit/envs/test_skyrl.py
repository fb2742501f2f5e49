"""skyrl-gym's environments through ours: the package itself, played directly, is the reference."""

import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest
import skyrl_gym
from gymnasium.utils.env_checker import check_env as gymnasium_check
from skyrl_gym.envs.gsm8k.utils import compute_score

from components.envs import skyrl
from components.envs.check import check_env
from components.envs.text import TextEnv

MAX_TURNS = 3
TASKS = skyrl.SkyRLTasks(tasks="sums", split="all")


def make(tasks="sums", **env_config):
    game = skyrl.SkyRLGame(tasks=str(tasks), max_turns=MAX_TURNS, env_config=env_config)
    return TextEnv(game=game, checker=skyrl.TurnRewards())


def play(env, task_id, turns):
    """The texts of the other side after each turn, and the last answer."""
    env.reset(seed=0, options={"task_id": task_id})
    heard = []
    for turn in turns:
        answer = env.step(turn)
        heard.append([message.content for message in answer[4]["messages"]])
        if answer[2]:
            return heard, answer
    raise AssertionError("the episode did not end")


def play_directly(row, turns, **how):
    """What the package itself says and gives, without us."""
    game = skyrl_gym.make(row["env_class"], extras=row | {"max_turns": MAX_TURNS}, **how)
    game.init(row["prompt"])
    heard, rewards = [], []
    for turn in turns:
        out = game.step(turn)
        heard.append([message["content"] for message in out["observations"]])
        rewards.append(out["reward"])
        if out["done"]:
            return heard, rewards
    raise AssertionError("the episode did not end")


def scripts(right):
    """Turns, and the reward by hand: 1 for the right number, 0.2 / 3 for the form alone."""
    form = 0.2 / MAX_TURNS
    wrong, number, bare = f"#### {int(right) + 1}", f"It is\n#### {right}", f"It is {right}."
    return [
        ([number], 1.0),
        ([bare, number], 1.0),
        ([wrong, number], form + 1.0),
        ([wrong, bare, number], form + 1.0),
        ([wrong, wrong, wrong], 3 * form),
        ([bare, wrong, bare], form),
        ([bare, bare, bare], 0.0),
    ]


def test_rewards_and_replies_are_the_packages_on_every_task():
    env = make()
    for task in TASKS:
        row = TASKS.rows[task.id]
        right = row["reward_spec"]["ground_truth"]
        for turns, by_hand in scripts(right):
            heard, (_, reward, terminated, truncated, info) = play(env, task.id, turns)
            expected, rewards = play_directly(row, turns)
            assert heard == expected
            assert info["trajectory"].official == tuple(rewards)
            assert (terminated, truncated) == (True, False)
            assert reward == pytest.approx(by_hand, abs=1e-12)
            assert reward == sum(rewards) == info["reward"].breakdown["official"]
            solved = compute_score(turns[-1], right)
            assert info["reward"].breakdown["strict"] == solved


def test_the_sums_are_right():
    """The answers by another road: the numbers of each story and what its words say to do."""
    for row in TASKS.rows.values():
        story = row["prompt"][-1]["content"]
        first, second = map(int, re.findall(r"\d+", story))
        rule = {"buys": "+", "sold": "+", "gave": "-", "boxes": "*"}
        (sign,) = {sign for word, sign in rule.items() if word in story}
        right = {"+": first + second, "-": first - second, "*": first * second}[sign]
        assert int(row["reward_spec"]["ground_truth"]) == right > 0


def test_the_splits_are_apart():
    train, test = (skyrl.SkyRLTasks(tasks="sums", split=split) for split in ("train", "test"))
    assert (len(train), len(test), len(TASKS)) == (48, 16, 64)
    asked = [
        {TASKS.rows[task.id]["prompt"][-1]["content"] for task in part} for part in (train, test)
    ]
    assert not asked[0] & asked[1]
    assert {task.split for task in test.tasks} == {"test"}


# ---------------------------------------------------------------- another of its environments


ROWS = [(1, "Ana", 30), (2, "Ben", 41), (3, "Chloe", 41)]
GOLD = "SELECT name FROM people WHERE age > 40"


@pytest.fixture
def sql(tmp_path):
    """A row of text2sql and the folder of its database, laid out as the package wants it."""
    folder = tmp_path / "spider" / "database" / "town"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "town.sqlite") as connection:
        connection.execute("CREATE TABLE people (id INTEGER, name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO people VALUES (?, ?, ?)", ROWS)
    connection.close()
    ask = [
        {"role": "system", "content": "Query with <sql>, answer with <solution>."},
        {"role": "user", "content": "Who is over 40?"},
    ]
    row = {
        "prompt": ask,
        "env_class": "text2sql",
        "db_id": "town",
        "data": "spider",
        "reward_spec": {"ground_truth": GOLD},
        "extra_info": {"split": "train"},
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return row, path


@pytest.mark.parametrize(
    ("solution", "reward", "strict"),
    [
        ("<think>so</think><solution>SELECT name FROM people WHERE id > 1</solution>", 1.0, 1.0),
        ("<think>so</think><solution>SELECT name FROM people</solution>", 0.0, 0.0),
        ("<solution>SELECT name FROM people WHERE id > 1</solution>", -1.0, 0.0),
    ],
    ids=["right", "wrong", "without thoughts"],
)
def test_tool_use_in_text(sql, solution, reward, strict):
    row, path = sql
    turns = ["<sql>SELECT age FROM people WHERE name = 'Ben'</sql>", solution]
    env = make(path, db_path=str(path.parent))
    heard, answer = play(env, "0", turns)
    assert "41" in heard[0][0]
    assert answer[1] == reward
    assert answer[4]["reward"].breakdown == {"official": reward, "strict": strict}
    config = env.game.config
    assert (heard, list(answer[4]["trajectory"].official)) == play_directly(
        row, turns, env_config=config
    )
    env.close()


# ---------------------------------------------------------------- the checks


def test_it_passes_our_check():
    check_env(make(), task_id="5", turns=("No idea.", "#### 1"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_passes_the_check_of_gymnasium():
    gymnasium_check(make(), skip_render_check=True)


def test_wrapper_checker_and_tasks_are_short():
    assert len(Path(skyrl.__file__).read_text().splitlines()) <= 60


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(ValueError, match=r"skyrl_gym.*: pip install skyrl-gym"):
        make()


def test_bad_settings():
    with pytest.raises(ValueError, match=r"split = dev: .*skyrl_sums.jsonl has no such row"):
        skyrl.SkyRLTasks(tasks="sums", split="dev")
    with pytest.raises(ValueError, match="max_turns = 0: must be at least 1"):
        skyrl.SkyRLGame(tasks="sums", max_turns=0, env_config={})
    with pytest.raises(FileNotFoundError, match="sum"):
        skyrl.SkyRLTasks(tasks="sum", split="train")
