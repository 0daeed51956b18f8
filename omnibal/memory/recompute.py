"""Which layers recompute: the least recompute time that fits a memory budget, exactly.

Layers are added from a stage's last one to its first, the order of a backward pass. A point is a choice of levels for
the layers so far, with three numbers: the bytes that they keep of one micro-batch, the time that they recompute, and
the peak of their backward passes, ``held · kept + max over layers of (transient - bytes freed by the layers behind)``.
A Pareto frontier holds the points that no other point equals or beats in all three. That is exact: of two points with
equal peaks, the one that keeps more bytes also frees more, but by no more than it keeps. Equal layers lead to equal
points: a hundred layers of a few kinds have some hundred points.

Source: Nemhauser and Ullmann, Discrete Dynamic Programming and Capital Allocation, 1969, with one more criterion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omnibal.compiled import compiled, compiled_part
from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import NOT_OFFERED, Footprint
from omnibal.profile.records import LEVELS, Level, ModelProfile

_PICOSECONDS = 1e12  # times as whole numbers, so that sums in any order are equal
# Rows of a frontier, an array of (5, points) in the order of the points' time:
KEPT: Final = 0  # bytes kept of one micro-batch
TIME: Final = 1  # recomputation of one micro-batch, in picoseconds
PEAK: Final = 2  # bytes kept of all micro-batches held, with the largest transient
ORIGIN: Final = 3  # the point of the previous frontier that each point grew from
LEVEL: Final = 4  # the level of the layer that was added


def choose_levels(
    footprint: Footprint, stage: int, layers: range, seconds: FloatArray, budget_bytes: int
) -> tuple[Level, ...]:
    """The levels of a stage's layers that cost the least time and fit the budget.

    ``seconds``, shape (layers of the model, levels), is what each level adds to a backward pass (`recompute_seconds`).
    """
    rows = slice(layers.start, layers.stop)
    kept, transient = footprint.kept_bytes[rows], footprint.transient_bytes(stage, layers.stop)[rows]
    floor, held = footprint.least_transient(stage), footprint.schedule.in_flight[stage]
    fixed, update = (
        int(sizes[layers.start, layers.stop]) for sizes in (footprint.fixed_bytes(stage), footprint.update_bytes(stage))
    )
    room = budget_bytes - fixed
    chosen = least_recompute(kept, transient, seconds[rows], room_bytes=room, held=held, least_transient=floor)
    if chosen is None or update > room:
        least = fixed + max(least_bytes(kept, transient, held=held, least_transient=floor), update)
        raise InfeasibleError(
            f"stage {stage} must fit its budget of {bytes_in_words(budget_bytes)}, got {bytes_in_words(least)} with as "
            f"much recomputed as possible ({least - budget_bytes} bytes are missing)"
        )
    # Of levels that are alike in everything, a search takes the last one: a head makes its gradients with its loss, and
    # "full" changes nothing there. Nothing recomputes then, and nothing is to be said to.
    time, rows_of = picoseconds(seconds[rows]), np.arange(len(chosen))
    alike = [(sizes[rows_of, chosen] == sizes[:, 0]) for sizes in (kept, transient, time)]
    return tuple(LEVELS[level] for level in np.where(np.all(alike, axis=0), 0, chosen))


def least_recompute(
    kept: IntArray,
    transient: IntArray,
    seconds: FloatArray,
    *,
    room_bytes: int,
    held: int = 1,
    least_transient: int = 0,
) -> IntArray | None:
    """The column of each layer's level that costs the least seconds in all while the peak keeps to the room, or None.

    Arrays have the shape (layers, levels); ``held`` micro-batches are kept at once; ``least_transient`` bytes come and
    go before the first backward pass. Of equally fast choices, one of the least peak; of neighbours that are alike, the
    first ones keep least.

    >>> kept, transient = np.array([[100, 10], [60, 10]]), np.zeros((2, 2), dtype=int)
    >>> seconds = np.array([[0.0, 3.0], [0.0, 2.0]])
    >>> least_recompute(kept, transient, seconds, room_bytes=110).tolist()
    [0, 1]
    """
    # Layers are added in the order of a backward pass, from the last to the first.
    frontiers, time = [start(least_transient)], picoseconds(seconds)
    for layer in range(len(kept) - 1, -1, -1):
        frontiers.append(extend(frontiers[-1], kept[layer], time[layer], transient[layer], held, room_bytes))
    found = frontiers[-1]
    if not found.shape[1]:
        return None
    fastest = np.flatnonzero(found[TIME] == found[TIME, 0])
    point = int(fastest[found[PEAK, fastest].argmin()])
    # Each frontier knows the level of the layer that it added and the point that it grew from: walk back along those.
    chosen = []
    for frontier in reversed(frontiers[1:]):
        chosen.append(frontier[LEVEL, point])
        point = frontier[ORIGIN, point]
    return np.array(chosen)


def least_bytes(kept: IntArray, transient: IntArray, *, held: int = 1, least_transient: int = 0) -> int:
    frontier, no_time = start(least_transient), np.zeros(kept.shape[1], dtype=np.int64)
    for layer in range(len(kept) - 1, -1, -1):
        frontier = extend(frontier, kept[layer], no_time, transient[layer], held, NOT_OFFERED)
    return int(frontier[PEAK].min())


def recompute_seconds(profile: ModelProfile, loads: Load) -> FloatArray:
    """What each level adds to a backward pass on average over micro-batches, shape (layers, levels)."""
    # Levels that a layer does not offer cost nothing here, and NOT_OFFERED bytes in the footprint.
    costs = [[layer.recompute_seconds.get(level, CostModel()) for level in LEVELS] for layer in profile.layers]
    mean = np.array([[float(cost(loads).mean()) for cost in row] for row in costs])
    # No backward pass reaches the layers before the first trained one.
    mean[: profile.frozen_front] = 0
    return mean


def picoseconds(seconds: FloatArray) -> IntArray:
    return np.rint(seconds * _PICOSECONDS).astype(np.int64)


@dataclass(frozen=True, eq=False)
class StageTable:
    """Memory budgets applied to every possible stage; arrays have the shape (stages, layers + 1, layers + 1)."""

    footprint: Footprint
    budget_bytes: Sequence[int]

    def least_seconds(self, seconds: FloatArray) -> FloatArray:
        """The least recompute seconds of every stage; infinity for what does not fit or is no stage."""
        time = picoseconds(seconds)
        least = np.stack([self._sweep(stage, time, self._room(stage))[0] for stage in self._stages])
        return np.where(least < 0, np.inf, least / _PICOSECONDS)

    def missing_bytes(self) -> IntArray:
        """Bytes by which the least memory of every stage exceeds the budget; negative if the stage fits."""
        missing = []
        for stage in self._stages:
            is_stage = self._is_stage(stage)
            nothing = np.zeros_like(self.footprint.kept_bytes)
            _, least = self._sweep(stage, nothing, np.where(is_stage, NOT_OFFERED, -1))
            least = np.maximum(least, self.footprint.update_bytes(stage))
            missing.append(np.where(is_stage, least - self._budget_beside_fixed(stage), NOT_OFFERED))
        return np.stack(missing)

    def _sweep(self, stage: int, time: IntArray, room: IntArray) -> tuple[IntArray, IntArray]:
        """Least time (-1: does not fit) and least peak of every stage at a place, shape (layers + 1, layers + 1)."""
        footprint, size = self.footprint, len(room)
        kept, floor = footprint.kept_bytes, footprint.least_transient(stage)
        held = footprint.schedule.in_flight[stage]
        best, least = np.full((size, size), -1), np.full((size, size), NOT_OFFERED)
        # One sweep from layer b down to 0 answers for all stages that end at b: the frontier of layers a to b - 1 is
        # that of a stage of its own.
        for b in np.flatnonzero((room >= 0).any(axis=0)):
            transient = footprint.transient_bytes(stage, int(b))
            inputs = kept[:b], time[:b], transient, held, floor, np.ascontiguousarray(room[:b, b])
            best[:b, b], least[:b, b] = sweep(*inputs)
        return best, least

    @property
    def _stages(self) -> range:
        return range(self.footprint.schedule.num_stages)

    def _budget_beside_fixed(self, stage: int) -> IntArray:
        beside: IntArray = self.budget_bytes[stage] - self.footprint.fixed_bytes(stage)
        return beside

    def _room(self, stage: int) -> IntArray:
        # -1 for what cannot fit or is no stage.
        room = self._budget_beside_fixed(stage)
        can_be = self._is_stage(stage) & (room >= np.maximum(self.footprint.update_bytes(stage), 0))
        return np.where(can_be, room, -1)

    def _is_stage(self, stage: int) -> NDArray[np.bool_]:
        # Entries [a, b] that leave every other stage of its part a layer. A pipeline is one part; where encoder and LLM
        # have devices of their own, each is one.
        num_stages, size = len(self._stages), len(self.footprint.profile.layers) + 1
        a, b = np.arange(size)[:, None], np.arange(size)[None, :]
        first, last, start, end = 0, num_stages - 1, 0, size - 1
        if self.footprint.layout.has_units:
            border, own = encoder_layers(self.footprint.profile.layers), self.footprint.layout.encoder_stages
            first, last, start, end = (0, own - 1, 0, border) if stage < own else (own, last, border, end)
        starts = a >= start + stage - first if stage > first else a == start
        ends = b <= end - last + stage if stage < last else b == end
        return (a < b) & starts & ends


@compiled
def start(least_transient: int) -> IntArray:
    """The frontier before any layer: one point that keeps nothing, with the peak of the loss."""
    frontier = np.zeros((5, 1), dtype=np.int64)
    frontier[PEAK, 0] = least_transient
    return frontier


@compiled
def extend(
    behind: IntArray, kept: IntArray, time: IntArray, transient: IntArray, held: int, most_bytes: int
) -> IntArray:
    """Add a layer before those of a frontier, at each of its levels; points of a peak above ``most_bytes`` go.

    Of choices that are equal in everything, the one with the last level for the new layer stays.
    """
    num_points, num_levels = behind.shape[1], len(kept)
    size = num_points * num_levels
    # O(points × levels × points that differ in kept bytes and peak)
    found = np.empty((5, size), dtype=np.int64)
    # The stairs are the points accepted so far that no other is below in both kept bytes (row 0) and peak (row 1).
    stairs, num_stairs = np.empty((2, size), dtype=np.int64), 0
    position, count = np.zeros(num_levels, dtype=np.int64), 0
    # Each level turns the points behind into a list in the order of time. Merge these lists: ``position`` is where each
    # one stands, ``level`` the one that comes next.
    while True:
        level, least = -1, 0
        for k in range(num_levels):
            if kept[k] < NOT_OFFERED and position[k] < num_points:
                candidate = behind[TIME, position[k]] + time[k]
                if level < 0 or candidate <= least:
                    level, least = k, candidate
        if level < 0:
            break
        point = position[level]
        position[level] += 1
        new_kept = behind[KEPT, point] + kept[level]
        # The transient beyond all kept bytes is that of the layers behind, or that of this layer when they have freed
        # theirs.
        beyond = max(behind[PEAK, point] - held * behind[KEPT, point], transient[level] - behind[KEPT, point])
        peak = held * new_kept + beyond
        # Every earlier point takes no more time, so a new one must be below all of them in kept bytes or peak.
        if peak > most_bytes or _is_dominated(stairs, num_stairs, new_kept, peak):
            continue
        num_stairs = _add_stair(stairs, num_stairs, new_kept, peak)
        # One by one: numba compiles an assignment to a whole column for a second, for its messages about shapes.
        found[KEPT, count], found[TIME, count], found[PEAK, count] = new_kept, least, peak
        found[ORIGIN, count], found[LEVEL, count] = point, level
        count += 1
    frontier = np.empty((5, count), dtype=np.int64)
    for row in range(5):
        for point in range(count):
            frontier[row, point] = found[row, point]
    return frontier


@compiled_part
def _is_dominated(stairs: IntArray, num_stairs: int, kept: int, peak: int) -> bool:
    dominated = False  # no early exit, so that the compiler can compare several stairs at once
    for stair in range(num_stairs):
        dominated |= stairs[0, stair] <= kept and stairs[1, stair] <= peak
    return dominated


@compiled_part
def _add_stair(stairs: IntArray, num_stairs: int, kept: int, peak: int) -> int:
    left = 0  # the stairs that the new point is below in both are dropped
    for stair in range(num_stairs):
        if stairs[0, stair] < kept or stairs[1, stair] < peak:
            stairs[0, left], stairs[1, left] = stairs[0, stair], stairs[1, stair]
            left += 1
    stairs[0, left], stairs[1, left] = kept, peak
    return left + 1


@compiled
def sweep(
    kept: IntArray, time: IntArray, transient: IntArray, held: int, least_transient: int, room: IntArray
) -> tuple[IntArray, IntArray]:
    """The best choice for every stage that starts at some layer and ends with the last one.

    ``room``, shape (layers,), is the most that the peak of a stage that starts at each layer may be; -1: none may.

    Returns:
        By first layer: the least time within the room (-1: nothing fits), and the least peak of all choices within the
        largest room of this or an earlier first layer (NOT_OFFERED: there is none).
    """
    num_layers = len(kept)
    best, least_peak = np.full(num_layers, -1), np.full(num_layers, NOT_OFFERED)
    frontier = start(least_transient)
    for layer in range(num_layers - 1, -1, -1):
        # Points above the room of this first layer may still serve an earlier one with more room.
        most = room[0]
        for first in range(1, layer + 1):
            most = max(most, room[first])
        frontier = extend(frontier, kept[layer], time[layer], transient[layer], held, most)
        if frontier.shape[1] == 0:
            break
        for point in range(frontier.shape[1]):
            least_peak[layer] = min(least_peak[layer], frontier[PEAK, point])
            # Points are in the order of time: the first one that fits is the fastest.
            if best[layer] < 0 and frontier[PEAK, point] <= room[layer]:
                best[layer] = frontier[TIME, point]
    return best, least_peak
