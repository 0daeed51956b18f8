"""Make a plan, say what it will be like, and what it gains.

propose, improve  a partition and recompute levels for one packing, layout and schedule: by a formula; by search
placed_step       one layout's best step by the formula, for `omnibal advise --layouts`
make_plan         the fastest of all packings, layouts and schedules
predict           what a plan's steps take and its devices hold
variants_up_to    from random batches to the plan, one idea after the other
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from statistics import fmean
from typing import Any, Final

import numpy as np

from omnibal.cost import FloatArray, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import random_padded_steps
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.families.base import encoder_layers
from omnibal.memory.recompute import recompute_seconds
from omnibal.pipeline.partition import Boundaries, Partition, cut_parts, descend, least_maximum, model_optima
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.pipeline.simulate import StepSimulation
from omnibal.pipeline.times import step_times, summed
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.planner.packings import Packing, PlanRequest, StepLoads, packings, spread_steps
from omnibal.planner.step_model import SpreadModel, StepCosts, StepModel, models_of
from omnibal.profile.records import LEVELS, Level, ModelProfile, every_layer

_FAR = 1e3  # penalty for a stage over its memory budget, in forward passes of the whole model
_FINALISTS = 3  # packings of each schedule that go through local search: those with the fastest proposals
_STARTS = 4  # optima of the closed formula that local search starts from
RANDOM: Final = "random batches"  # the name of the first variant


@dataclass(frozen=True)
class Choice:
    model: StepModel
    boundaries: Boundaries
    step_seconds: float  # mean over the steps of the packing

    @property
    def partition(self) -> Partition:
        return Partition(self.boundaries)

    @property
    def plan(self) -> Plan:
        return self.model.plan(self.boundaries)

    @property
    def sample_seconds(self) -> float:
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
    return _best(model, descend(best, seconds, model.evaluate, model.bound))


def retreat(choice: Choice, missing_bytes: Sequence[int]) -> Choice:
    """The same partition with more recomputation where a trial ran out of memory, by each stage's missing bytes or 0.

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
    smaller = model.with_budgets(budgets)
    smaller.levels(choice.boundaries)  # says what is missing
    return _best(smaller, {choice.boundaries: float(smaller.evaluate(np.array([choice.boundaries]))[0])})


def _formula(model: StepModel, recompute: FloatArray) -> dict[Boundaries, float]:
    """Simulated seconds of the partitions that the closed formula finds best."""
    average = model.problem.mean
    whole = average.passing[0, 0, -1]
    # A stage that does not fit has an infinite pace. Its passage must be finite, since infinite ones could not be
    # summed, but too long for any shortest way.
    pace = model.costs.turns * (average.pace + recompute)
    passing = average.passing + np.where(np.isfinite(pace), recompute, _FAR * whole)
    passing[0, 0, -1] = whole  # the entry of the whole model is the unit in which the formula measures evenness
    optima = model_optima(pace, passing, model.packing.micro_batches)
    if model.layout.has_units:
        optima.append(_even_parts(pace, model.layout.encoder_stages))
    return dict(zip(optima, model.evaluate(np.array(optima)).tolist(), strict=True))


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
    return Choice(model, boundaries, model.chosen_seconds(boundaries, seconds[boundaries]))


@dataclass(frozen=True)
class PlacedStep:
    plan: Plan  # its layout, cut and recompute levels; layers of a spread encoder are counted with the first stage
    step_seconds: float  # mean over the steps of the packing
    recompute_seconds: float  # seconds of all devices together that a step recomputes
    peak_bytes: int  # what the fullest device holds


def placed_step(costs: StepCosts, schedule: ScheduleName, level: Level = "none") -> PlacedStep:
    """The closed formula's best partition, its levels, and the mean seconds of a step.

    The costs' layout is one pipeline through encoder and LLM, or one of each where both have devices of their own, or
    that of the LLM where the encoder is spread; ``level`` is what a spread encoder recomputes.
    """
    is_spread, packing = costs.layout.is_spread, costs.packing
    model = SpreadModel(costs, schedule, level=level) if is_spread else StepModel(costs, schedule)
    if not model.fits:
        raise InfeasibleError(f"memory must hold every stage of {model}", missing_bytes=model.missing[0])
    choice = propose(model)
    plan = choice.plan
    held = plan.footprint(costs.profile, packing.largest, packing.fullest_mean).stages(plan.partition, plan.recompute)
    if not isfinite(choice.step_seconds):
        budgets = costs.request.budgets(plan.layout)
        over = max(stage.total - budget for stage, budget in zip(held, budgets, strict=True))
        raise InfeasibleError("the spread encoder must fit beside the LLM's state", missing_bytes=over)
    peak = max(stage.total for stage in held)
    return PlacedStep(plan, choice.step_seconds, _recomputed(costs, plan.recompute), peak)


def _recomputed(costs: StepCosts, levels: tuple[Level, ...]) -> float:
    """Seconds of all devices together that all micro-batches of a mean step recompute."""
    layout, layers, shape = costs.layout, costs.profile.layers, costs.packing.all_loads.shape
    seconds = costs.recompute_seconds[np.arange(len(levels)), [LEVELS.index(level) for level in levels]]
    border = 0 if layout.encoder is None else encoder_layers(layers)
    encoder = layout.num_tensor if layout.encoder is None else layout.encoder.num_tensor
    whole = float(seconds[:border].sum()) * encoder + float(seconds[border:].sum()) * layout.num_tensor
    return whole * shape[1] * shape[2]


@dataclass(frozen=True)
class PlanResult:
    plan: Plan
    # The choice that the plan was made of: the first of tried, unless trials on the engine preferred another
    choice: Choice
    tried: tuple[Choice, ...]  # a choice for every packing and number of stages that fits, fastest per sample first

    def plan_of(self, choice: Choice) -> Plan:
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
            model
            for packing in packings(lengths, request, layout.num_replicas)
            for costs in [StepCosts(profile, packing, layout, request)]
            for schedule in request.schedules
            for model in models_of(costs, schedule)
        ]
    # 2. The closed formula proposes a partition for each: cheap, and good enough to tell which deserve a search.
    proposals = _proposals(models, request, report)
    # 3. The simulator searches around the best proposals of each schedule.
    ranking = sorted(proposals, key=lambda model: proposals[model].sample_seconds)
    finalists = [
        model
        for schedule in SCHEDULES
        for model in [model for model in ranking if model.schedule_name == schedule][:_FINALISTS]
    ]
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


def _proposals(
    models: Sequence[StepModel], request: PlanRequest, report: Callable[[str], object]
) -> dict[StepModel, Choice]:
    proposals: dict[StepModel, Choice] = {}
    for number, model in enumerate(models, 1):
        report(f"proposing partitions, {number} of {len(models)}: {model}")
        if model.fits:
            proposals[model] = propose(model)
    proposals = {model: choice for model, choice in proposals.items() if isfinite(choice.step_seconds)}
    if not proposals:
        best = min(models, key=lambda model: model.missing[0])
        missing, boundaries = best.missing
        raise InfeasibleError(
            f"memory must hold every stage, got {bytes_in_words(max(best.budgets))} a device beside the head room: for "
            f"{best}, {missing} bytes ({bytes_in_words(missing)}) are missing even with as much recomputed as possible "
            f"and the partition {boundaries}; use more or larger devices, or smaller packs"
        )
    # A step of other samples than were asked for trains another way: without a plan that keeps them, the nearest count.
    off = {model: abs(model.packing.samples_per_step / request.global_batch - 1) for model in proposals}
    most = max(request.batch_tolerance, min(off.values()))
    return {model: choice for model, choice in proposals.items() if off[model] <= most}


def _plan(choice: Choice, made_from: Mapping[str, Any]) -> Plan:
    model = choice.model
    plan = replace(choice.plan, made_from=made_from)
    return replace(plan, predicted=predict(model.whole, plan, model.packing))


def predict(profile: ModelProfile, plan: Plan, packing: Packing) -> Prediction:
    """Means over the steps of a packing; memory is that of the largest possible micro-batch."""
    steps = [plan.simulate(profile, loads) for loads in packing.steps]
    # Waiting for the slowest replica is idle time of the others, so all share its makespan.
    busy = np.mean(
        [replica.stage_busy_seconds / step.pipeline_seconds for step in steps for replica in step.replicas], axis=0
    )
    loads = [load for step in packing.steps for load in step]
    times = step_times(profile, loads, plan.links)
    levels = [LEVELS.index(level) for level in plan.recompute]
    footprint = plan.footprint(profile, packing.largest, packing.fullest_mean)
    memory = footprint.stages(plan.partition, plan.recompute)
    at_levels, stages = recompute_seconds(profile, Load.stack(loads)), []
    again = summed(at_levels[np.arange(len(levels)), levels])
    # Of a spread encoder, whose layers are counted with the first stage, every device has its share.
    on_all = encoder_layers(profile.layers) if plan.layout.is_spread else 0
    share = plan.layout.num_replicas / plan.layout.num_devices

    def mean(sums: FloatArray, layers: range) -> float:
        own, encoder = range(max(layers.start, on_all), layers.stop), range(on_all)
        return _mean_between(sums, own) + share * _mean_between(sums, encoder)

    for stage in range(plan.num_stages):
        layers = plan.partition.layers(stage)
        recompute = mean(again, layers)
        stages.append(
            StagePrediction(
                forward_seconds=_short(mean(times.forward, layers)),
                backward_seconds=_short(mean(times.backward + times.weight, layers) + recompute),
                recompute_seconds=_short(recompute),
                idle_ratio=_short(1 - busy[stage]),
                pending_bytes=int(footprint.pending_bytes(stage)[layers.start, layers.stop]),
                memory=memory[stage],
            )
        )
    return Prediction(
        step_seconds=_short(fmean(step.step_seconds for step in steps)),
        samples_per_step=_short(packing.samples_per_step),
        bubble_ratio=_short(fmean(step.bubble_ratio for step in steps)),
        stages=tuple(stages),
    )


def _mean_between(sums: FloatArray, layers: range) -> float:
    return float((sums[..., layers.stop] - sums[..., layers.start]).mean())


def _short(value: float) -> float:
    return float(f"{value:.6g}")


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to train, with ``name`` saying what has been balanced."""

    name: str
    profile: ModelProfile
    plan: Plan
    steps: StepLoads
    samples_per_step: float

    @cached_property
    def simulated(self) -> tuple[StepSimulation, ...]:
        return tuple(self.plan.simulate(self.profile, loads) for loads in self.steps)

    @property
    def step_seconds(self) -> float:
        return fmean(step.step_seconds for step in self.simulated)

    @property
    def samples_per_second(self) -> float:
        return self.samples_per_step / self.step_seconds

    @property
    def bubble_ratio(self) -> float:
        return fmean(step.bubble_ratio for step in self.simulated)

    @cached_property
    def load(self) -> Load:
        return Load.stack(Load.stack(step) for step in self.steps)


def variants_up_to(
    plan: Plan, profile: ModelProfile, lengths: SampleLengths, *, batch_size: int, steps: int
) -> tuple[Variant, ...]:
    """From random batches to the plan: nothing balanced, then data, model, memory, and a schedule other than 1F1B."""
    # The first variant trains on random padded micro-batches of `batch_size` samples, with about as many samples a step
    # as the plan, cut by parameters and with every layer recomputed.
    num_replicas = plan.layout.num_replicas
    epoch = arrange_epoch(lengths, plan.limits, num_replicas=num_replicas, micro_batches=plan.micro_batches)
    packed = Packing.of(epoch, lengths, plan.limits, spread_steps(epoch.num_steps, steps))
    alike = round(packed.samples_per_step / (num_replicas * batch_size))
    micro_batches = max(1, min(alike, len(lengths) // (num_replicas * batch_size)))  # a step of few data is all of them
    padded = random_padded_steps(
        lengths, batch_size=batch_size, num_replicas=num_replicas, micro_batches=micro_batches, steps=steps
    )
    full, trained = every_layer("full", len(profile.layers)), [layer.gradient_bytes for layer in profile.layers]
    unsplit = replace(plan, schedule="1f1b", predicted=None)
    cut = replace(unsplit, partition=cut_parts(profile.layers, trained, plan.layout), recompute=full)
    before: StepLoads = tuple(tuple(step) for step in padded)
    samples = float(num_replicas * micro_batches * batch_size)
    random = Variant(RANDOM, profile, replace(cut, micro_batches=micro_batches), before, samples)
    plans = {"+ data": cut, "+ model": replace(unsplit, recompute=full), "+ memory": unsplit}
    if plan.schedule != "1f1b":
        plans["+ schedule"] = plan
    balanced = [Variant(name, profile, found, packed.steps, packed.samples_per_step) for name, found in plans.items()]
    return (random, *balanced)
