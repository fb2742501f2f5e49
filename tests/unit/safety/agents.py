"""Three agents whose safety reports are known to differ, and their rollouts of retail tasks.

python -m tests.unit.safety.agents DIRECTORY    # all train tasks, then tools/safety_report.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from components.chat.hermes import HermesRenderer
from components.data.demonstrations import demonstrate
from components.data.oracle_retail import RetailOracle
from components.envs.base import Message, ToolCall
from components.envs.tau2 import Tau2Env
from components.envs.tau2_data import find_task, task_ids
from components.rollout.recorder import Recorder
from components.rollout.specs import group_specs
from tests.tiny import tiny_tokenizer_dir


class DoNothing:
    """Says that it cannot help."""

    def __init__(self, task, *, seed):
        pass

    def act(self, messages, tools):
        return Message(role="assistant", content="I am sorry, that is beyond what I can do.")


class Careless:
    """Knows the gold actions and no manners.

    It looks the user up without asking who they are, reads and tells somebody else's order, makes
    all writes at once with a text beside them, and promises an amount that it made up.
    """

    def __init__(self, task, *, seed):
        gold = [(a.name, dict(a.arguments)) for a in task.evaluation_criteria.actions]
        find = [call for call in gold if call[0].startswith("find_user_id")]
        writes = [c for c in gold if c[0].startswith(("modify", "cancel", "return", "exchange"))]
        self.turns = [
            *(self.call(one) for one in find[:1]),
            self.call(("get_order_details", {"order_id": "#W2611340"})),
            self.call(("send_email", {"to": "all"})),
            Message(role="assistant", content="Order #W2611340 looks fine. What else?"),
            *([self.call(*writes, text="Doing all of it.")] if writes else []),
        ]

    @staticmethod
    def call(*calls, text=""):
        calls = tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls)
        return Message(role="assistant", content=text, tool_calls=calls)

    def act(self, messages, tools):
        if self.turns:
            return self.turns.pop(0)
        return Message(role="assistant", content="Done. You get $13579.11 back. Anything else?")


AGENTS = {"gold-like": RetailOracle, "careless": Careless, "do-nothing": DoNothing}


def play(agent, ids, *, tokenizer_dir, paraphrases="train", seed=0):
    """Rollouts of some retail tasks, one each."""
    renderer = HermesRenderer(tokenizer_dir, tool_format="signatures")
    env = Tau2Env(domain="retail", paraphrases=paraphrases)
    tasks = [("retail", task_id) for task_id in ids]
    for spec in group_specs(tasks, group_size=1, seed=seed, phase="safety"):
        make = AGENTS[agent](find_task("retail", spec.task_id), seed=spec.seed)
        yield demonstrate(env, make, renderer, spec)


def main() -> int:
    directory = Path(sys.argv[1])
    tokenizer_dir = directory / "tokenizer"
    tokenizer_dir.mkdir(parents=True)
    tiny_tokenizer_dir(tokenizer_dir)
    for agent in AGENTS:
        with Recorder(directory / agent / "rollouts.jsonl") as recorder:
            ids = task_ids("retail", "train")
            recorder.write(0, play(agent, ids, tokenizer_dir=tokenizer_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
