"""Make a plan: partition and recompute levels for every packing and number of stages, and the fastest of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import FloatArray, IntArray, Load
from omnibal.data.lengths import SampleLengths
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import Footprint
from omnibal.memory.recompute import StageTable, choose_levels, recompute_seconds
from omnibal.pipeline.optimize import Boundaries, descend, least_maximum, model_optima
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.problem import PartitionProblem
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.pipeline.simulate import mode_of
from omnibal.pipeline.times import step_times, summed
from omnibal.pipeline.units import UnitProblem, schedule_of, unit_times
from omnibal.plan import Plan
from omnibal.planner.packings import Packing, PlanRequest, packings
from omnibal.planner.prediction import predict
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
        times = [
            step_times(self.profile, self._loads, self.links, recompute=self.profile.levels_like([level] * len(layers)))
            for level in LEVELS
        ]
        sums = np.array([level.backward for level in times])
        # StepTimes holds sums over layers: take differences, so that layers can be summed again at any mix of levels.
        return np.moveaxis(np.diff(sums, axis=-1), -1, 1)

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


_FAR = 1e3  # penalty for a stage over its memory budget, in forward passes of the whole model
_FINALISTS = 3  # packings of each schedule that go through local search: those with the fastest proposals
_STARTS = 4  # optima of the closed formula that local search starts from


@dataclass(frozen=True)
class Choice:
    """A partition of one packing's step."""

    model: StepModel
    boundaries: Boundaries
    step_seconds: float
    """Mean over the steps of the packing."""

    @property
    def partition(self) -> Partition:
        return Partition(self.boundaries)

    @property
    def plan(self) -> Plan:
        """The choice as a plan, without a prediction."""
        model = self.model
        return Plan(
            limits=model.packing.limits,
            micro_batches=model.packing.micro_batches,
            partition=self.partition,
            recompute=model.levels(self.boundaries),
            schedule=model.schedule_name,
            layout=model.layout,
            cluster=model.request.cluster,
        )

    @property
    def sample_seconds(self) -> float:
        """Seconds per sample, by which choices of different packings are compared."""
        return self.step_seconds / self.model.packing.samples_per_step


def propose(model: StepModel) -> Choice:
    """The best partition that a closed formula for the step finds, each stage with the least recompute that fits."""
    return _best(model, _formula(model, model.recompute))


def improve(model: StepModel) -> Choice:
    """The best partition that local search with the simulator finds, from the formula's optima."""
    # The optima for unbounded memory are starts, too: without recomputation the formula has the better optima if memory
    # hardly binds.
    seconds = _formula(model, np.zeros_like(model.recompute)) | _formula(model, model.recompute)
    best = sorted(seconds, key=seconds.__getitem__)[:_STARTS]
    return _best(model, descend(best, seconds, model.step_seconds, model.bound))


def retreat(choice: Choice, missing_bytes: Sequence[int]) -> Choice:
    """The same partition with more recomputation where a trial ran out of memory.

    ``missing_bytes`` is what each stage was short of, zero where it fitted.

    Source: Yao et al., OmniBal, ICML 2025, section 4.3: failed trials recompute more by the remaining memory.
    """
    # A stage that was short of n bytes gets the levels that are predicted to hold n bytes less at the least time: the
    # prediction erred in the sum, but its differences between levels hold. Other stages keep their levels.
    model = choice.model
    held = model.footprint.stages(choice.partition, model.levels(choice.boundaries))
    budgets = tuple(
        stage.total - missing if missing else budget
        for stage, missing, budget in zip(held, missing_bytes, model.budgets, strict=True)
    )
    smaller = StepModel(model.profile, model.packing, model.layout, model.request, model.schedule_name, budgets)
    smaller.levels(choice.boundaries)  # says what is missing
    return Choice(smaller, choice.boundaries, float(smaller.step_seconds(np.array([choice.boundaries]))[0]))


def _formula(model: StepModel, recompute: FloatArray) -> dict[Boundaries, float]:
    """Simulated seconds of the partitions that the closed formula finds best."""
    average = model.average.mean
    whole = average.passing[0, 0, -1]
    # A stage that does not fit has an infinite pace. Its passage must be finite, since infinite ones could not be
    # summed, but too long for any shortest way.
    pace = model.turns * (average.pace + recompute)
    passing = average.passing + np.where(np.isfinite(pace), recompute, _FAR * whole)
    passing[0, 0, -1] = whole  # the entry of the whole model is the unit in which the formula measures evenness
    optima = model_optima(pace, passing, model.packing.micro_batches)
    if model.layout.has_units:
        optima.append(_even_parts(pace, model.layout.encoder_stages))
    return dict(zip(optima, model.step_seconds(np.array(optima)).tolist(), strict=True))


def _even_parts(pace: FloatArray, own: int) -> Boundaries:
    """The cut with the least slowest stage of the encoder, the first ``own`` stages, and of the LLM, each by itself."""
    # The formula knows one pace: beside a slow part, it cuts the other one by its passage alone.
    stages, cuts = np.arange(len(pace)), list[Boundaries]()
    for counts in (stages < own, stages >= own):
        weight = np.where(counts, 1, 1e-9)[:, None, None]
        cuts.append(least_maximum(pace * weight)[1])
    return (*cuts[0][:own], *cuts[1][own:])


def _best(model: StepModel, seconds: dict[Boundaries, float]) -> Choice:
    boundaries = min(seconds, key=lambda found: (seconds[found], found))
    return Choice(model, boundaries, seconds[boundaries])


@dataclass(frozen=True)
class PlanResult:
    """A plan and how it came about."""

    plan: Plan
    choice: Choice
    """The choice that the plan was made of: the first of ``tried``, unless trials on the engine preferred another."""
    tried: tuple[Choice, ...]
    """A choice for every packing and number of stages that fits, fastest per sample first."""

    def plan_of(self, choice: Choice) -> Plan:
        """The plan of another choice of the same search."""
        return _plan(choice, self.plan.made_from)


def make_plan(
    profile: ModelProfile,
    lengths: SampleLengths,
    request: PlanRequest,
    *,
    report: Callable[[str], object] = lambda doing: None,
) -> PlanResult:
    """Find pack limits, partition and recompute levels (and the number of stages) of the fastest step that fits.

    For every number of stages, schedule and packing that keeps the global batch, dynamic programming proposes
    partitions whose stages recompute as little as they must; the packings with the fastest proposals go through local
    search with the simulator.

    Args:
        profile: What the layers cost.
        lengths: What samples hold.
        request: Hardware, batch and freedom.
        report: Called with what is being done.

    Raises:
        ConfigError: The request does not fit the model or the data.
        InfeasibleError: Nothing fits; the message says how many bytes are missing.
    """
    # 1. Every packing of every layout under every schedule is a problem of its own.
    models = []
    for layout in request.layouts(profile):
        report(f"packing for {layout}")
        models += [
            StepModel(profile, packing, layout, request, schedule)
            for packing in packings(lengths, request, layout.num_replicas)
            for schedule in request.schedules
        ]
    # 2. The closed formula proposes a partition for each: cheap, and good enough to tell which deserve a search.
    proposals: dict[StepModel, Choice] = {}
    for number, model in enumerate(models, 1):
        report(f"proposing partitions, {number} of {len(models)}: {model}")
        if model.missing[0] == 0:
            proposals[model] = propose(model)
    if not proposals:
        raise _infeasible(models)
    # 3. The simulator searches around the best proposals.
    finalists = _finalists(proposals)
    for number, model in enumerate(finalists, 1):
        report(f"searching partitions, {number} of {len(finalists)}: {model}")
        proposals[model] = improve(model)
    tried = tuple(sorted(proposals.values(), key=lambda choice: choice.sample_seconds))
    made_from = {
        "profile": profile.content_hash,
        "device": profile.devices,
        "dtype": profile.dtype,
        "versions": dict(profile.versions),
        "frozen": list(profile.frozen_parts),
        "adapters": profile.adapter_parameters,
        "lengths": lengths.content_hash,
        "request": request.to_record(),
    }
    plan = _plan(tried[0], made_from)
    return PlanResult(plan, tried[0], tried)


def _finalists(proposals: Mapping[StepModel, Choice]) -> list[StepModel]:
    # The models with the fastest proposals of each schedule.
    ranking = sorted(proposals, key=lambda model: proposals[model].sample_seconds)
    return [
        model for schedule in SCHEDULES for model in [m for m in ranking if m.schedule_name == schedule][:_FINALISTS]
    ]


def _infeasible(models: Sequence[StepModel]) -> InfeasibleError:
    best = min(models, key=lambda model: model.missing[0])
    missing, boundaries = best.missing
    return InfeasibleError(
        f"memory must hold every stage, got {bytes_in_words(max(best.budgets))} a device beside the head room: for "
        f"{best}, {missing} bytes ({bytes_in_words(missing)}) are missing even with as much recomputed as possible and "
        f"the partition {boundaries}; use more or larger devices, or smaller packs"
    )


def _plan(choice: Choice, made_from: Mapping[str, Any]) -> Plan:
    model = choice.model
    plan = replace(choice.plan, made_from=made_from)
    return replace(plan, predicted=predict(model.profile, plan, model.packing))
