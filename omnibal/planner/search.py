"""Partition and recompute levels for one packing: together, and one after the other as the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnibal.cost import FloatArray
from omnibal.pipeline.optimize import Boundaries, Evaluate, descend, model_optima
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from omnibal.planner.step_model import StepModel

_FAR = 1e3
_STARTS = 4
"""Optima of the closed formula that local search starts from."""


@dataclass(frozen=True)
class Choice:
    """A partition of one packing's step."""

    model: StepModel
    boundaries: Boundaries
    step_seconds: float
    """Mean over the packing's steps."""

    @property
    def partition(self) -> Partition:
        """The boundaries as a record."""
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
        """Seconds per sample: what choices of different packings are compared by."""
        return self.step_seconds / self.model.packing.samples_per_step


def propose(model: StepModel) -> Choice:
    """The best of the partitions that a closed formula for the step finds, recomputation included.

    The formula's optima are found by dynamic programming over stages whose cost contains the least recompute that makes
    them fit (:mod:`omnibal.pipeline.optimize`).

    Raises:
        InfeasibleError: No partition fits.
    """
    return _best(model, _formula(model, model.recompute, model.step_seconds))


def improve(model: StepModel, starts: Iterable[Boundaries] = ()) -> Choice:
    """The best partition that local search with the simulator finds, from the formula's optima and other starts.

    The formula's optima for unbounded memory are starts too, where they fit.

    Raises:
        InfeasibleError: No partition fits.
    """
    nothing, evaluate = np.zeros_like(model.recompute), model.step_seconds
    proposed = _formula(model, nothing, evaluate) | _formula(model, model.recompute, evaluate)
    return _best(model, _search(proposed, evaluate, model.bound, starts))


def two_phases(model: StepModel) -> Choice:
    """The best partition for a machine of unbounded memory, and then the least recompute that makes it fit.

    Raises:
        InfeasibleError: The partition does not fit.
    """
    proposed = _formula(model, np.zeros_like(model.recompute), model.blind_seconds)
    blind = _best(model, _search(proposed, model.blind_seconds, model.blind_bound, ()))
    model.levels(blind.boundaries)  # says what is missing
    return Choice(model, blind.boundaries, float(model.step_seconds(np.array([blind.boundaries]))[0]))


def retreat(choice: Choice, missing_bytes: Sequence[int]) -> Choice:
    """The same partition where every stage that ran out of memory is predicted to hold less by what it was short of.

    The prediction was wrong about the whole, but knows what a layer more or less keeps. Of all levels that free as much
    those that cost the least time; other stages stay as they are.

    Args:
        choice: What was tried.
        missing_bytes: By how much it ran out, for each stage; zero where it did not.

    Raises:
        InfeasibleError: A stage cannot free as much; the message says how many bytes are missing.

    Source: Yao et al., OmniBal, ICML 2025, section 4.3: failed trials recompute more by the remaining memory.
    """
    model = choice.model
    held = model.footprint.stages(choice.partition, model.levels(choice.boundaries))
    budgets = tuple(
        stage.total - missing if missing else budget
        for stage, missing, budget in zip(held, missing_bytes, model.budgets, strict=True)
    )
    smaller = StepModel(model.profile, model.packing, model.layout, model.request, model.schedule_name, budgets)
    smaller.levels(choice.boundaries)  # says what is missing
    return Choice(smaller, choice.boundaries, float(smaller.step_seconds(np.array([choice.boundaries]))[0]))


def _search(
    proposed: Mapping[Boundaries, float], evaluate: Evaluate, bound: Evaluate, starts: Iterable[Boundaries]
) -> dict[Boundaries, float]:
    """Descend from the best of the proposed partitions, and from other starts."""
    seconds = dict(proposed)
    best = sorted(seconds, key=seconds.__getitem__)[:_STARTS]
    more = [start for start in starts if start not in seconds]
    if more:
        seconds |= dict(zip(more, evaluate(np.array(more)).tolist(), strict=True))
    return descend([*best, *more], seconds, evaluate, bound)


def _formula(model: StepModel, recompute: FloatArray, evaluate: Evaluate) -> dict[Boundaries, float]:
    """Seconds of the formula's optima."""
    average = model.average
    whole = average.passing_seconds[0, 0, -1]
    # Stages that do not fit have an infinite pace; their passage is finite, but never on the shortest way.
    passing = average.passing_seconds + np.where(np.isfinite(recompute), recompute, _FAR * whole)
    passing[0, 0, -1] = whole  # no stage, but what the formula measures evenness by
    optima = model_optima(average.pace_seconds + recompute, passing, model.packing.micro_batches)
    return dict(zip(optima, evaluate(np.array(optima)).tolist(), strict=True))


def _best(model: StepModel, seconds: dict[Boundaries, float]) -> Choice:
    boundaries = min(seconds, key=lambda found: (seconds[found], found))
    return Choice(model, boundaries, seconds[boundaries])
