"""The step of one packing under one layout and schedule, as a function of where the model is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.errors import InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import Footprint
from omnibal.memory.recompute import StageTable, choose_levels, recompute_seconds
from omnibal.memory.spread import SpreadFootprint
from omnibal.pipeline.optimize import Boundaries, least_maximum
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.problem import PartitionProblem
from omnibal.pipeline.schedule import ScheduleName
from omnibal.pipeline.simulate import mode_of
from omnibal.pipeline.spread import share_of_step, split_profile
from omnibal.pipeline.times import backward_of_layers, step_times, summed
from omnibal.pipeline.units import UnitProblem, schedule_of, unit_times
from omnibal.plan import Plan
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.profile.records import LEVELS, Level, ModelProfile, every_layer


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
        self.whole = profile  # of the model
        self.num_stages, self.links = layout.num_stages, request.cluster.links_of(layout)
        self.schedule_name, self.schedule = schedule, schedule_of(layout, packing.micro_batches, schedule)
        self.budgets = budgets or request.budgets(layout)
        self.footprint = Footprint(profile, packing.largest, self.schedule, layout, request.cluster.overhead_bytes)
        self._loads = [load for step in packing.steps for load in step]
        # All steps as replicas of one step, for means over micro-batches; and a problem per step. Both do not
        # recompute.
        self.average = self._problem(self._loads)
        self.steps = self._split(self.average)
        self.recompute_seconds = recompute_seconds(profile, packing.all_loads)
        # Micro-batches that a replica of each stage runs for each one of the LLM's: (stages, 1, 1)
        replicas = [layout.shape(stage)[0] for stage in range(self.num_stages)]
        self.turns = layout.num_replicas / np.array(replicas)[:, None, None]
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
        seconds = self.turns * (self.average.mean.stage + self.recompute)
        busy = self.packing.micro_batches * least_maximum(seconds)[0]
        return max(busy, fmean(problem.lower_bound_seconds for problem in self.steps))

    def with_budgets(self, budgets: tuple[int, ...]) -> StepModel:
        """A model of this step whose devices may hold other numbers of bytes."""
        return StepModel(self.profile, self.packing, self.layout, self.request, self.schedule_name, budgets)

    def plan(self, boundaries: Boundaries) -> Plan:
        """The plan of a partition and its levels, without a prediction."""
        return Plan(
            limits=self.packing.limits,
            micro_batches=self.packing.micro_batches,
            partition=Partition(boundaries),
            recompute=self.levels(boundaries),
            schedule=self.schedule_name,
            layout=self.layout,
            cluster=self.request.cluster,
        )

    def chosen_seconds(self, boundaries: Boundaries, seconds: float) -> float:
        """What a step takes under the partition that was chosen, of which `step_seconds` said ``seconds``."""
        return seconds

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
        seconds = self.turns[:, 0, 0] * (self.average.mean.stage[stages] + self.recompute[stages])
        busy = self.packing.micro_batches * seconds.max(axis=1)
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
        load = Load.stack(self._loads)
        of_levels = [
            backward_of_layers(self.profile, load, self.profile.levels_like([level] * len(layers))) for level in LEVELS
        ]
        return np.moveaxis(np.array(of_levels), -1, 1)

    def _problem(self, loads: Sequence[Load]) -> PartitionProblem:
        if self.layout.has_units:
            cluster, border = self.request.cluster, encoder_layers(self.profile.layers)
            own = cluster.links_of(self.layout, of_encoder=True)
            times = unit_times(self.profile, loads, self.layout, border, self.links, encoder_links=own)
            return UnitProblem.of(self.profile, times, self.layout, self.schedule_name)
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


class SpreadModel(StepModel):
    """The step of an encoder that is spread, as a function of the LLM's partition: boundaries are those of the LLM.

    Search compares partitions by the LLM's pipeline alone, beside what the encoder holds: what goes before and behind
    it hardly depends on the partition. ``level`` is what the encoder recomputes.
    """

    def __init__(
        self,
        profile: ModelProfile,
        packing: Packing,
        layout: Layout,
        request: PlanRequest,
        schedule: ScheduleName = "1f1b",
        budgets: tuple[int, ...] | None = None,
        *,
        level: Level = "none",
    ) -> None:
        encoder, language = split_profile(profile)
        _, behind = layout.parts
        self._of_encoder = encoder.levels_like(every_layer(level, len(encoder.layers)))
        self._encoder, self._level, self._spread = encoder, level, layout
        self.beside = SpreadFootprint(
            profile, packing.largest, packing.fullest_mean, schedule_of(behind, packing.micro_batches, schedule),
            layout, request.cluster.overhead_bytes,
        )  # fmt: skip
        self._device_bytes = request.budgets(behind)
        held = self.beside.beside_bytes(self._of_encoder)
        left = tuple(most - own for most, own in zip(self._device_bytes, held, strict=True))
        super().__init__(language, packing, behind, request, schedule, budgets or left)
        self.whole = profile

    def __str__(self) -> str:
        return super().__str__().replace(str(self.layout), str(self._spread), 1)

    @cached_property
    def missing(self) -> tuple[int, Boundaries]:
        missing, boundaries = super().missing
        return missing or max(self._over(boundaries), 0), boundaries

    @cached_property
    def lower_bound_seconds(self) -> float:
        shares = [share_of_step(Load.stack(step).mean(), self._spread) for step in self.packing.steps]
        loads = [(share * self.packing.micro_batches).reshape((1,)) for share in shares]
        times = step_times(self._encoder, loads, self.links, recompute=self._of_encoder)
        encoding = (times.forward + times.backward + times.weight)[:, 0, -1]
        return super().lower_bound_seconds + float(encoding.mean())

    def with_budgets(self, budgets: tuple[int, ...]) -> StepModel:
        return SpreadModel(
            self.whole, self.packing, self._spread, self.request, self.schedule_name, budgets, level=self._level
        )

    def plan(self, boundaries: Boundaries) -> Plan:
        border = len(self._of_encoder)
        return Plan(
            limits=self.packing.limits,
            micro_batches=self.packing.micro_batches,
            partition=Partition((0, *(border + boundary for boundary in boundaries[1:]))),
            recompute=self._of_encoder + self.levels(boundaries),
            schedule=self.schedule_name,
            layout=self._spread,
            cluster=self.request.cluster,
        )

    def chosen_seconds(self, boundaries: Boundaries, seconds: float) -> float:
        if not np.isfinite(seconds) or self._over(boundaries) > 0:
            return np.inf
        plan = self.plan(boundaries)
        return fmean(plan.simulate(self.whole, loads).step_seconds for loads in self.packing.steps)

    def _over(self, boundaries: Boundaries) -> int:
        """Bytes that a device is short of when the encoder runs, beside the LLM's state."""
        plan = self.plan(boundaries)
        held = self.beside.stages(plan.partition, plan.recompute)
        return max(stage.total - most for stage, most in zip(held, self._device_bytes, strict=True))


def models_of(
    profile: ModelProfile, packing: Packing, layout: Layout, request: PlanRequest, schedule: ScheduleName
) -> list[StepModel]:
    """What is searched of a layout: one model, or two of a spread encoder that keeps what it needs or recomputes."""
    if not layout.is_spread:
        return [StepModel(profile, packing, layout, request, schedule)]
    is_trained = any(layer.trainable for layer in profile.layers[: encoder_layers(profile.layers)])
    levels: tuple[Level, ...] = ("none", "full") if is_trained else ("none",)
    return [SpreadModel(profile, packing, layout, request, schedule, level=level) for level in levels]
