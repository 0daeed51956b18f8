"""Make a plan: weigh packings and numbers of stages, and predict the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omnibal.data.lengths import SampleLengths
from omnibal.errors import InfeasibleError
from omnibal.memory.recompute import in_words
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.plan import Plan
from omnibal.planner.packings import packings
from omnibal.planner.prediction import predict
from omnibal.planner.request import PlanRequest
from omnibal.planner.search import Choice, improve, propose, two_phases
from omnibal.planner.step_model import StepModel
from omnibal.profile.records import ModelProfile

_FINALISTS = 3
"""Packings that go through local search under each schedule; the proposals for the others are slower."""


@dataclass(frozen=True)
class PlanResult:
    """A plan and how it came about."""

    plan: Plan
    choice: Choice
    """What the plan is of: the first of those that were tried, unless the engine preferred another."""
    two_phase: Choice | None
    """What planning data, model and memory one after the other gives; None where that does not fit."""
    two_phase_failure: str
    """Why it does not, or nothing."""
    tried: tuple[Choice, ...]
    """A choice for every packing and number of stages that fits, fastest per sample first."""

    def plan_of(self, choice: Choice) -> Plan:
        """The plan that a choice becomes."""
        return _plan(choice, self.plan.made_from)

    @property
    def gain(self) -> float:
        """Share of the two-phase plan's time that a sample takes less, as predicted; 0 where that plan does not fit."""
        return 1 - self.tried[0].sample_seconds / self.two_phase.sample_seconds if self.two_phase else 0.0


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
    search with the simulator. The two-phase plan takes the paper's limits, the best partition for unbounded memory,
    and then the least recompute. The result is never slower: it is searched from there too.

    Args:
        profile: What the layers cost.
        lengths: What samples hold.
        request: Hardware, batch and freedom.
        report: Called with what is being done.

    Raises:
        ConfigError: The request does not fit the model or the data.
        InfeasibleError: Nothing fits; the message says how many bytes are missing.
    """
    models, first_models = [], []
    for layout in request.layouts(profile):
        report(f"packing for {layout}")
        found = packings(lengths, request, layout.num_replicas)
        new = [
            StepModel(profile, packing, layout, request, schedule)
            for packing in found
            for schedule in request.schedules
        ]
        models += new
        first_models.append(new[0])
    proposals: dict[StepModel, Choice] = {}
    for model in models:
        report(f"proposing partitions: {model}")
        if model.missing[0] == 0:
            proposals[model] = propose(model)
    if not proposals:
        raise _infeasible(models)
    baselines, failure = _baselines(first_models, report)
    for model in dict.fromkeys([*_finalists(proposals), *baselines]):
        report(f"searching partitions: {model}")
        starts = [baselines[model].boundaries] if model in baselines else []
        proposals[model] = improve(model, starts)
    tried = tuple(sorted(proposals.values(), key=lambda choice: choice.sample_seconds))
    two_phase = min(baselines.values(), key=lambda choice: choice.sample_seconds, default=None)
    made_from = {
        "profile": profile.content_hash,
        "device": profile.devices,
        "dtype": profile.dtype,
        "versions": dict(profile.versions),
        "frozen": list(profile.frozen_kinds),
        "lengths": lengths.content_hash,
        "request": request.to_record(),
    }
    plan = _plan(tried[0], made_from)
    return PlanResult(plan, tried[0], two_phase, "" if two_phase else failure, tried)


def _finalists(proposals: Mapping[StepModel, Choice]) -> list[StepModel]:
    """Those with the fastest proposals of each schedule."""
    ranking = sorted(proposals, key=lambda model: proposals[model].sample_seconds)
    return [
        model for schedule in SCHEDULES for model in [m for m in ranking if m.schedule_name == schedule][:_FINALISTS]
    ]


def _baselines(models: Sequence[StepModel], report: Callable[[str], object]) -> tuple[dict[StepModel, Choice], str]:
    """The two-phase choice of every model for which it fits, and the reason of the last one that does not."""
    found: dict[StepModel, Choice] = {}
    failure = ""
    for model in models:
        report(f"planning in two phases: {model}")
        try:
            found[model] = two_phases(model)
        except InfeasibleError as error:
            failure = str(error)
    return found, failure


def _infeasible(models: Sequence[StepModel]) -> InfeasibleError:
    """An error about the model that is short of the fewest bytes."""
    best = min(models, key=lambda model: model.missing[0])
    missing, boundaries = best.missing
    return InfeasibleError(
        f"memory must hold every stage, got {in_words(max(best.budgets))} a device beside the head room: for {best}, "
        f"{missing} bytes ({in_words(missing)}) are missing even with as much recomputed as possible and the partition "
        f"{boundaries}; use more or larger devices, or smaller packs"
    )


def _plan(choice: Choice, made_from: Mapping[str, Any]) -> Plan:
    model = choice.model
    plan = replace(choice.plan, made_from=made_from)
    return replace(plan, predicted=predict(model.profile, plan, model.packing, mode=model.request.mode))
