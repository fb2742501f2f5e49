"""Tasks as a dataset, drawn in an order that a resumed run repeats."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from components.envs.base import Task


class AgenticEnvDataset(Dataset):
    """The tasks of one domain and split, as a map-style dataset of :class:`Task`."""

    def __init__(
        self,
        *,
        domain: str,
        split: str,
        tasks: str = "official",
        include: str | Sequence[str | int] | None = None,
        exclude: str | Sequence[str | int] = (),
    ) -> None:
        """List the tasks.

        Args:
            domain: benchmark domain, e.g. ``"retail"``.
            split: ``"train"``, ``"test"`` or ``"all"``.
            tasks: where they come from, as ``Tau2Env(tasks=...)`` takes it.
            include: keep only these, in this order: ids, or names of lists in
                :mod:`components.envs.task_lists` (``do_nothing``, ``transfer_at_once``,
                ``order_sensitive``, ``wrong_gold``), or one such name alone.
            exclude: leave these out, named in the same way.

        Raises:
            ValueError: for an id that the split does not have, an unknown list, or when no task is
                left.
        """
        from components.envs.task_lists import resolve
        from components.envs.tau2 import task_ids

        of_split = task_ids(domain, split, tasks=tasks)
        where = f"{domain}/{split}"
        dropped = resolve(exclude, setting="exclude", where=where, ids=of_split)
        ids = of_split
        if include is not None:
            ids = resolve(include, setting="include", where=where, ids=of_split)
        self.tasks = [Task(id=i, domain=domain, split=split) for i in ids if i not in dropped]
        if not self.tasks:
            raise ValueError(f"dataset: no task of {domain}/{split} is left after include/exclude")

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]


class SeededSampler(Sampler[int]):
    """An endless shuffle that is a function of (seed, epoch, index) alone.

    The state is those three numbers, so it resumes mid-epoch and with another number of ranks:
    every rank walks the same order and takes its own share of each step's tasks.
    """

    def __init__(self, num_items: int, *, seed: int) -> None:
        self._num_items = num_items
        self._seed = seed
        self._epoch = 0
        self._index = 0

    def _order(self) -> list[int]:
        order = list(range(self._num_items))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def __iter__(self) -> Iterator[int]:
        while True:
            order = self._order()
            while self._index < self._num_items:
                self._index += 1
                yield order[self._index - 1]
            self._epoch += 1
            self._index = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the walk is."""
        return {"seed": self._seed, "epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._seed, self._epoch, self._index = state["seed"], state["epoch"], state["index"]


def task_loader(dataset: AgenticEnvDataset, *, tasks_per_step: int, seed: int):
    """A ``StatefulDataLoader`` that yields lists of ``tasks_per_step`` tasks for ever.

    Raises:
        ValueError: if ``tasks_per_step`` is below 1.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    if tasks_per_step < 1:
        raise ValueError(f"tasks_per_step: {tasks_per_step} is below 1")
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which newer torch releases deprecate.
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        # num_workers=0: StatefulDataLoader refuses to resume with another number of workers.
        return StatefulDataLoader(
            dataset,
            batch_size=tasks_per_step,
            sampler=SeededSampler(len(dataset), seed=seed),
            num_workers=0,
            collate_fn=list,
            # Its iterators draw a seed that nothing here uses, one more in a resumed run: not from
            # the global generator.
            generator=torch.Generator(),
        )
