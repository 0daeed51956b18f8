"""Pareto frontiers of recompute levels: the choices for a stage's layers that no other choice is better than.

Layers are added from a stage's last one to its first, the order of a backward pass. A point is a choice of levels for
the layers so far, with three numbers: the bytes that they keep of one micro-batch, the time that they recompute, and
the peak of their backward passes, ``held × kept + max over layers of (transient - bytes freed by the layers behind)``.
A frontier holds the points that no other point equals or beats in all three. That is exact: of two points with equal
peaks, the one that keeps more bytes also frees more, but by no more than it keeps.

Equal layers lead to equal points: a hundred layers of a few kinds have some hundred points.

Source: Nemhauser and Ullmann, Discrete Dynamic Programming and Capital Allocation, 1969, with one more criterion.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnibal.compiled import compiled
from omnibal.cost import IntArray

NOT_OFFERED = 2**62  # bytes of a level that a layer does not have


class Frontier(NamedTuple):
    """Points in the order of their time."""

    kept: IntArray
    """Bytes kept of one micro-batch."""
    time: IntArray
    """Recomputation of one micro-batch, in picoseconds."""
    peak: IntArray
    """Bytes kept of all micro-batches held, with the largest transient."""
    origin: IntArray
    """The point of the previous frontier that each point grew from."""
    level: IntArray
    """The level of the layer that was added."""


@compiled
def start(least_transient: int) -> Frontier:
    """The frontier before any layer: one point that keeps nothing, with the peak of the loss."""
    nothing = np.zeros(1, dtype=np.int64)
    return Frontier(nothing, nothing, np.full(1, least_transient, dtype=np.int64), nothing, nothing)


@compiled
def extend(
    behind: Frontier, kept: IntArray, time: IntArray, transient: IntArray, held: int, most_bytes: int
) -> Frontier:
    """Add a layer before those of a frontier, at each of its levels.

    Args:
        behind: The frontier of the layers behind the new one.
        kept: Bytes kept at each level, NOT_OFFERED where the layer lacks the level.
        time: Recomputation at each level.
        transient: Bytes that the layer's backward pass needs beside what is kept, at each level.
        held: Micro-batches whose activations are kept at the same time.
        most_bytes: Points of a higher peak are left out.

    Returns:
        The new frontier. Of choices that are equal in everything, the one with the last level for the new layer stays.
        O(points × levels × points that differ in kept bytes and peak).
    """
    num_points, num_levels = len(behind.kept), len(kept)
    size = num_points * num_levels
    found = np.empty((5, size), dtype=np.int64)  # rows as the fields of a Frontier
    # The stairs are the points accepted so far that no other is below in both kept bytes and peak.
    stairs_kept, stairs_peak, num_stairs = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64), 0
    position, count = np.zeros(num_levels, dtype=np.int64), 0
    # Each level turns the points behind into a list in the order of time. Merge these lists: ``position`` is where each
    # one stands, ``level`` the one that comes next.
    while True:
        level, least = -1, 0
        for k in range(num_levels):
            if kept[k] < NOT_OFFERED and position[k] < num_points:
                candidate = behind.time[position[k]] + time[k]
                if level < 0 or candidate <= least:
                    level, least = k, candidate
        if level < 0:
            break
        point = position[level]
        position[level] += 1
        new_kept = behind.kept[point] + kept[level]
        # The transient beyond all kept bytes is that of the layers behind, or that of this layer when they have freed
        # theirs.
        beyond = max(behind.peak[point] - held * behind.kept[point], transient[level] - behind.kept[point])
        peak = held * new_kept + beyond
        # Every earlier point takes no more time, so a new one must be below all of them in kept bytes or peak.
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
    dominated = False  # no early exit, so that the compiler can compare several stairs at once
    for stair in range(len(stairs_kept)):
        dominated |= stairs_kept[stair] <= kept and stairs_peak[stair] <= peak
    return dominated


@compiled
def _add_stair(stairs_kept: IntArray, stairs_peak: IntArray, num_stairs: int, kept: int, peak: int) -> int:
    """Add a point to the stairs, and drop the stairs that it is below in both; returns how many there are."""
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
    """The best choice for every stage that starts at some layer and ends with the last one.

    Args:
        kept: Bytes kept of one micro-batch, shape (layers, levels).
        time: Recomputation, shape (layers, levels).
        transient: Bytes beside what is kept, shape (layers, levels).
        held: Micro-batches whose activations are kept at the same time.
        least_transient: Peak of the loss.
        room: The most that the peak of a stage that starts at each layer may be, shape (layers,); -1: none may.

    Returns:
        By first layer, shape (layers,): the least time within the room (-1: nothing fits), and the least peak of all
        choices within the largest room of this or an earlier first layer (NOT_OFFERED: there is none).
    """
    num_layers = len(kept)
    best, least_peak = np.full(num_layers, -1), np.full(num_layers, NOT_OFFERED)
    frontier = start(least_transient)
    for layer in range(num_layers - 1, -1, -1):
        # Points above the room of this first layer may still serve an earlier one with more room.
        most = room[: layer + 1].max()
        frontier = extend(frontier, kept[layer], time[layer], transient[layer], held, most)
        if len(frontier.kept) == 0:
            break
        least_peak[layer] = frontier.peak.min()
        for point in range(len(frontier.kept)):
            if frontier.peak[point] <= room[layer]:  # points are in the order of time: the first is the fastest
                best[layer] = frontier.time[point]
                break
    return best, least_peak
