"""Several datasets as one, each drawn in the share that its weight says."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from torch.utils.data import Dataset

from components.data.curriculum import shuffled_draw
from components.envs.base import Task


class MixedDataset(Dataset):
    """Datasets of several domains, or several of one, mixed by weight.

    A config names them::

        dataset:
          _component_: components.data.mixed.MixedDataset
          weights: {retail: 3, mock: 1}
          datasets:
            retail: {_component_: components.data.dataset.AgenticEnvDataset, domain: retail, ...}
            mock: {_component_: components.data.dataset.AgenticEnvDataset, domain: mock, ...}

    The draws are stratified: with shares ``w`` (the weights over their sum), dataset ``i`` is drawn
    once in each interval ``[k / w_i, (k + 1) / w_i)`` of a time in which one draw is made per unit,
    at a place in it that the seed gives. So, whatever the seed, the first ``n`` draws of ``m``
    datasets hold ``n w_i`` of dataset ``i`` to within ``1 + w_i (m - 2)``; and where ``n w_i`` is
    whole for every dataset, each block of ``n`` draws is exact. The ``k``-th draw of a dataset is
    what its own order gives as the ``k``-th: a curriculum in it counts its own draws.
    """

    def __init__(self, *, datasets: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        """Join the datasets.

        Args:
            datasets: by name; each with ``tasks`` and, for another order than a shuffle anew each
                epoch, ``draw(number, seed=...)``. A task that several have is listed once.
            weights: by the same names, above 0; they need not add up to 1.

        Raises:
            ValueError: for names that differ, a weight that is not above 0, or no dataset.
        """
        _check(datasets, weights)
        exact = {name: Fraction(str(weights[name])) for name in datasets}
        total = sum(exact.values())
        self._datasets = dict(datasets)
        self._shares = {name: weight / total for name, weight in exact.items()}
        place_of: dict[tuple[str, str], int] = {}
        self.tasks: list[Task] = []
        self._places: dict[str, list[int]] = {}
        for name, dataset in self._datasets.items():
            for task in dataset.tasks:
                if (task.domain, task.id) not in place_of:
                    place_of[task.domain, task.id] = len(self.tasks)
                    self.tasks.append(task)
            self._places[name] = [place_of[task.domain, task.id] for task in dataset.tasks]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        return self.tasks[index]

    def draw(self, number: int, *, seed: int | str) -> int:
        """Index of the task that is drawn as the ``number``-th (from 0) of a run."""
        name, own_number = self.source(number, seed=seed)
        dataset = self._datasets[name]
        places = self._places[name]
        draw = getattr(dataset, "draw", None) or functools.partial(shuffled_draw, len(places))
        return places[draw(own_number, seed=f"{seed}/{name}")]

    def source(self, number: int, *, seed: int | str) -> tuple[str, int]:
        """Which dataset the ``number``-th draw comes from, and how many it gave before."""
        # m datasets, each less than one draw off its share: the moment is within m of ``number``.
        time = max(0, number - len(self._shares))
        before = sum(self._drawn(name, time, seed) for name in self._shares)
        while True:
            in_unit = sorted(
                (moment, name, own)
                for name in self._shares
                for moment, own in self._moments(name, time, seed)
            )
            if number < before + len(in_unit):
                _, name, own = in_unit[number - before]
                return name, own
            before += len(in_unit)
            time += 1

    def _moment(self, name: str, own: int, seed: int | str) -> Fraction:
        """When a dataset is drawn for the ``own``-th time."""
        within = Fraction(random.Random(f"{seed}/{name}/{own}").random())
        return (own + within) / self._shares[name]

    def _drawn(self, name: str, time: int, seed: int | str) -> int:
        """How often a dataset is drawn before a time."""
        sure = math.floor(self._shares[name] * time)
        return sure + (self._moment(name, sure, seed) < time)

    def _moments(self, name: str, time: int, seed: int | str) -> list[tuple[Fraction, int]]:
        """When a dataset is drawn in ``[time, time + 1)``."""
        own = range(self._drawn(name, time, seed), self._drawn(name, time + 1, seed))
        return [(self._moment(name, k, seed), k) for k in own]


def _check(datasets: Mapping[str, Any], weights: Mapping[str, float]) -> None:
    if not datasets:
        raise ValueError("datasets: a mix needs at least one")
    if set(datasets) != set(weights):
        raise ValueError(
            f"weights: names {sorted(weights)} must be those of datasets, {sorted(datasets)}"
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not (is_number and math.isfinite(weight) and weight > 0):
            raise ValueError(f"weights.{name}: {weight!r} must be a number above 0")
    for name, dataset in datasets.items():
        if not getattr(dataset, "tasks", None):
            raise ValueError(f"datasets.{name}: {dataset!r} has no tasks")
