"""Intervals and a test for means over tasks: tasks are what was drawn, trials repeat them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from math import hypot
from statistics import fmean

from components.safety.report import wilson

NUM_RESAMPLES = 2000
NUM_EXACT = 12
"""Differences other than 0 up to which all sign flips are enumerated."""
NUM_FLIPS = 20_000
MIN_OFF_MODE = 5
"""Tasks other than the most common value from which on a bootstrap stands alone.

The 5 is the smallest count for which a normal approximation is usually trusted: W. G. Cochran,
Biometrics 10 (1954) 417-451.
"""


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % percentile interval of the mean, seeded: the same values give the same interval.

    Args:
        values: one per task, at least two.

    Source: B. Efron, Ann. Stat. 7 (1979) 1-26.
    """
    generator = random.Random(0)
    number = len(values)
    means = sorted(fmean(generator.choices(values, k=number)) for _ in range(NUM_RESAMPLES))
    return means[int(0.025 * NUM_RESAMPLES)], means[int(0.975 * NUM_RESAMPLES) - 1]


def crossed_bootstrap(values: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95 % percentile interval of the mean of values that each have a seed and a task.

    Seeds and tasks are both resampled, apart from each other, so that neither the tasks of one
    seed nor the seeds of one task count as independent. With one seed this is :func:`bootstrap`.
    With few seeds such an interval is somewhat too narrow: three seeds say little of their spread.

    Args:
        values: [S][P] by seed and by task, the same tasks in each row; at least two tasks.

    Source: the pigeonhole bootstrap of A. B. Owen, Ann. Appl. Stat. 1 (2007) 386-411.
    """
    generator = random.Random(0)
    number = len(values[0])
    means = []
    for _ in range(NUM_RESAMPLES):
        seeds = values if len(values) == 1 else generator.choices(values, k=len(values))
        tasks = generator.choices(range(number), k=number)
        means.append(fmean(fmean(of_seed[task] for task in tasks) for of_seed in seeds))
    means.sort()
    return means[int(0.025 * NUM_RESAMPLES)], means[int(0.975 * NUM_RESAMPLES) - 1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of a mean over tasks.

    Wilson's where every value is 0 or 1: a bootstrap of nothing but failures would claim to be
    sure. The bootstrap over tasks otherwise, so that trials of one task do not count as
    independent; but where fewer than ``MIN_OFF_MODE`` tasks differ from the most common value, the
    resamples know next to nothing of what other tasks would do, and the interval is the smallest
    that holds both the bootstrap's and Wilson's of that mean over as many trials as tasks. The
    latter is wide enough whatever the values: in [0, 1] with mean p their variance is p (1 - p) at
    most (R. Bhatia, C. Davis, Am. Math. Mon. 107 (2000) 353-357).

    Args:
        values: one per task, each in [0, 1].
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(sum(values)), len(values))
    if len(values) == 1:
        return 0.0, 1.0
    found = bootstrap(values)
    if _num_off_mode(values) >= MIN_OFF_MODE:
        return found
    return _hull(found, wilson(sum(values), len(values)))


def difference_interval(differences: Sequence[Sequence[float]]) -> tuple[float, float]:
    """A 95 % interval of a mean of paired differences.

    :func:`crossed_bootstrap`; where fewer than ``MIN_OFF_MODE`` tasks differ from the most common
    difference, the smallest that holds it and an interval that has width without any spread: the
    means of what was gained and of what was lost are each in [0, 1], their Wilson intervals over
    as many trials as tasks are joined by square-and-add (R. G. Newcombe, Stat. Med. 17 (1998)
    873-890). Of 32 tasks that do not differ at all it gives -0.107 to 0.107.

    Args:
        differences: [S][P] by seed and by task, each in [-1, 1]; at least two tasks.
    """
    found = crossed_bootstrap(differences)
    of_tasks = [fmean(of_task) for of_task in zip(*differences, strict=True)]
    if _num_off_mode(of_tasks) >= MIN_OFF_MODE:
        return found
    number = len(of_tasks)
    gained, lost = (sum(max(0.0, sign * d) for d in of_tasks) for sign in (1, -1))
    (gain_low, gain_high), (loss_low, loss_high) = (wilson(x, number) for x in (gained, lost))
    gain, loss = gained / number, lost / number
    low = gain - loss - hypot(gain - gain_low, loss_high - loss)
    high = gain - loss + hypot(gain_high - gain, loss - loss_low)
    return _hull(found, (max(-1.0, low), min(1.0, high)))


def _num_off_mode(values: Sequence[float]) -> int:
    """How many values differ from the most common one; means of seeds are equal to rounding."""
    counts = Counter(round(value, 9) for value in values)
    return len(values) - max(counts.values())


def _hull(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return min(first[0], second[0]), max(first[1], second[1])


def sign_flip_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of paired differences having mean 0, whatever their distribution.

    Under the null hypothesis a task's two values could as well be swapped. Exact up to
    ``NUM_EXACT`` differences other than 0, else ``NUM_FLIPS`` seeded draws, with the observed one
    counted, so that p is never 0. Five tasks that all got better give 2 / 32.

    Source: R. A. Fisher, The Design of Experiments (1935), section 21.
    """
    moved = [difference for difference in differences if difference != 0]
    observed = abs(sum(moved)) - 1e-12
    if len(moved) <= NUM_EXACT:
        flips = itertools.product((1, -1), repeat=len(moved))
        extreme = [abs(_flipped(moved, signs)) >= observed for signs in flips]
        return fmean(extreme)
    generator = random.Random(0)
    count = sum(
        abs(_flipped(moved, generator.choices((1, -1), k=len(moved)))) >= observed
        for _ in range(NUM_FLIPS)
    )
    return (count + 1) / (NUM_FLIPS + 1)


def _flipped(values: Sequence[float], signs: Sequence[int]) -> float:
    return sum(value * sign for value, sign in zip(values, signs, strict=True))
