"""The least recompute of every possible stage at once: what a partition search adds to the stages' costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnibal.memory.footprint import Footprint
from omnibal.memory.frontier import NOT_OFFERED, sweep
from omnibal.memory.recompute import in_seconds, picoseconds

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageTable:
    """Memory budgets applied to every possible stage.

    Entry ``[s, a, b]`` of its arrays, shape (stages, layers + 1, layers + 1), belongs to stage ``s`` if it holds layers
    ``a`` to ``b - 1``.

    Args:
        footprint: What layers hold at each level.
        budget_bytes: The most that a device of each stage may hold.
    """

    footprint: Footprint
    budget_bytes: Sequence[int]

    def least_seconds(self, seconds: Sequence[FloatArray]) -> FloatArray:
        """The least recompute time of every stage that fits; infinity where none does or it is no stage.

        Args:
            seconds: For each stage what every level of every layer adds to its backward pass, shape (layers, levels).

        As exact as :func:`omnibal.memory.recompute.least_recompute`; some hundred layers take a fraction of a second.
        """
        time = [self._sweep(stage, picoseconds(seconds[stage]), self._room(stage))[0] for stage in self._stages]
        return in_seconds(np.stack(time))

    def missing_bytes(self) -> IntArray:
        """By how much the least that every stage can hold exceeds its budget; negative where it fits."""
        missing = []
        for stage in self._stages:
            is_stage = self._is_stage(stage)
            nothing = np.zeros_like(self.footprint.kept_bytes(stage))
            _, least = self._sweep(stage, nothing, np.where(is_stage, NOT_OFFERED, -1))
            least = np.maximum(least, self.footprint.update_bytes(stage))
            missing.append(np.where(is_stage, least - self._budget_beside_fixed(stage), NOT_OFFERED))
        return np.stack(missing)

    def _sweep(self, stage: int, time: IntArray, room: IntArray) -> tuple[IntArray, IntArray]:
        """Least time (-1 for none) and least peak of every stage in a place, shape (layers + 1, layers + 1)."""
        footprint, size = self.footprint, len(room)
        kept, floor = footprint.kept_bytes(stage), footprint.least_transient(stage)
        held = footprint.schedule.in_flight[stage]
        best, least = np.full((size, size), -1), np.full((size, size), NOT_OFFERED)
        for b in np.flatnonzero((room >= 0).any(axis=0)):
            transient = footprint.transient_bytes(stage, int(b))
            inputs = kept[:b], time[:b], transient, held, floor, np.ascontiguousarray(room[:b, b])
            best[:b, b], least[:b, b] = sweep(*inputs)
        return best, least

    @property
    def _shape(self) -> tuple[int, int]:
        return self.footprint.schedule.num_stages, len(self.footprint.profile.layers) + 1

    @property
    def _stages(self) -> range:
        return range(self._shape[0])

    def _budget_beside_fixed(self, stage: int) -> IntArray:
        beside: IntArray = self.budget_bytes[stage] - self.footprint.fixed_bytes(stage)
        return beside

    def _room(self, stage: int) -> IntArray:
        """The most that the peak of every stage in this place may be, -1 where it cannot be."""
        room = self._budget_beside_fixed(stage)
        can_be = self._is_stage(stage) & (room >= np.maximum(self.footprint.update_bytes(stage), 0))
        return np.where(can_be, room, -1)

    def _is_stage(self, stage: int) -> NDArray[np.bool_]:
        """Which entries leave every other stage a layer."""
        num_stages, size = self._shape
        a, b = np.arange(size)[:, None], np.arange(size)[None, :]
        starts = a >= stage if stage else a == 0
        ends = b <= size - num_stages + stage if stage < num_stages - 1 else b == size - 1
        return (a < b) & starts & ends
