"""Descent among partitions: move boundaries while a step gets faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Boundaries = tuple[int, ...]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Evaluate = Callable[[IntArray], FloatArray]
"""From partitions, shape (partitions, stages + 1), to their seconds."""

_AT_A_TIME = 16
"""Neighbours evaluated together, before the best of them is looked at."""


def descend(
    starts: Iterable[Boundaries],
    known: Mapping[Boundaries, float],
    evaluate: Evaluate,
    bound: Evaluate,
    *,
    reach: int = 3,
) -> dict[Boundaries, float]:
    """Improve each start by better and better neighbours until none is better.

    Neighbours move one boundary by up to ``reach`` layers, or several boundaries in a row by one layer in the same
    direction. They are tried in the order of their bounds, a few at a time, and the best of the first few that hold a
    better one is taken. No partition is evaluated twice, and none whose bound is not better than what its descent has.

    Args:
        starts: Partitions to improve.
        known: Seconds of partitions that were evaluated before, the starts among them.
        evaluate: Exact seconds of partitions.
        bound: Seconds that partitions take at least; cheap.
        reach: Layers.

    Returns:
        Seconds of every partition that was evaluated, before or now.
    """
    search = _Search(evaluate, bound, dict(known))
    for start in starts:
        best: Boundaries | None = start
        while best is not None and best not in search.left:
            best = search.leave(best, neighbours(best, reach))
    return search.seconds


def neighbours(boundaries: Boundaries, reach: int) -> IntArray:
    """All partitions one move away, shape (partitions, stages + 1).

    Example:
        >>> neighbours((0, 1, 4), reach=2).tolist()
        [[0, 2, 4], [0, 3, 4]]
    """
    inner = len(boundaries) - 2
    first, last = np.triu_indices(inner)
    rows = (np.arange(inner) >= first[:, None]) & (np.arange(inner) <= last[:, None])
    moves = [sign * rows.astype(np.int64) for sign in (1, -1)]
    moves += [sign * far * np.eye(inner, dtype=np.int64) for far in range(2, reach + 1) for sign in (1, -1)]
    moved = np.array(boundaries) + np.pad(np.concatenate(moves), ((0, 0), (1, 1)))
    return moved[(np.diff(moved, axis=1) > 0).all(axis=1)]


@dataclass
class _Search:
    evaluate: Evaluate
    bound: Evaluate
    seconds: dict[Boundaries, float]
    left: set[Boundaries] = field(default_factory=set)
    """Partitions that a descent has gone on from."""

    def leave(self, boundaries: Boundaries, moved: IntArray) -> Boundaries | None:
        """A better neighbour to go on to, or None."""
        self.left.add(boundaries)
        limit = self.seconds[boundaries]
        rows = _rows(moved)
        unknown = moved[[row not in self.seconds for row in rows]]
        bounds = self.bound(unknown)
        order = np.argsort(bounds, kind="stable")[: np.count_nonzero(bounds < limit)]
        for first in range(0, len(order), _AT_A_TIME):
            few = unknown[order[first : first + _AT_A_TIME]]
            self.seconds.update(zip(_rows(few), self.evaluate(few).tolist(), strict=True))
            best = min(_rows(few), key=self.seconds.__getitem__)
            if self.seconds[best] < limit:
                return best
        better = [row for row in rows if self.seconds.get(row, limit) < limit and row not in self.left]
        return min(better, key=self.seconds.__getitem__, default=None)


def _rows(partitions: IntArray) -> list[Boundaries]:
    return list(map(tuple, partitions.tolist()))
