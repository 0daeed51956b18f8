"""Pareto frontiers of a stage's choices: all that is worth knowing of the layers behind the one that comes next.

Layers are added from a stage's last one to its first, the order of a backward pass. A point is a choice of levels for
the layers so far: the bytes they keep of one micro-batch, the time they recompute, and the peak of their own
backward passes, ``held × kept + max over layers of (transient - bytes that the layers behind it have already freed)``.
A choice is worth keeping if no other is at least as good in all three. That is exact: of two choices with equal peaks,
the one that keeps more frees more, but by no more than it keeps.

Where layers are alike many choices coincide, and a hundred layers of a few kinds have some hundred points.

Source: Nemhauser and Ullmann, Discrete Dynamic Programming and Capital Allocation, 1969, with one more criterion.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import IntArray

NOT_OFFERED = 2**62
"""Bytes of a level that a layer does not have."""


class Frontier(NamedTuple):
    """Points in the order of their time."""

    kept: IntArray
    """Bytes of one micro-batch."""
    time: IntArray
    """Recomputation of one micro-batch, in whole numbers, which add up the same in any order."""
    peak: IntArray
    """Bytes of all micro-batches held, and of what comes and goes."""
    origin: IntArray
    """The point of the frontier before."""
    level: IntArray
    """The level of the layer that was added."""


@compiled
def start(least_transient: int) -> Frontier:
    """No layer yet: a peak of what comes and goes behind them."""
    nothing = np.zeros(1, dtype=np.int64)
    return Frontier(nothing, nothing, np.full(1, least_transient, dtype=np.int64), nothing, nothing)


@compiled
def extend(
    behind: Frontier, kept: IntArray, time: IntArray, transient: IntArray, held: int, most_bytes: int
) -> Frontier:
    """Add a layer before those of a frontier, at each of its levels.

    Args:
        behind: The frontier of the layers behind it.
        kept: Bytes of each level, NOT_OFFERED where the layer lacks it.
        time: Of each level.
        transient: Bytes that running the layer backward needs beside what is kept, for each level.
        held: Micro-batches whose activations are kept at the same time.
        most_bytes: Points of a higher peak are left out.

    Returns:
        The new frontier. Of choices that are equal in everything, the one with the last level for the new layer stays.
        O(points × levels × points that differ in kept bytes and peak).
    """
    num_points, num_levels = len(behind.kept), len(kept)
    size = num_points * num_levels
    found = np.empty((5, size), dtype=np.int64)  # rows as the fields of a Frontier
    stairs_kept, stairs_peak, num_stairs = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64), 0
    position, count = np.zeros(num_levels, dtype=np.int64), 0
    while True:
        level, least = -1, 0  # the next point in the order of time, from which level it comes
        for k in range(num_levels):  # the points of each level are in the order of their time: merge them
            if kept[k] < NOT_OFFERED and position[k] < num_points:
                candidate = behind.time[position[k]] + time[k]
                if level < 0 or candidate <= least:
                    level, least = k, candidate
        if level < 0:
            break
        point = position[level]
        position[level] += 1
        new_kept = behind.kept[point] + kept[level]
        # what comes and goes beyond all kept bytes: in the layers behind, or in this one once those have freed theirs
        beyond = max(behind.peak[point] - held * behind.kept[point], transient[level] - behind.kept[point])
        peak = held * new_kept + beyond
        # Points come in the order of time: one is worth keeping if none before it keeps as little at as low a peak.
        if peak > most_bytes or _is_dominated(stairs_kept[:num_stairs], stairs_peak[:num_stairs], new_kept, peak):
            continue
        num_stairs = _add_stair(stairs_kept, stairs_peak, num_stairs, new_kept, peak)
        found[:, count] = (new_kept, least, peak, point, level)
        count += 1
    return _frontier(found[:, :count])


@compiled
def _frontier(rows: IntArray) -> Frontier:
    return Frontier(rows[0].copy(), rows[1].copy(), rows[2].copy(), rows[3].copy(), rows[4].copy())


@compiled
def _is_dominated(stairs_kept: IntArray, stairs_peak: IntArray, kept: int, peak: int) -> bool:
    dominated = False  # looked up without an early exit: the loop then takes several stairs at once
    for stair in range(len(stairs_kept)):
        dominated |= stairs_kept[stair] <= kept and stairs_peak[stair] <= peak
    return dominated


@compiled
def _add_stair(stairs_kept: IntArray, stairs_peak: IntArray, num_stairs: int, kept: int, peak: int) -> int:
    """Add a point to those that no other is below in both, and drop those that it is below."""
    left = 0
    for stair in range(num_stairs):
        if stairs_kept[stair] < kept or stairs_peak[stair] < peak:
            stairs_kept[left], stairs_peak[left] = stairs_kept[stair], stairs_peak[stair]
            left += 1
    stairs_kept[left], stairs_peak[left] = kept, peak
    return left + 1


@compiled
def sweep(
    kept: IntArray, time: IntArray, transient: IntArray, held: int, least_transient: int, room: IntArray
) -> tuple[IntArray, IntArray]:
    """The best of every stage that ends with the last of some layers.

    Args:
        kept: Bytes of each layer at each level, shape (layers, levels).
        time: The same shape.
        transient: The same shape.
        held: As in :func:`extend`.
        least_transient: As in :func:`start`.
        room: The most that the peak of a stage from each layer on may be, shape (layers,); -1 where none may start.

    Returns:
        The least time within the room, -1 where nothing fits, and the least peak of the choices within the largest room
        of this or an earlier start, NOT_OFFERED where there is none; shape (layers,).
    """
    num_layers = len(kept)
    best, least_peak = np.full(num_layers, -1), np.full(num_layers, NOT_OFFERED)
    frontier = start(least_transient)
    for layer in range(num_layers - 1, -1, -1):
        most = room[: layer + 1].max()  # of this start and of those that are yet to come
        frontier = extend(frontier, kept[layer], time[layer], transient[layer], held, most)
        if len(frontier.kept) == 0:
            break
        least_peak[layer] = frontier.peak.min()
        for point in range(len(frontier.kept)):
            if frontier.peak[point] <= room[layer]:  # in the order of time: the first that fits is the fastest
                best[layer] = frontier.time[point]
                break
    return best, least_peak
