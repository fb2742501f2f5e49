"""The GRPO recipe as it is, on an environment of another package, by its config alone."""

import pytest
import skyrl_gym

from components.envs.skyrl import SkyRLTasks
from components.models.paths import model_dir
from tests.recipes.runs import arguments, played, rows

pytestmark = pytest.mark.model

CPU = {"device": "cpu", "num_steps": 2, "tasks_per_step": 2, "eval.before": "false"}
TINY = CPU | {
    "dtype": "fp32",
    # A random model writes no number in the right form: other rewards send it through training.
    "checker": "tests.recipes.checkers.TextHash",
    "rollout.group_size": 6,
    "rollout.max_turn_tokens": 24,
    "rollout.num_workers": 4,
}


def replayed(record):
    """The package's replies and rewards for the turns of a rollout, and the replies recorded."""
    row = SkyRLTasks(tasks="sums", split="all").rows[record["spec"]["task_id"]]
    game = skyrl_gym.make(row["env_class"], extras=row | {"max_turns": 3})
    delivered = [message for message in record["messages"] if not message.get("refused")]
    _, *asked = game.init(row["prompt"])[0]
    said = delivered[len(asked) :]
    assert delivered[: len(asked)] == asked
    replies, rewards, out = [], [], {}
    for message in said:
        if message["role"] == "assistant":
            out = game.step(message["content"])
            replies += out["observations"]
            rewards.append(out["reward"])
    told = [message for message in said if message["role"] == "user"]
    return replies, rewards, told, out["done"]


def test_it_trains_and_evaluates(tune, tmp_path):
    output_dir = tmp_path / "run"
    keys = {**TINY, "model_dir": tune.model_dir, "output_dir": output_dir}
    tune.run(*arguments(config="configs/skyrl.yaml", **keys))
    steps = [row for row in rows(output_dir) if "time/step_s" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["pack/trained_tokens"] > 0 for row in steps)
    assert all(row["rollout/error_frac"] == 0 for row in steps)
    (held_out,) = [row for row in rows(output_dir) if "eval/official_mean" in row]
    assert held_out["step"] == 2
    assert (output_dir / "step_2" / "model.safetensors").exists()
    whole = [record for record in played(output_dir) if record["status"] == "completed"]
    assert len(whole) > 5
    for record in whole:
        replies, rewards, told, done = replayed(record)
        assert told == replies
        assert done
        assert len(rewards) <= 3


@pytest.mark.slow
def test_a_real_model_gets_the_rewards_of_the_package(tune, tmp_path):
    output_dir = tmp_path / "run"
    cpu = {k: v for k, v in CPU.items() if k != "eval.before"}
    keys = {
        **cpu,
        "num_steps": 1,
        "model_dir": model_dir("smollm2-135m-instruct"),
        "output_dir": output_dir,
    }
    tune.run(*arguments(config="configs/skyrl.yaml", eval="null", **keys))
    steps = [row for row in rows(output_dir) if "time/step_s" in row]
    assert [row["pack/trained_tokens"] > 0 for row in steps] == [True]
    scored = [record for record in played(output_dir) if record["status"] == "completed"]
    for record in scored:
        _, rewards, _, done = replayed(record)
        assert done
        assert record["reward"] == sum(rewards)
    assert len({record["reward"] for record in scored}) > 2
