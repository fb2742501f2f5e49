"""Text environments of skyrl-gym (https://github.com/NovaSky-AI/SkyRL, MIT) for ``TextEnv``."""

import json
from pathlib import Path
from types import SimpleNamespace

from components.envs.base import Message, Reward, RewardChecker, Task, Trajectory
from components.envs.text import TextEnv


class SkyRLTasks(list):
    """Rows of SkyRL data in a JSON Lines file (``sums``: the one beside this module) as tasks."""

    def __init__(self, *, tasks: str, split: str) -> None:
        path = Path(__file__).with_name("skyrl_sums.jsonl") if tasks == "sums" else Path(tasks)
        rows = enumerate(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
        self.rows = {str(i): r for i, r in rows if split in ("all", r["extra_info"]["split"])}
        if not self.rows:
            raise ValueError(f"split = {split}: {path} has no such row")
        super().__init__(Task(id=i, domain="skyrl", split=split) for i in self.rows)
        self.tasks = self


class SkyRLGame:
    """Plays a row in the environment of the package that its ``env_class`` names."""

    def __init__(self, tasks: SkyRLTasks, *, env_config: dict, max_turns: int) -> None:
        try:
            from skyrl_gym import make
        except ImportError as error:
            raise ValueError(f"{error}: pip install skyrl-gym") from error
        self.make, self.rows, self.extras = make, tasks.rows, {"max_turns": max_turns}
        self.config, self.tasks = SimpleNamespace(**env_config), {task.id: task for task in tasks}

    def start(self, task_id: str) -> list[Message]:
        row = self.rows[task_id]
        self.env = self.make(row["env_class"], env_config=self.config, extras=row | self.extras)
        return [Message(**turn) for turn in self.env.init(row["prompt"])[0]]

    def say(self, text: str) -> tuple[list[Message], float, bool]:
        out = self.env.step(text)
        return [Message(**turn) for turn in out["observations"]], out["reward"], out["done"]

    def close(self) -> None:
        self.env.close()


class TurnRewards:
    """The package's rewards of all turns, added up; ``strict`` is 1 if the last turn's is 1."""

    def __call__(self, trajectory: Trajectory) -> Reward:
        total, last = sum(trajectory.official), trajectory.official[-1]
        return Reward(value=total, breakdown={"official": total, "strict": float(last == 1)})


def skyrl_env(*, checker: RewardChecker, tasks: str, max_turns: int, env_config: dict) -> TextEnv:
    """All rows of ``tasks``, in environments that get ``max_turns`` and ``env_config``."""
    rows = SkyRLTasks(tasks=tasks, split="all")
    return TextEnv(SkyRLGame(rows, env_config=env_config, max_turns=max_turns), checker=checker)
