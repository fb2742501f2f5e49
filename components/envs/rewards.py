"""Reward checkers: from an ended trajectory to a number, with all that it is made of beside it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from components.envs.base import Reward, Trajectory
from components.envs.tau2_data import domain_data, find_task
from components.envs.tau2_score import all_met, raised_in_assertion

STOPS = ("user_stop", "agent_stop")
"""Ends that the benchmark scores; any other is worth 0."""

PARTS = (
    *("official", "strict", "db", "communicate", "action", "env_assertion", "evaluation_error"),
    *("writes", "reads", "read_success"),
)
"""Names in the result of :func:`score`: the same for every checker of one trajectory."""

Call = tuple[str, Mapping[str, Any]]
"""A tool call: name and arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldActions:
    """The agent's gold actions of a task, sorted by what they do."""

    writes: tuple[Call, ...]
    """Calls that change the database. Gold writes that the tool itself refuses are left out."""
    reads: tuple[Call, ...]
    transfers: tuple[Call, ...]
    has_actions: bool
    """Whether there are gold actions at all, of whatever kind."""


@functools.lru_cache(maxsize=4096)
def gold_actions(domain: str, task_id: str, solo: bool = False) -> GoldActions:
    """Sort the gold actions of a task by running them in a fresh environment.

    In solo mode the agent makes the user's actions as well.
    """
    task = find_task(domain, task_id)
    data, types = domain_data(domain), _tool_types(domain, solo)
    criteria = task.evaluation_criteria
    actions = (criteria and criteria.actions) or []
    sorted_: dict[str, list[Call]] = {"write": [], "read": [], "transfer": []}
    environment = data.build()
    initial = task.initial_state
    environment.set_state(
        initialization_data=initial and initial.initialization_data,
        initialization_actions=initial and initial.initialization_actions,
        message_history=(initial and initial.message_history) or [],
    )
    for action in actions:
        call = (action.name, dict(action.arguments))
        if action.name.startswith("transfer"):
            sorted_["transfer"].append(call)
            continue
        try:
            environment.make_tool_call(
                tool_name=action.name, requestor=action.requestor, **action.arguments
            )
        except Exception:  # the official evaluator ignores gold actions that fail; so do we
            continue
        kind = types.get(action.name, "generic")
        if kind in sorted_ and (solo or action.requestor == "assistant"):
            sorted_[kind].append(call)
    return GoldActions(
        writes=tuple(sorted_["write"]),
        reads=tuple(sorted_["read"]),
        transfers=tuple(sorted_["transfer"]),
        has_actions=any(solo or action.requestor == "assistant" for action in actions),
    )


def _tool_types(domain: str, solo: bool) -> Mapping[str, str]:
    data = domain_data(domain)
    return {**data.tool_types, **(data.user_tool_types if solo else {})}


def score(trajectory: Trajectory) -> dict[str, float]:
    """Every component of a trajectory's reward.

    Returns:
        ``official``: the benchmark's reward. ``strict``: the same, but 0 where the task needs an
        action that was not taken: each gold write and gold transfer must be matched by a successful
        call of the same tool (its arguments are what the official reward checks), and a task whose
        gold actions are reads alone needs one successful call. ``db``, ``communicate``, ``action``,
        ``env_assertion``: the official components, whether or not the task's reward uses them, also
        for trajectories that ended early. ``writes``: gold writes made with the right arguments,
        over the larger of gold and made writes. ``reads``: share of the gold reads made. A part
        with nothing to do (no gold writes and none made, no gold reads) equals ``official``.
        ``read_success``: share of the agent's own reads that the tool answered without an error; 0
        without reads.
    """
    memory = _memory.get()
    if memory is None:
        return _score(trajectory)
    if id(trajectory) not in memory:
        memory[id(trajectory)] = _score(trajectory)
    return dict(memory[id(trajectory)])


_memory: ContextVar[dict[int, dict[str, float]] | None] = ContextVar("scores", default=None)


@contextlib.contextmanager
def scored_once() -> Iterator[None]:
    """Inside, :func:`score` evaluates a trajectory once, however many checkers ask for it."""
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)


def _score(trajectory: Trajectory) -> dict[str, float]:
    parts = _official(trajectory)
    official = parts["official"]
    domain = trajectory.task.domain
    gold = gold_actions(domain, trajectory.task.id, trajectory.solo)
    made = _successful_calls(trajectory)
    names = {name for name, _ in made}
    needed = {name for name, _ in (*gold.writes, *gold.transfers)}
    taken = needed <= names and (bool(made) or not gold.has_actions)
    parts["strict"] = official if taken else 0.0
    types = _tool_types(domain, trajectory.solo)
    writes_made = [call for call in made if types.get(call[0]) == "write"]
    num_writes = max(len(gold.writes), len(writes_made))
    parts["writes"] = (
        _num_matched(gold.writes, writes_made) / num_writes if num_writes else official
    )
    parts["reads"] = _num_matched(gold.reads, made) / len(gold.reads) if gold.reads else official
    reads = [ok for (name, _), ok in _calls(trajectory) if types.get(name) == "read"]
    parts["read_success"] = sum(reads) / len(reads) if reads else 0.0
    return parts


def _official(trajectory: Trajectory) -> dict[str, float]:
    ended = trajectory.termination_reason in STOPS
    if trajectory.outcome is not None:
        parts = dict(trajectory.outcome)
        return parts if ended else parts | {"official": 0.0}
    from tau2.data_model.simulation import TerminationReason
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation

    task = find_task(trajectory.task.domain, trajectory.task.id)
    # An early end scores 0 without components; they are computed as if the user had stopped there.
    simulation = trajectory.official.model_copy(
        update={} if ended else {"termination_reason": TerminationReason.USER_STOP}
    )
    try:
        info = evaluate_simulation(
            simulation=simulation,
            task=task,
            evaluation_type=EvaluationType.ALL,
            solo_mode=trajectory.solo,
            domain=domain_data(trajectory.task.domain).cached_name,
        )
    except Exception as error:
        if not raised_in_assertion(error):
            raise
        # The benchmark itself aborts here: an assertion met a database it does not expect.
        return {"official": 0.0, "evaluation_error": 1.0}
    parts = {"official": float(info.reward) if ended else 0.0}
    if info.db_check is not None:
        parts["db"] = float(info.db_check.db_reward)
    parts["communicate"] = all_met(c.met for c in info.communicate_checks or ())
    parts["action"] = all_met(c.action_match for c in info.action_checks or ())
    parts["env_assertion"] = all_met(c.met for c in info.env_assertions or ())
    return parts


def _successful_calls(trajectory: Trajectory) -> list[Call]:
    """The agent's calls that a tool answered without an error, the task's own history left out."""
    return [call for call, succeeded in _calls(trajectory) if succeeded]


def _calls(trajectory: Trajectory) -> list[tuple[Call, bool]]:
    """The agent's calls that were answered, and whether without an error."""
    messages = trajectory.official.messages
    task = find_task(trajectory.task.domain, trajectory.task.id)
    history = (task.initial_state and task.initial_state.message_history) or []
    calls: list[tuple[Call, bool]] = []
    pending: list[Any] = []
    for message in messages[len(history) :]:
        if message.role == "assistant":
            pending = list(message.tool_calls or ())
        elif message.role == "tool" and message.requestor == "assistant" and pending:
            call = pending.pop(0)
            calls.append(((call.name, call.arguments), not message.error))
    return calls


def _canonical(call: Call) -> tuple[str, Any]:
    """A call in a form where calls that do the same are equal."""
    name, arguments = call
    plain = {key: value for key, value in arguments.items() if value is not None}
    items, new_items = plain.get("item_ids"), plain.get("new_item_ids")
    if isinstance(items, list):  # retail: items in any order, each beside its replacement
        if isinstance(new_items, list) and len(new_items) == len(items):
            del plain["new_item_ids"]
            items = [[a, b] for a, b in zip(items, new_items, strict=True)]
        plain["item_ids"] = sorted(items, key=str)
    return name, plain


def _num_matched(gold: Sequence[Call], made: Sequence[Call]) -> int:
    """How many gold calls were made, each made call counted once."""
    left = [_canonical(call) for call in made]
    count = 0
    for call in map(_canonical, gold):
        if call in left:
            left.remove(call)
            count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class OfficialReward:
    """The benchmark's own reward: what is reported, and the default for training."""

    def __call__(self, trajectory: Trajectory) -> Reward:
        parts = score(trajectory)
        return Reward(value=parts["official"], breakdown=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictReward:
    """The official reward, but 0 where the task needs an action that was not taken."""

    def __call__(self, trajectory: Trajectory) -> Reward:
        parts = score(trajectory)
        return Reward(value=parts["strict"], breakdown=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCredit:
    """A graded reward in [0, 1], for tasks where the official one is nearly always 0.

    1 exactly where the official reward is 1 and every gold write was made and no other; otherwise
    the weighted sum of ``official``, ``writes``, ``reads`` and ``read_success`` (see
    :func:`score`). An episode that did not come to its end gets 0, whoever cut it short: the
    benchmark's limit on steps, or ours on turns and tokens. The weights are our choice, not the
    benchmark's: report the official reward beside it.
    """

    official: float = 0.6
    writes: float = 0.3
    reads: float = 0.05
    read_success: float = 0.05

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in self.__slots__}
        if min(weights.values()) < 0 or abs(sum(weights.values()) - 1.0) > 1e-9:
            raise ValueError(f"partial credit: weights must be >= 0 and add up to 1, got {weights}")
        if not (self.official > 0 and self.writes > 0):
            raise ValueError(f"partial credit: official and writes must be above 0, got {weights}")

    def __call__(self, trajectory: Trajectory) -> Reward:
        parts = score(trajectory)
        if trajectory.termination_reason not in STOPS:
            value = 0.0
        elif parts["official"] == 1.0 and parts["writes"] == 1.0:
            value = 1.0
        else:
            value = sum(getattr(self, name) * parts.get(name, 0.0) for name in self.__slots__)
        return Reward(value=value, breakdown={**parts, "partial": value})
