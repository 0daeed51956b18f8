"""How good partitions are found: by dynamic programming over the costs of possible stages, then by descent.

Costs have the shape (stages, layers + 1, layers + 1): ``costs[s, a, b]`` is what stage ``s`` costs with layers ``a`` to
``b - 1``. Entries with ``a >= b`` are no stage and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import FloatArray, IntArray
from omnibal.errors import InfeasibleError

Boundaries = tuple[int, ...]
Evaluate = Callable[[IntArray], FloatArray]
"""From partitions, shape (partitions, stages + 1), to their seconds."""
_STEP = 1.01  # ratio of one limit on the slowest stage to the next: the model's optimum is met within 1 %
_EVENNESS = 1e-3  # weight of even stages in a passage: decides among partitions that the model finds about equal
_ROUNDING = 1 + 1e-12
_REACH = 3  # the most layers that a descent moves one boundary by
_AT_A_TIME = 16  # neighbours that a descent evaluates together, before it looks at the best of them


def least_maximum(costs: FloatArray) -> tuple[float, Boundaries]:
    """The exact least maximum of the stages' costs, and its partition (of equal ones that of smallest boundaries).

    >>> seconds = np.array([[0, 1, 3, 6], [0, 0, 2, 5], [0, 0, 0, 3], [0, 0, 0, 0]], dtype=float)
    >>> least_maximum(np.stack([seconds, seconds]))
    (3.0, (0, 2, 3))
    """
    value, boundaries = _solve(costs, False)  # O(stages × layers²)
    if not np.isfinite(value):
        raise InfeasibleError("a partition must have stages of finite cost only, got none that has")
    return float(value), _follow(boundaries)


@compiled
def _solve(costs: FloatArray, adds: bool) -> tuple[float, IntArray]:
    """The least sum (``adds``) or maximum of the stages' costs of any partition, and each stage's best end by start."""
    num_stages, size, _ = costs.shape
    choices = np.zeros((num_stages, size), dtype=np.int64)
    # Dynamic programming from the last stage to the first:
    # rest[a] = min over b of combine(costs[stage, a, b], rest of the next stage[b]); choices[stage, a] is that b.
    rest = _last_boundary(size)
    for stage in range(num_stages - 1, -1, -1):
        combined = np.full(size, np.inf)
        for a in range(size):
            for b in range(a + 1, size):
                value = costs[stage, a, b] + rest[b] if adds else max(costs[stage, a, b], rest[b])
                if value < combined[a]:
                    combined[a], choices[stage, a] = value, b
        rest = combined
    return rest[0], choices


def model_optima(pace_seconds: FloatArray, passing_seconds: FloatArray, micro_batches: int) -> list[Boundaries]:
    """Partitions that a closed formula for the makespan finds best, fastest pace first.

    ``pace_seconds`` is how long a possible stage is busy with a micro-batch, ``passing_seconds`` how long a micro-batch
    takes through the stage and over the link behind it, there and back.
    """
    # The formula: one micro-batch passes all stages and links there and back, the others follow at the pipeline's pace,
    #     makespan = Σ passing + (micro_batches - 1) · pace
    # The pace is that of the slowest stage, or of a round trip shared by the micro-batches in flight:
    #     pace = max(slowest stage, max over s of (Σ passing from stage s on) / (stages - s))
    # For each limit on the pace dynamic programming finds the shortest passage. Limits grow by 1 %, so that the best
    # partition found is within 1 % of the formula's optimum. O(limits × stages × layers²).
    shortest, loosest = _solve(passing_seconds, True)
    last_limit = _pace(_follow(loosest), pace_seconds, passing_seconds) * _STEP  # beyond it no passage gets shorter
    # No partition has a faster pace: neither its slowest stage nor the round trip that all stages share is shorter.
    limit = max(least_maximum(pace_seconds)[0], shortest / len(pace_seconds))
    best, found = np.inf, dict[Boundaries, None]()
    # A looser limit may shorten the passage, which counts once, and slows the pace, which counts micro_batches - 1
    # times. The search ends where even the shortest passage of all partitions could not make up for the pace.
    while limit <= last_limit and shortest + (micro_batches - 1) * limit < best:
        keeps, choices = _within(limit, pace_seconds, passing_seconds)
        if keeps:
            boundaries = _follow(choices)
            found[boundaries] = None
            best = min(best, _costs(boundaries, passing_seconds).sum() + (micro_batches - 1) * limit)
        limit *= _STEP
    return list(found)


@compiled
def _within(limit: float, pace_seconds: FloatArray, passing_seconds: FloatArray) -> tuple[bool, IntArray]:
    """Whether a partition keeps to a limit on the pace, and each stage's end by start in that of shortest passage."""
    num_stages, size, _ = pace_seconds.shape
    most, whole = limit * _ROUNDING, max(passing_seconds[0, 0, size - 1], 1e-300)
    choices = np.zeros((num_stages, size), dtype=np.int64)
    score, passage = _last_boundary(size), _last_boundary(size)
    for stage in range(num_stages - 1, -1, -1):
        scores, passages = np.full(size, np.inf), np.full(size, np.inf)
        for a in range(size):
            for b in range(a + 1, size):
                if not pace_seconds[stage, a, b] <= most or score[b] == np.inf:
                    continue
                # The square of each stage's passage, with a small weight, prefers even stages among about equal
                # partitions.
                passing = passing_seconds[stage, a, b]
                candidate = passing * (1 + _EVENNESS * passing / whole) + score[b]
                if candidate < scores[a]:
                    scores[a], passages[a], choices[stage, a] = candidate, passing + passage[b], b
            # The round trip from here to the end is shared by as many micro-batches as there are stages on the way.
            if not passages[a] / (num_stages - stage) <= most:
                scores[a] = np.inf
        score, passage = scores, passages
    return score[0] < np.inf, choices


def _pace(boundaries: Boundaries, pace_seconds: FloatArray, passing_seconds: FloatArray) -> float:
    # Entry k is the round trip over the last k + 1 stages, shared by k + 1 micro-batches in flight.
    trips = np.cumsum(_costs(boundaries, passing_seconds)[::-1]) / np.arange(1, len(boundaries))
    return float(max(_costs(boundaries, pace_seconds).max(), trips.max()))


def _costs(boundaries: Boundaries, costs: FloatArray) -> FloatArray:
    stages: FloatArray = costs[np.arange(len(costs)), boundaries[:-1], boundaries[1:]]
    return stages


@compiled
def _last_boundary(size: int) -> FloatArray:
    # The cost of the stages behind the last one, by where they start: they start at the end of the model or nowhere.
    costs = np.full(size, np.inf)
    costs[-1] = 0
    return costs


def _follow(choices: IntArray) -> Boundaries:
    boundaries = [0]
    for choice in choices:  # each stage's end is the next one's start
        boundaries.append(int(choice[boundaries[-1]]))
    return tuple(boundaries)


def descend(
    starts: Iterable[Boundaries], known: Mapping[Boundaries, float], evaluate: Evaluate, bound: Evaluate
) -> dict[Boundaries, float]:
    """Move each start to better neighbours until none is better; returns the seconds of every partition evaluated.

    ``known`` has the seconds of the starts and of other partitions, ``bound`` gives cheap lower bounds of ``evaluate``.
    """
    # All descents share what they have learned: no partition is evaluated twice or gone on from twice.
    search = _Descent(evaluate, bound, dict(known))
    for start in starts:
        best: Boundaries | None = start
        while best is not None and best not in search.left:
            best = search.leave(best, neighbours(best, _REACH))
    return search.seconds


def neighbours(boundaries: Boundaries, reach: int) -> IntArray:
    """Partitions one move away: one boundary by up to ``reach`` layers, or a run of boundaries by one layer.

    >>> neighbours((0, 1, 4), reach=2).tolist()
    [[0, 2, 4], [0, 3, 4]]
    """
    inner = len(boundaries) - 2
    # One row for every run of adjacent inner boundaries (first to last), then the far moves of single boundaries.
    first, last = np.triu_indices(inner)
    rows = (np.arange(inner) >= first[:, None]) & (np.arange(inner) <= last[:, None])
    moves = [sign * rows.astype(np.int64) for sign in (1, -1)]
    moves += [sign * far * np.eye(inner, dtype=np.int64) for far in range(2, reach + 1) for sign in (1, -1)]
    moved = np.array(boundaries) + np.pad(np.concatenate(moves), ((0, 0), (1, 1)))
    return moved[(np.diff(moved, axis=1) > 0).all(axis=1)]


@dataclass
class _Descent:
    evaluate: Evaluate
    bound: Evaluate
    seconds: dict[Boundaries, float]
    left: set[Boundaries] = field(default_factory=set)
    """Partitions that a descent has gone on from."""

    def leave(self, boundaries: Boundaries, moved: IntArray) -> Boundaries | None:
        self.left.add(boundaries)
        limit = self.seconds[boundaries]
        rows = _rows(moved)
        unknown = moved[[row not in self.seconds for row in rows]]
        bounds = self.bound(unknown)
        # A neighbour whose bound is not below the limit cannot be better; the lowest bounds come first.
        order = np.argsort(bounds, kind="stable")[: np.count_nonzero(bounds < limit)]
        for first in range(0, len(order), _AT_A_TIME):
            few = unknown[order[first : first + _AT_A_TIME]]
            self.seconds.update(zip(_rows(few), self.evaluate(few).tolist(), strict=True))
            best = min(_rows(few), key=self.seconds.__getitem__)
            if self.seconds[best] < limit:
                return best
        # Nothing new is better; another descent may have evaluated a better neighbour and not gone on from it.
        better = [row for row in rows if self.seconds.get(row, limit) < limit and row not in self.left]
        return min(better, key=self.seconds.__getitem__, default=None)


def _rows(partitions: IntArray) -> list[Boundaries]:
    return list(map(tuple, partitions.tolist()))
