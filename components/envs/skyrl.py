"""Text environments of skyrl-gym (https://github.com/NovaSky-AI/SkyRL, MIT) for ``TextEnv``."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from components.envs.base import Message, Reward, Task, Trajectory


class SkyRLTasks(list):
    """Rows of SkyRL data in a JSON Lines file (``sums``: the one beside this module) as tasks."""

    def __init__(self, *, tasks: str, split: str) -> None:
        try:
            from skyrl_gym import make
        except ImportError as error:
            raise ValueError(f"{error}: pip install skyrl-gym") from error
        path = Path(__file__).with_name("skyrl_sums.jsonl") if tasks == "sums" else Path(tasks)
        rows = enumerate(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
        self.rows = {str(i): r for i, r in rows if split in ("all", r["extra_info"]["split"])}
        if not self.rows:
            raise ValueError(f"split = {split}: {path} has no such row")
        super().__init__(Task(id=i, domain="skyrl", split=split) for i in self.rows)
        self.tasks, self.make = self, make


class SkyRLGame:
    """Plays a row in the environment of the package that its ``env_class`` names."""

    def __init__(self, *, tasks: str, max_turns: int, env_config: dict) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns = {max_turns}: must be at least 1")
        self.data, self.extras = SkyRLTasks(tasks=tasks, split="all"), {"max_turns": max_turns}
        self.tasks = {task.id: task for task in self.data}
        self.config = SimpleNamespace(**env_config)

    def start(self, task_id: str) -> list[Message]:
        row = self.data.rows[task_id]
        extras = row | self.extras
        self.env = self.data.make(row["env_class"], env_config=self.config, extras=extras)
        return [Message(**turn) for turn in self.env.init(row["prompt"])[0]]

    def say(self, text: str) -> tuple[list[Message], float, bool]:
        out: Any = self.env.step(text)
        return [Message(**turn) for turn in out["observations"]], out["reward"], out["done"]

    def close(self) -> None:
        self.env.close()


class TurnRewards:
    """The package's rewards of all turns, added up; ``strict`` is 1 if the last turn's is 1."""

    def __call__(self, trajectory: Trajectory) -> Reward:
        total, last = sum(trajectory.official), trajectory.official[-1]
        return Reward(value=total, breakdown={"official": total, "strict": float(last == 1)})
