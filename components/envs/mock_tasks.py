"""Training tasks for tau2's mock domain, which ships nine tasks, all for evaluation.

A task is a function of (seed, index): two or three requests by one caller, made one at a time. The
scenario is structured as retail's are, its sentences simple enough for a scripted user to read. The
callers, titles and databases are none of the official tasks'.
"""

from __future__ import annotations

import random
import re
from typing import Any

from components.envs.users_mock import make_mock_user

__all__ = ["generated_ids", "generated_task", "is_generated_id", "make_mock_user"]


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
_ID = re.compile(r"generated-(\d+)-(\d+)")

# The requests of a task, in order. "new" is the task created last.
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


def generated_ids(seed: int, count: int) -> tuple[str, ...]:
    """Ids of the first ``count`` tasks of a seed."""
    return tuple(f"generated-{seed}-{index}" for index in range(count))


def is_generated_id(task_id: str) -> bool:
    """Whether an id names a generated task."""
    return _ID.fullmatch(task_id) is not None


def generated_task(task_id: str) -> Any:
    """The tau2 ``Task`` of a generated id, the same in every process.

    Raises:
        ValueError: for another kind of id.
    """
    match = _ID.fullmatch(task_id)
    if match is None:
        raise ValueError(f"task_id: {task_id!r} is not of the form generated-<seed>-<index>")
    from tau2.data_model.tasks import Task

    return Task.model_validate(_Draft(random.Random(f"mock/{match[1]}/{match[2]}")).task(task_id))


class _Draft:
    """One task in the making: the caller, the start database, requests and gold actions."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.titles = rng.sample([f"{v} {t}" for v in _VERBS for t in _THINGS], 8)
        # The official database has task_1 of user_1; ids go on from there.
        self.users: dict[str, dict[str, Any]] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        for first, last in zip(rng.sample(_FIRST, 2), rng.sample(_LAST, 2), strict=True):
            user_id = f"user_{len(self.users) + 2}"
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

    def _add_task(self, user_id: str) -> None:
        task_id = f"task_{len(self.tasks) + 2}"
        status = self.rng.choice(("pending", "completed"))
        title = self.titles.pop()
        self.tasks[task_id] = {"task_id": task_id, "title": title, "status": status}
        self.users[user_id]["tasks"].append(task_id)

    def _request(self, kind: str) -> None:
        if kind == "create":
            arguments = {"user_id": self.caller["user_id"], "title": self.titles.pop()}
            sentence = f"create a new task titled '{arguments['title']}'"
            if self.rng.random() < 0.5:
                arguments["description"] = self.rng.choice(_DESCRIPTIONS)
                sentence += f" with the description '{arguments['description']}'"
            if not self.knows_id and not self.looked_up:
                self._act("get_users", {})  # the only way from a name to an id
                self.looked_up = True
            self.num_tasks += 1
            self._act("create_task", arguments)
        elif kind == "update_new":
            sentence = "mark the new task as completed"
            self._act(
                "update_task_status",
                {"task_id": f"task_{self.num_tasks}", "status": "completed"},
            )
        elif kind == "update_old":
            task_id = self.old.pop()
            status = "pending" if self.tasks[task_id]["status"] == "completed" else "completed"
            sentence = f"mark {task_id} as {status}"
            self._act("update_task_status", {"task_id": task_id, "status": status})
        else:
            sentence = f"delete {self.old.pop()}"
            summary = f"{self.caller['name']} wants to {sentence}, which no tool can do."
            self._act("transfer_to_human_agents", {"summary": summary}, compare_args=[])
        self.sentences.append(f"{'Then you' if self.sentences else 'You'} want to {sentence}.")

    def _act(self, name: str, arguments: dict[str, Any], **fields: Any) -> None:
        action_id = f"{name}_{len(self.actions)}"
        self.actions.append(
            {"action_id": action_id, "name": name, "arguments": arguments, **fields}
        )

    def task(self, task_id: str) -> dict[str, Any]:
        for kind in self.rng.choice(_PLANS):
            self._request(kind)
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
