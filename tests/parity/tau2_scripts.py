"""Fixed agent and user turns for tau2 runs, and the same run by the official Orchestrator.

A script is a list of turns; a turn is a text or a list of (tool name, arguments). Both sides play
theirs whatever they hear, so two implementations of the protocol can be compared turn by turn. The
user's turns matter where it has tools (telecom); elsewhere they are texts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Turn = str | list[tuple[str, dict[str, Any]]]

FILLER = "Is there anything else?"
DONE: Turn = [("done", {})]


@dataclass(frozen=True, kw_only=True)
class Script:
    """What both sides do in a run."""

    agent: Sequence[Turn]
    user: Sequence[Turn] = ()
    """Empty in solo mode."""
    solo: bool = False


def user_text(index: int, num_replies: int) -> str:
    """What the user says: the same few words, then a stop."""
    return f"Please go on ({index})." if index < num_replies - 1 else "Yes, thanks. ###STOP###"


def talk(num_replies: int) -> list[Turn]:
    """The turns of a user that only talks."""
    return [user_text(index, num_replies) for index in range(num_replies)]


def _gold(task: Any, *sides: str) -> list[tuple[str, dict[str, Any]]]:
    actions = (task.evaluation_criteria and task.evaluation_criteria.actions) or []
    return [(a.name, copy.deepcopy(a.arguments)) for a in actions if a.requestor in sides]


def gold_script(task: Any) -> list[Turn]:
    """The agent's gold actions, one call a turn, then all that is to be told."""
    told = (task.evaluation_criteria and task.evaluation_criteria.communicate_info) or ["all"]
    return [*([call] for call in _gold(task, "assistant")), "Done: " + " ; ".join(told)]


def gold(task: Any, *, solo: bool = False) -> Script:
    """Every gold action in its order, each by its own side; alone, the agent makes all of them."""
    if solo:
        calls = [[call] for call in _gold(task, "assistant", "user")]
        return Script(agent=[*calls, DONE], solo=True)
    agent: list[Turn] = []
    user: list[Turn] = ["Hello, I need help."]
    acts: list[Turn] = []
    for action in (task.evaluation_criteria and task.evaluation_criteria.actions) or []:
        turn: Turn = [(action.name, copy.deepcopy(action.arguments))]
        if action.requestor == "user":
            acts.append(turn)
            continue
        if acts:
            agent, user, acts = [*agent, "Please do that."], [*user, *acts, "I did."], []
        agent.append(turn)
    if acts:
        agent, user = [*agent, "Please do that."], [*user, *acts, "I did."]
    return Script(agent=[*agent, gold_script(task)[-1]], user=[*user, "Thanks. ###STOP###"])


def nothing(*, solo: bool = False) -> Script:
    """Gives up at once."""
    if solo:
        return Script(agent=[DONE], solo=True)
    return Script(agent=["I am sorry, I cannot help."], user=talk(2))


def transfer(*, solo: bool = False) -> Script:
    """Hands over to a human at once."""
    call: Turn = [("transfer_to_human_agents", {"summary": "-"})]
    if solo:
        return Script(agent=[call, DONE], solo=True)
    return Script(agent=[call, "You are being transferred."], user=talk(2))


def random_script(task: Any, tool_names: Sequence[str], seed: int, *, side: str) -> list[Turn]:
    """Right calls, calls with wrong names, arguments and sides, several calls a turn, texts.

    Args:
        task: a tau2 task.
        tool_names: tools of both sides.
        seed: of the draws.
        side: ``"assistant"``, ``"user"`` or ``"solo"``, a solo agent: no texts, for they end a run.
    """
    rng = random.Random(f"{task.id}/{seed}/{side}")
    pool = _gold(task, "assistant", "user")
    wrong = ({}, {"order_id": "#W0"}, {"user_id": "nobody", "title": "T"}, {"self": 1})

    def call() -> tuple[str, dict[str, Any]]:
        kind = rng.random()
        if pool and kind < 0.5:
            return copy.deepcopy(rng.choice(pool))
        if kind < 0.6:
            return "no_such_tool", {"x": 1}
        name = rng.choice(list(tool_names))
        if kind < 0.8:  # a gold call's arguments under another name, or none
            return name, copy.deepcopy(rng.choice(pool)[1]) if pool else {}
        return name, dict(rng.choice(wrong))

    turns: list[Turn] = []
    for _ in range(12):
        kind = rng.random()
        if kind < 0.3 and side != "solo":
            turns.append(rng.choice(["###STOP" if side == "user" else "###STOP###", "{}\n\u00e9"]))
        else:
            turns.append([call() for _ in range(1 if kind < 0.8 else rng.randint(2, 3))])
    return turns


def random_run(
    task: Any, names: Sequence[str], seed: int, *, user_acts: bool, solo: bool = False
) -> Script:
    """A random agent, beside a user that acts at random too or only talks."""
    if solo:
        turns = random_script(task, names, seed, side="solo")
        return Script(agent=[*turns, DONE if seed % 2 == 0 else "I give up."], solo=True)
    agent = random_script(task, names, seed, side="assistant")
    if not user_acts:
        return Script(agent=agent, user=talk(4))
    acts = random_script(task, names, seed, side="user")[:6]
    return Script(agent=agent, user=[*acts, *talk(2)])


class TextUser:
    """A user of ours with fixed texts."""

    def __init__(self, num_replies: int) -> None:
        self.num_replies = num_replies
        self.index = -1

    def reply(self, agent_text: str) -> str:
        assert isinstance(agent_text, str)
        assert agent_text
        self.index += 1
        return user_text(self.index, self.num_replies)


class ScriptUser:
    """A user of ours that plays its turns, calls included."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = list(turns)

    def act(self, heard: str | list[str]) -> Any:
        from components.envs.base import ToolCall

        assert heard
        turn = self.turns.pop(0) if self.turns else "Bye. ###STOP###"
        if isinstance(turn, str):
            return turn
        return [ToolCall(name=name, arguments=arguments) for name, arguments in turn]


def _official_players(script: Script) -> tuple[type, type]:
    from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage
    from tau2.user.user_simulator import DummyUser, UserSimulator

    try:
        from tau2.agent.base import LocalAgent as AgentBase
    except ImportError:  # upstream 1.0
        from tau2.agent.base_agent import HalfDuplexAgent as AgentBase  # type: ignore
    from tau2.agent.llm_agent import LLMSoloAgent
    from tau2.utils.llm_utils import generate  # noqa: F401  (fails early if tau2 is broken)

    def calls(turn: Any, requestor: str, prefix: str, first: int) -> list[Any]:
        return [
            ToolCall(id=f"{prefix}_{first + i}", name=name, arguments=args, requestor=requestor)
            for i, (name, args) in enumerate(copy.deepcopy(turn))
        ]

    class Agent(LLMSoloAgent if script.solo else AgentBase):  # type: ignore[misc]
        played = 0
        num_calls = 0

        def get_init_state(self, message_history=None):
            return []

        def set_seed(self, seed):
            pass

        def generate_next_message(self, message, state):
            turn = script.agent[self.played] if self.played < len(script.agent) else FILLER
            self.played += 1
            if isinstance(turn, str):
                return AssistantMessage(role="assistant", content=turn), state
            made = calls(turn, "assistant", "call", self.num_calls)
            self.num_calls += len(made)
            said = AssistantMessage(role="assistant", tool_calls=made)
            return (self._check_if_stop_toolcall(said) if script.solo else said), state

    class User(DummyUser if script.solo else UserSimulator):  # type: ignore[misc]
        played = 0
        num_calls = 0

        def get_init_state(self, message_history=None):
            return []

        def set_seed(self, seed):
            pass

        def generate_next_message(self, message, state):
            over = self.played >= len(script.user)
            turn = "Bye. ###STOP###" if over else script.user[self.played]
            self.played += 1
            if isinstance(turn, str):
                return UserMessage(role="user", content=turn), state
            made = calls(turn, "user", "user", self.num_calls)
            self.num_calls += len(made)
            return UserMessage(role="user", tool_calls=made), state

    return Agent, User


def pristine_classes() -> None:
    """Undo what earlier runs left on tau2's classes, as if its process had just started.

    The telecom phone's default VPN lives on its class and ``break_vpn`` changes it, so a stock run
    depends on which ran before it in the process. Ours do not.
    """
    from tau2.domains.telecom.user_data_model import PerformanceLevel
    from tau2.domains.telecom.user_tools import TelecomUserTools

    TelecomUserTools.default_vpn_details.server_performance = PerformanceLevel.EXCELLENT


def official_run(*, domain: str, task: Any, script: Script, max_steps: int) -> tuple[Any, Any]:
    """Play a script with tau2's own classes alone.

    Returns:
        (Orchestrator after ``run()``, its SimulationRun).
    """
    from tau2.orchestrator.orchestrator import Orchestrator
    from tau2.registry import registry

    pristine_classes()
    agent_class, user_class = _official_players(script)
    environment = registry.get_env_constructor(domain)(solo_mode=script.solo)
    settings: dict[str, Any] = {
        "tools": environment.get_tools(),
        "domain_policy": environment.policy,
    }
    if script.solo:
        settings |= {"task": task, "llm": None}
    orchestrator = Orchestrator(
        domain=domain,
        agent=agent_class(**settings),
        user=user_class() if script.solo else user_class(llm=None),
        environment=environment,
        task=task,
        max_steps=max_steps,
        max_errors=10,
        seed=3,
        solo_mode=script.solo,
    )
    return orchestrator, orchestrator.run()


def our_run(*, domain: str, task_id: str, script: Script, max_steps: int, checker: Any = None):
    """Play a script in our environment.

    Args:
        domain: tau2's name of the domain.
        task_id: of the task.
        script: what both sides do.
        max_steps: as the benchmark counts.
        checker: of the environment.

    Returns:
        (environment at the end of the episode, last answer of ``step``).
    """
    from components.envs.base import Message, ToolCall
    from components.envs.tau2 import Tau2Env

    user = "scripted" if script.solo else lambda task: ScriptUser(script.user)
    env = Tau2Env(domain=domain, user=user, max_steps=max_steps, solo=script.solo, checker=checker)
    env.reset(seed=3, options={"task_id": task_id})
    calls, played, end = 0, 0, None
    while end is None:
        turn = script.agent[played] if played < len(script.agent) else FILLER
        played += 1
        action: str | Message = turn if isinstance(turn, str) else ""
        if not isinstance(turn, str):
            made = []
            for name, arguments in turn:
                made.append(ToolCall(id=f"call_{calls}", name=name, arguments=arguments))
                calls += 1
            action = Message(role="assistant", tool_calls=tuple(made))
        answer = env.step(action)
        assert not answer[4]["refused"], (action, answer[4]["refused"])
        if answer[2] or answer[3]:
            end = answer
    return env, end
