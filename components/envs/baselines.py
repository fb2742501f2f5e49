"""What agents get that do not try: printed beside every result."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from components.envs import DOMAINS
from components.envs.base import Message, Reward, ToolCall
from components.envs.tau2 import Tau2Env

AGENTS = ("do_nothing", "transfer")
"""Says that it cannot help; hands over to a human at once."""


class _LeavingUser:
    """Asks for help, hears one answer and leaves."""

    def __init__(self, task: Any) -> None:
        self.num_replies = 0

    def reply(self, agent_text: str) -> str:
        self.num_replies += 1
        return "Hello, I need your help." if self.num_replies == 1 else "###STOP###"


def baseline(domain: str, task_id: str, agent: str = "do_nothing") -> Reward:
    """What an agent gets that does not try: print it beside every result.

    Args:
        domain: e.g. ``"retail"``.
        task_id: e.g. ``"42"``.
        agent: ``"do_nothing"`` says it cannot help; ``"transfer"`` hands over to a human at once.

    Returns:
        The official reward, the strict one in its breakdown.

    Raises:
        ValueError: for another agent, domain or task.
    """
    if agent not in AGENTS:
        raise ValueError(f"agent: {agent!r} is neither 'do_nothing' nor 'transfer'")
    env = Tau2Env(domain=domain, user=_LeavingUser)
    env.reset(options={"task_id": task_id})
    if agent == "transfer":
        call = ToolCall(id="call_0", name="transfer_to_human_agents", arguments={"summary": "-"})
        env.step(Message(role="assistant", tool_calls=(call,)))
    done, info = False, {}
    while not done:
        _, _, terminated, truncated, info = env.step("I am sorry, that is beyond what I can do.")
        done = terminated or truncated
    env.close()
    return info["reward"]


@functools.lru_cache(maxsize=4096)
def baselines(domain: str, task_id: str) -> Mapping[str, Mapping[str, float]]:
    """The reward breakdown of each agent that does not try, played once per process.

    Empty for a domain that is not of tau2-bench.
    """
    if domain not in DOMAINS:
        return {}
    return {agent: baseline(domain, task_id, agent).breakdown for agent in AGENTS}
