"""Tasks as a dataset, drawn in an order that a resumed run repeats."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from components.data.curriculum import Stage, parse_stages, shuffled_draw, staged_draw
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
        curriculum: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """List the tasks.

        Args:
            domain: benchmark domain, e.g. ``"retail"``.
            split: ``"train"``, ``"test"`` or ``"all"``.
            tasks: where they come from, as ``Tau2Env(tasks=...)`` takes it.
            include: keep only these, in this order: ids, or names of lists in
                :mod:`components.envs.task_lists` (``do_nothing``, ``transfer_at_once``,
                ``order_sensitive``, ``agent_conditional``, ``wrong_gold``), or one such name alone.
            exclude: leave these out, named in the same way.
            curriculum: stages that follow each other, each with ``include`` and ``exclude`` of its
                own among these tasks and ``draws``, how many tasks are drawn in it; the last stage
                has no ``draws`` and goes on for ever. Tasks of no stage are left out.

        Raises:
            ValueError: for an id that the split does not have, an unknown list, a stage that is not
                one, or when no task is left.
        """
        from components.envs.task_lists import resolve
        from components.envs.tau2 import task_ids

        of_split = task_ids(domain, split, tasks=tasks)
        where = f"{domain}/{split}"
        dropped = resolve(exclude, setting="exclude", where=where, ids=of_split)
        ids = of_split
        if include is not None:
            ids = resolve(include, setting="include", where=where, ids=of_split)
        ids = [task_id for task_id in ids if task_id not in dropped]
        if not ids:
            raise ValueError(f"dataset: no task of {domain}/{split} is left after include/exclude")
        stages = (Stage(task_ids=tuple(ids), draws=None),)
        if curriculum is not None:
            stages = parse_stages(curriculum, ids, where=where)
            drawn = {task_id for stage in stages for task_id in stage.task_ids}
            ids = [task_id for task_id in ids if task_id in drawn]
        self._stages = stages
        self._places = {task_id: place for place, task_id in enumerate(ids)}
        self.tasks = [Task(id=task_id, domain=domain, split=split) for task_id in ids]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]

    def draw(self, number: int, *, seed: int | str) -> int:
        """Index of the task that is drawn as the ``number``-th (from 0) of a run."""
        return self._places[staged_draw(self._stages, number, seed=seed)]


class SeededSampler(Sampler[int]):
    """Endless draws, each a function of (seed, epoch, index) alone.

    The state is those three numbers; the index counts the draws of all ranks within an epoch of
    ``num_items``. So it resumes mid-epoch and with another number of ranks: every rank walks the
    same order and takes its own share of each step's tasks.
    """

    def __init__(
        self, num_items: int, *, seed: int, draw: Callable[..., int] | None = None
    ) -> None:
        """Start before the first draw.

        Args:
            num_items: length of the dataset, and of an epoch.
            seed: of the order.
            draw: ``draw(number, seed=...)`` gives the item drawn as the ``number``-th; by default
                each epoch is a shuffle of all items.
        """
        self._num_items = num_items
        self._draw = draw or functools.partial(shuffled_draw, num_items)
        self._seed = seed
        self._epoch = 0
        self._index = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            if self._index >= self._num_items:
                self._epoch, self._index = self._epoch + 1, 0
            number = self._epoch * self._num_items + self._index
            self._index += 1
            yield self._draw(number, seed=self._seed)

    def state_dict(self) -> dict[str, Any]:
        """Where the walk is."""
        return {"seed": self._seed, "epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._seed, self._epoch, self._index = state["seed"], state["epoch"], state["index"]


def task_loader(dataset: Any, *, tasks_per_step: int, seed: int):
    """A ``StatefulDataLoader`` that yields lists of ``tasks_per_step`` tasks for ever.

    Args:
        dataset: a map-style dataset of tasks. Its ``draw(number, seed=...)`` gives the order; one
            without that method is shuffled anew each epoch.
        tasks_per_step: over all ranks.
        seed: of the order.

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
            sampler=SeededSampler(len(dataset), seed=seed, draw=getattr(dataset, "draw", None)),
            num_workers=0,
            collate_fn=list,
            # Its iterators draw a seed that nothing here uses, one more in a resumed run: not from
            # the global generator.
            generator=torch.Generator(),
        )
