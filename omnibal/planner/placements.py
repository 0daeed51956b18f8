"""The step of one layout, wherever the encoder is: in the pipeline, on devices of its own, or on all devices.

Partition and recompute levels come from the same closed formula for every placement (`omnibal.planner.search.propose`),
so that no placement wins by being searched more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from omnibal.errors import InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.schedule import ScheduleName
from omnibal.plan import Plan
from omnibal.planner.search import propose
from omnibal.planner.step_model import SpreadModel, StepCosts, StepModel
from omnibal.profile.records import LEVELS, Level


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


def place(costs: StepCosts, schedule: ScheduleName, level: Level = "none") -> PlacedStep:
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
