"""Make a plan: partition and recompute levels for every packing and number of stages, and the fastest of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from omnibal.cost import FloatArray
from omnibal.data.lengths import SampleLengths
from omnibal.errors import InfeasibleError, bytes_in_words
from omnibal.families.base import encoder_layers
from omnibal.pipeline.partition import Boundaries, Partition, descend, least_maximum, model_optima
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.plan import Plan
from omnibal.planner.packings import PlanRequest, packings
from omnibal.planner.prediction import predict
from omnibal.planner.step_model import SpreadModel, StepCosts, StepModel, models_of
from omnibal.profile.records import LEVELS, Level, ModelProfile

_FAR = 1e3  # penalty for a stage over its memory budget, in forward passes of the whole model
_FINALISTS = 3  # packings of each schedule that go through local search: those with the fastest proposals
_STARTS = 4  # optima of the closed formula that local search starts from


@dataclass(frozen=True)
class Choice:
    model: StepModel
    boundaries: Boundaries
    step_seconds: float
    """Mean over the steps of the packing."""

    @property
    def partition(self) -> Partition:
        return Partition(self.boundaries)

    @property
    def plan(self) -> Plan:
        return self.model.plan(self.boundaries)

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
    return _best(model, descend(best, seconds, model.evaluate, model.bound))


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
    plan: Plan
    """Its layout, cut and recompute levels; layers of a spread encoder are counted with the first stage."""
    step_seconds: float
    """Mean over the steps of the packing."""
    recompute_seconds: float
    """Seconds of all devices together that a step recomputes."""
    peak_bytes: int
    """What the fullest device holds."""


def placed_step(costs: StepCosts, schedule: ScheduleName, level: Level = "none") -> PlacedStep:
    """The closed formula's best partition, its levels, and the mean seconds of a step.

    Args:
        costs: Their layout is one pipeline through encoder and LLM, or one of each where both have devices of their own
            (DistTrain), or that of the LLM where the encoder is spread.
        schedule: What the LLM's stages run.
        level: What a spread encoder recomputes: ``"none"`` keeps its activations through the pipeline.

    Raises:
        InfeasibleError: A device does not fit what it must hold; ``missing_bytes`` says by how much.
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
    choice: Choice
    """The choice that the plan was made of: the first of ``tried``, unless trials on the engine preferred another."""
    tried: tuple[Choice, ...]
    """A choice for every packing and number of stages that fits, fastest per sample first."""

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
        raise _infeasible(models)
    # A step of other samples than were asked for trains another way: without a plan that keeps them, the nearest count.
    off = {model: abs(model.packing.samples_per_step / request.global_batch - 1) for model in proposals}
    most = max(request.batch_tolerance, min(off.values()))
    return {model: choice for model, choice in proposals.items() if off[model] <= most}


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
    return replace(plan, predicted=predict(model.whole, plan, model.packing))
