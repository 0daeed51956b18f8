"""Seconds of a step under any partition, with the least recompute that makes every stage fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.errors import InfeasibleError
from omnibal.memory.footprint import Footprint
from omnibal.memory.recompute import StageTable, choose_levels, recompute_seconds
from omnibal.pipeline.optimize import Boundaries, least_maximum
from omnibal.pipeline.problem import PartitionProblem
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.pipeline.simulate import mode_of
from omnibal.pipeline.times import step_times, summed
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.profile.records import LEVELS, Level, ModelProfile


class StepModel:
    """The step of one packing, layout and schedule, as a function of the partition.

    ``budgets`` is the most that a device of each stage may hold; by default that of the request.
    """

    def __init__(
        self,
        profile: ModelProfile,
        packing: Packing,
        layout: Layout,
        request: PlanRequest,
        schedule: ScheduleName = "1f1b",
        budgets: tuple[int, ...] | None = None,
    ) -> None:
        self.profile, self.packing, self.layout, self.request = profile, packing, layout, request
        self.num_stages, self.links = layout.num_stages, request.cluster.links_of(layout)
        self.schedule_name, self.schedule = schedule, SCHEDULES[schedule](self.num_stages, packing.micro_batches)
        self.budgets = budgets or request.budgets(layout)
        self.footprint = Footprint(profile, packing.largest, self.schedule, layout, request.cluster.overhead_bytes)
        self._loads = [load for step in packing.steps for load in step]
        # All steps as replicas of one step, for means over micro-batches; and a problem per step. Both do not
        # recompute.
        self.average = self._problem(self._loads)
        self.steps = self._split(self.average)
        self.recompute_seconds = recompute_seconds(profile, packing.all_loads)
        self._chosen: dict[tuple[int, int, int], tuple[Level, ...]] = {}

    def __str__(self) -> str:
        limits = self.packing.limits
        return (
            f"{self.layout}, {self.schedule_name}, "
            f"{self.packing.micro_batches} micro-batches of at most {limits.vision_units} vision units and "
            f"{limits.llm_tokens} tokens"
        )

    @cached_property
    def recompute(self) -> FloatArray:
        """The least recompute seconds of every possible stage; infinite where it cannot fit."""
        return self._table.least_seconds(self.recompute_seconds)

    @cached_property
    def missing(self) -> tuple[int, Boundaries]:
        """The least bytes that any partition is short of with as much recomputed as possible, and that partition."""
        missing, boundaries = least_maximum(self._table.missing_bytes().astype(np.float64))
        return int(missing), boundaries

    @cached_property
    def lower_bound_seconds(self) -> float:
        busy = self.packing.micro_batches * least_maximum(self.average.mean.stage + self.recompute)[0]
        return max(busy, fmean(problem.lower_bound_seconds for problem in self.steps))

    def levels(self, boundaries: Boundaries) -> tuple[Level, ...]:
        """The levels of all layers that fit at the least recompute time."""
        return tuple(level for stage in range(self.num_stages) for level in self._levels(stage, boundaries))

    def step_seconds(self, partitions: IntArray) -> FloatArray:
        """Mean seconds of a step under each partition and its levels; infinite where a stage does not fit."""
        return np.array([self._fitting_seconds(tuple(boundaries)) for boundaries in partitions.tolist()])

    def bound(self, partitions: IntArray) -> FloatArray:
        """Lower bounds of `step_seconds`, of the same shapes."""
        # The slowest stage is busy with every micro-batch of the step, recomputation included.
        stages = (np.arange(self.num_stages), partitions[:, :-1], partitions[:, 1:])
        recompute = self.recompute[stages]
        busy = self.packing.micro_batches * (self.average.mean.stage[stages] + recompute).max(axis=1)
        bound: FloatArray = np.maximum(busy, _mean(problem.bound(partitions) for problem in self.steps))
        return bound

    def with_levels(self, levels: tuple[Level, ...]) -> list[PartitionProblem]:
        """The problem of each step, with backward passes that recompute at these levels."""
        columns, layers = [LEVELS.index(level) for level in levels], np.arange(len(levels))
        sums = summed(self._backward[columns, layers].transpose(1, 2, 0))
        return [
            replace(problem, times=problem.times._replace(backward=backward))
            for problem, backward in zip(self.steps, np.split(sums, len(self.steps)), strict=True)
        ]

    @cached_property
    def _backward(self) -> FloatArray:
        """Backward pass of every layer at each level, shape (levels, layers, steps × replicas, micro-batches)."""
        layers = self.profile.layers
        # A level that a layer does not offer has the seconds of "none"; `choose_levels` never takes it.
        times = [
            step_times(self.profile, self._loads, self.links, recompute=self.profile.levels_like([level] * len(layers)))
            for level in LEVELS
        ]
        sums = np.array([level.backward for level in times])
        # StepTimes holds sums over layers: take differences, so that layers can be summed again at any mix of levels.
        return np.moveaxis(np.diff(sums, axis=-1), -1, 1)

    def _problem(self, loads: Sequence[Load]) -> PartitionProblem:
        times = step_times(self.profile, loads, self.links, zero_stage=self.layout.zero_stage)
        return PartitionProblem(self.profile, times, self.schedule, mode_of(self.schedule, "rendezvous"))

    def _split(self, all_steps: PartitionProblem) -> list[PartitionProblem]:
        # ``all_steps`` counts the replicas of all steps as those of one: what depends on their number comes from a
        # single step.
        first, count = self._problem(self.packing.steps[0]).times, len(self.packing.steps)
        whole = {name: getattr(first, name) for name in ("reduce", "gather", "optimizer")}
        names = [name for name in first._fields if name not in whole]
        parts = zip(*(np.split(getattr(all_steps.times, name), count) for name in names), strict=True)
        return [
            replace(all_steps, times=first._replace(**dict(zip(names, part, strict=True)), **whole)) for part in parts
        ]

    def _levels(self, stage: int, boundaries: Boundaries) -> tuple[Level, ...]:
        a, b = boundaries[stage], boundaries[stage + 1]
        if (stage, a, b) not in self._chosen:
            budget = self.budgets[stage]
            self._chosen[stage, a, b] = choose_levels(
                self.footprint, stage, range(a, b), self.recompute_seconds, budget
            )
        return self._chosen[stage, a, b]

    def _fitting_seconds(self, boundaries: Boundaries) -> float:
        try:
            levels = self.levels(boundaries)
        except InfeasibleError:
            return np.inf
        row = np.array([boundaries])
        return float(np.mean([problem.evaluate(row)[0] for problem in self.with_levels(levels)]))

    @cached_property
    def _table(self) -> StageTable:
        return StageTable(self.footprint, self.budgets)


def _mean(steps: Iterable[FloatArray]) -> FloatArray:
    mean: FloatArray = np.mean(list(steps), axis=0)
    return mean
