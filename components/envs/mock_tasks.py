"""Training tasks for tau2's mock domain, which ships nine tasks, all for evaluation.

A task is a function of (kind, seed, index): two or three requests by one caller, made one at a
time. The scenario is structured as retail's are, its sentences simple enough for a scripted user to
read. The callers, titles and databases are none of the official tasks'.

Kinds: ``generated`` has requests that say all but who makes them. ``dialogue`` adds facts that the
user says only when asked, requests that the policy forbids, callers whom nobody knows, and wishes
to talk to a human; ids are scattered there, so that none is right by luck. ``dialogue_held_out`` is
the same for evaluation: it shares no name, title or description with ``dialogue``, and the domain's
train split never has it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from components.envs.users_mock import make_mock_user

__all__ = ["KINDS", "generated_ids", "generated_task", "kind_of", "make_mock_user"]


def _words(text: str) -> list[str]:
    return text.split("|")


_FIRST = _words(
    "Ana|Ben|Chloe|Daniel|Elena|Farid|Grace|Hugo|Iris|Jonas|Keiko|Lamar|Mei|Nils|Olga|Pablo|Quinn|"
    "Rosa|Samir|Tara|Umar|Vera|Wen|Yara|Zoe"
)
_LAST = _words(
    "Adler|Brandt|Costa|Diaz|Ekman|Fischer|Garcia|Haddad|Ito|Jensen|Khan|Lopez|Moreau|Novak|Okafor|"
    "Patel|Quist|Rossi|Silva|Tanaka|Ueda|Vargas|Weber|Young|Zhang"
)
_VERBS = _words(
    "Check|Clean|Collect|Compare|Draft|Fix|Order|Paint|Plan|Print|Review|Sort|Test|Update"
)
_THINGS = _words(
    "the backup|the budget|the car keys|the contract|the garden fence|the guest list|the invoices|"
    "the kitchen shelf|the library books|the meeting notes|the newsletter|the office plants|"
    "the old photos|the parking permits|the printer|the quarterly report|the spare tyres|"
    "the supplier list|the travel plan|the website text"
)
_DESCRIPTIONS = _words(
    "Before Friday|Before the end of the month|Takes one hour|Ask Maria first|Use the blue folder|"
    "Twice a week|Only the first floor|Needs two people|Bring the checklist|In the morning"
)
# The requests of a task, in order. "new" is the task created last; an "_asked" request leaves out a
# fact until the agent asks for it.
_PLANS = (
    ("create", "update_new"),
    ("create", "update_new"),
    ("update_old", "create"),
    ("create", "create"),
    ("update_old", "update_old"),
    ("create", "update_new", "update_old"),
    ("create", "create", "update_new"),
    ("create", "delete"),
    ("update_old", "create", "delete"),
)
# Whoever hands over at once gets nothing: a transfer is never the first thing to do. A request that
# is to be refused is never the last: refusing shows in what is done afterwards.
_DIALOGUES = (
    ("create_asked", "update_new"),
    ("create", "update_new"),
    ("create_described", "update_asked"),
    ("create_asked", "create"),
    ("create", "update_new", "update_old"),
    ("update_asked", "update_old"),
    ("update_forbidden", "create"),
    ("create_asked", "update_forbidden", "update_new"),
    ("create_unknown", "update_old"),
    ("create", "delete"),
    ("update_old", "human"),
    ("update_asked", "delete"),
)
_FORBIDDEN = ("archived", "blocked", "cancelled", "urgent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A sort of generated tasks."""

    plans: tuple[tuple[str, ...], ...]
    words: slice
    """Which names, verbs, things and descriptions it draws from."""
    held_out: bool
    """For evaluation: its tasks are of the test split."""
    num_users: int = 2
    """In the database, beside the official one."""
    scattered: bool = False
    """Ids are drawn from 20 to 99; else they go on from the official database's."""


_DIALOGUE = Kind(
    plans=_DIALOGUES, words=slice(0, None, 2), held_out=False, num_users=3, scattered=True
)
KINDS: Mapping[str, Kind] = {
    "generated": Kind(plans=_PLANS, words=slice(None), held_out=False),
    "dialogue": _DIALOGUE,
    "dialogue_held_out": replace(_DIALOGUE, words=slice(1, None, 2), held_out=True),
}
_ID = re.compile(rf"({'|'.join(KINDS)})-(\d+)-(\d+)")


def generated_ids(seed: int, count: int, *, kind: str = "generated") -> tuple[str, ...]:
    """Ids of the first ``count`` tasks of a seed."""
    return tuple(f"{kind}-{seed}-{index}" for index in range(count))


def kind_of(task_id: str) -> Kind | None:
    """The kind of a generated task; None for another id."""
    match = _ID.fullmatch(task_id)
    return KINDS[match[1]] if match else None


def generated_task(task_id: str) -> Any:
    """The tau2 ``Task`` of a generated id, the same in every process.

    Raises:
        ValueError: for another kind of id.
    """
    match = _ID.fullmatch(task_id)
    if match is None:
        raise ValueError(
            f"task_id: {task_id!r} is not of the form <kind>-<seed>-<index>, e.g. generated-7-0 "
            f"(kinds: {', '.join(KINDS)})"
        )
    from tau2.data_model.tasks import Task

    name = "mock" if match[1] == "generated" else match[1]
    draft = _Draft(random.Random(f"{name}/{match[2]}/{match[3]}"), KINDS[match[1]])
    return Task.model_validate(draft.task(task_id))


class _Draft:
    """One task in the making: the caller, the start database, requests and gold actions."""

    def __init__(self, rng: random.Random, kind: Kind) -> None:
        self.rng, self.kind = rng, kind
        verbs, things = _VERBS[kind.words], _THINGS[kind.words]
        self.descriptions = _DESCRIPTIONS[kind.words]
        self.titles = rng.sample([f"{v} {t}" for v in verbs for t in things], 4 * kind.num_users)
        user_numbers, self.task_numbers = self._numbers(), self._numbers()
        self.users: dict[str, dict[str, Any]] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        firsts, lasts = _FIRST[kind.words], _LAST[kind.words]
        names = zip(
            rng.sample(firsts, kind.num_users), rng.sample(lasts, kind.num_users), strict=True
        )
        for first, last in names:
            user_id = f"user_{next(user_numbers)}"
            self.users[user_id] = {"user_id": user_id, "name": f"{first} {last}", "tasks": []}
            for _ in range(rng.randint(2, 3)):
                self._add_task(user_id)
        self.caller = rng.choice(list(self.users.values()))
        self.old = list(self.caller["tasks"])
        rng.shuffle(self.old)
        self.num_tasks = len(self.tasks) + 1
        self.knows_id = rng.random() < 0.5
        self.looked_up = False
        self.sentences: list[str] = []
        self.actions: list[dict[str, Any]] = []

    def _numbers(self) -> Iterator[int]:
        """What ids are numbered with.

        The official database has task_1 of user_1. The tool numbers a new task by how many there
        are with it, always fewer than 20.
        """
        return iter(self.rng.sample(range(20, 100), 12)) if self.kind.scattered else count(2)

    def _add_task(self, user_id: str) -> None:
        task_id = f"task_{next(self.task_numbers)}"
        status = self.rng.choice(("pending", "completed"))
        title = self.titles.pop()
        self.tasks[task_id] = {"task_id": task_id, "title": title, "status": status}
        self.users[user_id]["tasks"].append(task_id)

    def _request(self, request: str) -> None:
        if request.startswith("create"):
            sentence = self._create(request)
        elif request == "update_new":
            sentence = "mark the new task as completed"
            self._update(f"task_{self.num_tasks}", "completed")
        elif request == "update_forbidden":
            sentence = f"mark {self.old.pop()} as {self.rng.choice(_FORBIDDEN)}"
        elif request.startswith("update"):
            task_id = self.old.pop()
            status = "pending" if self.tasks[task_id]["status"] == "completed" else "completed"
            sentence = f"mark {task_id} as {status}"
            if request == "update_asked":
                sentence = (
                    f"change the status of a task; say that {task_id} is to be {status} when asked"
                )
            self._update(task_id, status)
        elif request == "human":
            sentence = "talk to a human agent"
            self._transfer(f"{self.caller['name']} wants to {sentence}.")
        else:
            sentence = f"delete {self.old.pop()}"
            self._transfer(f"{self.caller['name']} wants to {sentence}, which no tool can do.")
        self.sentences.append(f"{'Then you' if self.sentences else 'You'} want to {sentence}.")

    def _create(self, request: str) -> str:
        arguments = {"user_id": self.caller["user_id"], "title": self.titles.pop()}
        sentence = f"create a new task titled '{arguments['title']}'"
        if request == "create_asked":
            sentence = f"create a new task; say that its title is '{arguments['title']}' when asked"
        elif request == "create_described":
            arguments["description"] = self.rng.choice(self.descriptions)
            sentence += f"; say that its description is '{arguments['description']}' when asked"
        elif self.rng.random() < 0.5:
            arguments["description"] = self.rng.choice(self.descriptions)
            sentence += f" with the description '{arguments['description']}'"
        if not self.knows_id and not self.looked_up:
            self._act("get_users", {})  # the only way from a name to an id
            self.looked_up = True
        if request != "create_unknown":  # there, looking up is all that the policy allows
            self.num_tasks += 1
            self._act("create_task", arguments)
        return sentence

    def _update(self, task_id: str, status: str) -> None:
        self._act("update_task_status", {"task_id": task_id, "status": status})

    def _transfer(self, summary: str) -> None:
        self._act("transfer_to_human_agents", {"summary": summary}, compare_args=[])

    def _act(self, name: str, arguments: dict[str, Any], **fields: Any) -> None:
        action_id = f"{name}_{len(self.actions)}"
        self.actions.append(
            {"action_id": action_id, "name": name, "arguments": arguments, **fields}
        )

    def _forget_caller(self) -> None:
        """Make the caller somebody whom the database does not have."""
        taken = {name for user in self.users.values() for name in user["name"].split()}
        first, last = (
            self.rng.choice([name for name in names[self.kind.words] if name not in taken])
            for names in (_FIRST, _LAST)
        )
        self.caller = {"user_id": "", "name": f"{first} {last}"}
        self.knows_id = False

    def task(self, task_id: str) -> dict[str, Any]:
        plan = self.rng.choice(self.kind.plans)
        if "create_unknown" in plan:
            self._forget_caller()
        for request in plan:
            self._request(request)
        known = f"Your name is {self.caller['name']}."
        if self.knows_id:
            known += f" Your user id is {self.caller['user_id']}."
        instructions: dict[str, Any] = {
            "domain": "mock",
            "reason_for_call": " ".join(self.sentences),
            "known_info": known,
            "task_instructions": "Make one request at a time; go on when it is done.",
        }
        if not self.knows_id:
            instructions["unknown_info"] = "You do not remember your user id."
        return {
            "id": task_id,
            "user_scenario": {"instructions": instructions},
            "initial_state": {
                "initialization_data": {"agent_data": {"tasks": self.tasks, "users": self.users}}
            },
            "evaluation_criteria": {
                "actions": self.actions,
                # Only the action check sees that a deletion is handed over and a user looked up.
                "reward_basis": ["DB", "ACTION"],
            },
        }
