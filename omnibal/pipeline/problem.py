"""What a partition search searches: the step time of every partition of a profile, and bounds on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from omnibal.compiled import compiled
from omnibal.pipeline.bound import differences, stage_bounds
from omnibal.pipeline.dynamic import Boundaries, least_maximum
from omnibal.pipeline.execution import run_blocking, run_overlapped
from omnibal.pipeline.schedule import Schedule, Table
from omnibal.pipeline.simulate import Mode
from omnibal.pipeline.times import StepTimes, durations_of, transfers_of
from omnibal.profile.records import ModelProfile

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PartitionProblem:
    """Cut ``profile`` into the stages of ``schedule`` so that a step of ``times`` is short."""

    profile: ModelProfile
    times: StepTimes
    schedule: Schedule
    mode: Mode

    @property
    def micro_batches(self) -> int:
        """Per step and replica."""
        return int(self.times.forward.shape[1])

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return self.schedule.num_stages

    def evaluate(self, partitions: IntArray) -> FloatArray:
        """Simulated seconds of a step under each partition, shape (partitions, stages + 1) -> (partitions,)."""
        blocking = self.mode == "rendezvous"
        table = self.schedule.blocking_table if blocking else self.schedule.table
        seconds: FloatArray = _step_seconds(self.times, table, np.ascontiguousarray(partitions), blocking)
        return seconds

    def bound(self, partitions: IntArray) -> FloatArray:
        """Seconds that a step takes at least under each partition; the same shapes."""
        stages = np.arange(self.num_stages)
        bounds: FloatArray = self._stage_bounds[stages, partitions[:, :-1], partitions[:, 1:]].max(axis=1)
        return bounds

    @cached_property
    def lower_bound_seconds(self) -> float:
        """Seconds that a step takes at least under any partition."""
        return least_maximum(self._stage_bounds)[0]

    @property
    def least_bound(self) -> Boundaries:
        """The partition of the lower bound."""
        return least_maximum(self._stage_bounds)[1]

    @cached_property
    def _stage_bounds(self) -> FloatArray:
        return stage_bounds(self.times, self.schedule, self.mode)

    @cached_property
    def forward_seconds(self) -> FloatArray:
        """Each layer's forward pass of an average micro-batch, shape (layers,)."""
        return np.diff(self.times.forward.mean(axis=(0, 1)))

    @cached_property
    def crossing_seconds(self) -> FloatArray:
        """An average micro-batch's transfer over each boundary, shape (layers + 1,)."""
        crossing: FloatArray = self.times.crossing.mean(axis=(0, 1))
        return crossing

    @cached_property
    def stage_seconds(self) -> FloatArray:
        """What each possible stage computes for an average micro-batch, shape (stages, layers + 1, layers + 1)."""
        times = self.times
        backwards = [times.first_backward, *[times.backward] * (self.num_stages - 1)]
        return np.stack([differences((times.forward + b + times.weight).mean(axis=(0, 1))) for b in backwards])

    @cached_property
    def waiting_seconds(self) -> FloatArray:
        """The part of it that other stages need not wait for; the same shape."""
        weight = differences(self.times.weight.mean(axis=(0, 1)))
        return np.stack([weight if pending else np.zeros_like(weight) for pending in self.schedule.pending_weights])

    @cached_property
    def pace_seconds(self) -> FloatArray:
        """How long each possible stage is busy with an average micro-batch; the same shape."""
        if self.mode == "overlap":
            return self.stage_seconds
        return self.stage_seconds + 2 * self.crossing_seconds[:, None] + 2 * self.crossing_seconds[None, :]

    @cached_property
    def passing_seconds(self) -> FloatArray:
        """How long an average micro-batch needs through each possible stage and to the next, there and back."""
        return self.stage_seconds - self.waiting_seconds + 2 * self.crossing_seconds[None, :]


@compiled
def _step_seconds(times: StepTimes, table: Table, partitions: IntArray, blocking: bool) -> FloatArray:
    starts, ends = np.zeros(table.operations.shape), np.zeros(table.operations.shape)
    result = np.zeros(len(partitions))
    num_stages = len(table.lengths)
    for row in range(len(partitions)):
        boundaries = partitions[row]
        finish = np.zeros(num_stages)
        for replica in range(len(times.forward)):
            durations, transfers = durations_of(times, replica, boundaries), transfers_of(times, replica, boundaries)
            if blocking:
                run_blocking(table, durations, transfers, starts, ends)
            else:
                run_overlapped(table, durations, transfers, starts, ends)
            for stage in range(num_stages):
                finish[stage] = max(finish[stage], ends[stage, table.lengths[stage] - 1])
        reduce, optimizer = times.reduce[boundaries], times.optimizer[boundaries]
        result[row] = np.max(finish + np.diff(reduce)) + np.max(np.diff(optimizer))
    return result
