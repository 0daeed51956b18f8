"""What a search of the planner searches: the step of one packing, layout and schedule, by where the model is cut.

    StepCosts    what every micro-batch costs in every layer, whatever the schedule and the cut; made once a packing
    StepModel    a cut's recompute levels (the least that fit the budgets), its simulated seconds, and a bound on them
    SpreadModel  a StepModel of the LLM's pipeline alone, with a spread encoder before and behind it

`omnibal.planner.search` asks a StepModel for ``recompute`` and ``problem.mean`` to propose cuts by a formula, and for
``evaluate`` and ``bound`` to improve them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from omnibal.cluster import Layout, Links
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.errors import InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import Footprint, SpreadFootprint
from omnibal.memory.recompute import StageTable, choose_levels, recompute_seconds
from omnibal.pipeline.partition import Boundaries, Partition, least_maximum
from omnibal.pipeline.schedule import ScheduleName, schedule_of
from omnibal.pipeline.search import PartitionProblem
from omnibal.pipeline.simulate import mode_of
from omnibal.pipeline.times import (
    StepTimes,
    Unit,
    backward_of_layers,
    numbered,
    share_of_step,
    split_profile,
    step_times,
    summed,
)
from omnibal.plan import Plan
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.profile.records import LEVELS, Level, ModelProfile, every_layer


@dataclass(frozen=True, eq=False)
class StepCosts:
    """What the micro-batches of one packing cost under one layout, whatever the schedule and the partition."""

    profile: ModelProfile
    packing: Packing
    layout: Layout
    request: PlanRequest

    @cached_property
    def links(self) -> Links:
        return self.request.cluster.links_of(self.layout)

    @cached_property
    def behind(self) -> StepCosts:
        """The LLM's by itself, where the encoder is spread."""
        return StepCosts(split_profile(self.profile)[1], self.packing, self.layout.parts[1], self.request)

    @cached_property
    def turns(self) -> FloatArray:
        """Micro-batches that a replica of each stage runs for each one of the LLM's, shape (stages, 1, 1)."""
        replicas = [self.layout.shape(stage)[0] for stage in range(self.layout.num_stages)]
        return self.layout.num_replicas / np.array(replicas)[:, None, None]

    @cached_property
    def times(self) -> StepTimes:
        """Seconds of the replicas of all steps, step after step; nothing recomputes."""
        unit, encoder = None, self.layout.encoder
        if encoder is not None:
            own = self.request.cluster.links_of(self.layout, of_encoder=True)
            unit = Unit(encoder_layers(self.profile.layers), encoder.num_replicas, own)
        zero, replicas = self.layout.zero_stage, self.layout.num_replicas
        return step_times(self.profile, self._loads, self.links, zero_stage=zero, num_replicas=replicas, unit=unit)

    def times_at(self, levels: tuple[Level, ...]) -> StepTimes:
        if set(levels) == {"none"}:
            return self.times
        columns = [LEVELS.index(level) for level in levels]
        of_layers = self._backward[columns, np.arange(len(levels))]
        return self.times._replace(backward=summed(of_layers.transpose(1, 2, 0)))

    @cached_property
    def recompute_seconds(self) -> FloatArray:
        """What each level adds to a mean backward pass, shape (layers, levels)."""
        return recompute_seconds(self.profile, self.packing.all_loads)

    @cached_property
    def _backward(self) -> FloatArray:
        """Backward pass of every layer at each level, shape (levels, layers, *shape of the loads)."""
        # A level that a layer does not offer has the seconds of "none"; `choose_levels` never takes it.
        load, count = Load.stack(self._loads), len(self.profile.layers)
        of_levels = [
            backward_of_layers(self.profile, load, self.profile.levels_like(every_layer(level, count)))
            for level in LEVELS
        ]
        return np.moveaxis(np.array(of_levels), -1, 1)

    @cached_property
    def _loads(self) -> list[Load]:
        """A Load per step and replica; of units one per step, with all micro-batches in the order of their numbers."""
        if self.layout.has_units:
            return [numbered(Load.stack(step)) for step in self.packing.steps]
        return [load for step in self.packing.steps for load in step]


class StepModel:
    """The step of one packing, layout and schedule, as a function of the partition.

    ``budgets`` is the most that a device of each stage may hold; by default that of the request.
    """

    def __init__(
        self, costs: StepCosts, schedule: ScheduleName = "1f1b", budgets: tuple[int, ...] | None = None
    ) -> None:
        self.costs, self.packing, self.layout, self.request = costs, costs.packing, costs.layout, costs.request
        self.profile = self.whole = costs.profile  # ``whole`` is of the model
        self.num_stages = costs.layout.num_stages
        self.schedule_name = schedule
        self.schedule = schedule_of(self.layout, self.packing.micro_batches, schedule)
        self.budgets = budgets or self.request.budgets(self.layout)
        self.footprint = Footprint(
            self.profile, self.packing.largest, self.schedule, self.layout, self.request.cluster.overhead_bytes
        )
        self.problem = PartitionProblem(
            self.profile, costs.times, self.schedule, mode_of(self.schedule, "rendezvous"), len(self.packing.steps)
        )
        self._table = StageTable(self.footprint, self.budgets)
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
        return self._table.least_seconds(self.costs.recompute_seconds)

    @cached_property
    def fits(self) -> bool:
        try:
            least_maximum(self.recompute)
        except InfeasibleError:
            return False
        return True

    @cached_property
    def missing(self) -> tuple[int, Boundaries]:
        """The least bytes that any partition is short of with as much recomputed as possible, and that partition."""
        missing, boundaries = least_maximum(self._table.missing_bytes().astype(np.float64))
        return int(missing), boundaries

    @cached_property
    def busy_seconds(self) -> FloatArray:
        """Seconds that every possible stage computes in a step, recomputation included."""
        return self.packing.micro_batches * (self.costs.turns * (self.problem.mean.stage + self.recompute))

    @cached_property
    def lower_bound_seconds(self) -> float:
        return max(least_maximum(self.busy_seconds)[0], self.problem.lower_bound_seconds)

    def with_budgets(self, budgets: tuple[int, ...]) -> StepModel:
        return StepModel(self.costs, self.schedule_name, budgets)

    def plan(self, boundaries: Boundaries) -> Plan:
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
        """What a step takes under the partition that was chosen, of which `evaluate` said ``seconds``."""
        return seconds

    def levels(self, boundaries: Boundaries) -> tuple[Level, ...]:
        return tuple(level for stage in range(self.num_stages) for level in self._levels(stage, boundaries))

    def evaluate(self, partitions: IntArray) -> FloatArray:
        """Mean seconds of a step under each partition and its levels; infinite where a stage does not fit."""
        return np.array([self._fitting_seconds(boundaries) for boundaries in partitions])

    def bound(self, partitions: IntArray) -> FloatArray:
        # The slowest stage is busy with every micro-batch of the step.
        busy = self.busy_seconds[np.arange(self.num_stages), partitions[:, :-1], partitions[:, 1:]].max(axis=1)
        bound: FloatArray = np.maximum(busy, self.problem.bound(partitions))
        return bound

    def _levels(self, stage: int, boundaries: Boundaries) -> tuple[Level, ...]:
        a, b = boundaries[stage], boundaries[stage + 1]
        if (stage, a, b) not in self._chosen:
            self._chosen[stage, a, b] = choose_levels(
                self.footprint, stage, range(a, b), self.costs.recompute_seconds, self.budgets[stage]
            )
        return self._chosen[stage, a, b]

    def _fitting_seconds(self, boundaries: IntArray) -> float:
        try:
            levels = self.levels(tuple(boundaries.tolist()))
        except InfeasibleError:
            return np.inf
        return self.problem.step_seconds(boundaries, self.costs.times_at(levels))


class SpreadModel(StepModel):
    """The step of an encoder that is spread, as a function of the LLM's partition: boundaries are those of the LLM."""

    # Search compares partitions by the LLM's pipeline alone, beside what the encoder holds: what goes before and behind
    # it hardly depends on the partition. `level` is what the encoder recomputes.

    def __init__(
        self,
        costs: StepCosts,
        schedule: ScheduleName = "1f1b",
        budgets: tuple[int, ...] | None = None,
        *,
        level: Level = "none",
    ) -> None:
        packing, request, behind = costs.packing, costs.request, costs.behind.layout
        self._encoder, self._level, self._spread = split_profile(costs.profile)[0], level, costs
        self._of_encoder = self._encoder.levels_like(every_layer(level, len(self._encoder.layers)))
        loads, overhead = (packing.largest, packing.fullest_mean), request.cluster.overhead_bytes
        table = schedule_of(behind, packing.micro_batches, schedule)
        self.beside = SpreadFootprint(costs.profile, *loads, table, costs.layout, overhead)
        self._device_bytes = request.budgets(behind)
        held = self.beside.beside_bytes(self._of_encoder)
        left = tuple(most - own for most, own in zip(self._device_bytes, held, strict=True))
        super().__init__(costs.behind, schedule, budgets or left)
        self.whole = costs.profile

    def __str__(self) -> str:
        return super().__str__().replace(str(self.layout), str(self._spread.layout), 1)

    @cached_property
    def missing(self) -> tuple[int, Boundaries]:
        missing, boundaries = super().missing
        return missing or max(self._over(boundaries), 0), boundaries

    @cached_property
    def lower_bound_seconds(self) -> float:
        shares = [share_of_step(Load.stack(step).mean(), self._spread.layout) for step in self.packing.steps]
        loads = [(share * self.packing.micro_batches).reshape((1,)) for share in shares]
        times = step_times(self._encoder, loads, self.costs.links, recompute=self._of_encoder)
        encoding = (times.forward + times.backward + times.weight)[:, 0, -1]
        return super().lower_bound_seconds + float(encoding.mean())

    def with_budgets(self, budgets: tuple[int, ...]) -> StepModel:
        return SpreadModel(self._spread, self.schedule_name, budgets, level=self._level)

    def plan(self, boundaries: Boundaries) -> Plan:
        border, behind = len(self._of_encoder), super().plan(boundaries)
        partition = Partition((0, *(border + boundary for boundary in boundaries[1:])))
        levels = self._of_encoder + behind.recompute
        return replace(behind, partition=partition, recompute=levels, layout=self._spread.layout)

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


def models_of(costs: StepCosts, schedule: ScheduleName) -> Sequence[StepModel]:
    """What is searched of a layout: one model, or two of a spread encoder that keeps what it needs or recomputes."""
    if not costs.layout.is_spread:
        return [StepModel(costs, schedule)]
    layers = costs.profile.layers
    is_trained = any(layer.trainable for layer in layers[: encoder_layers(layers)])
    levels: tuple[Level, ...] = ("none", "full") if is_trained else ("none",)
    return [SpreadModel(costs, schedule, level=level) for level in levels]
