"""The step of one layout, wherever the encoder is: in the pipeline, on devices of its own, or on all devices.

Partition and recompute levels come from the same closed formula for every placement (`omnibal.planner.search.propose`),
so that no placement wins by being searched more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from omnibal.cluster import Layout
from omnibal.errors import InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.recompute import recompute_seconds
from omnibal.pipeline.optimize import Boundaries
from omnibal.pipeline.schedule import ScheduleName
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.search import propose
from omnibal.planner.step_model import SpreadModel, StepModel
from omnibal.profile.records import LEVELS, Level, ModelProfile


@dataclass(frozen=True, kw_only=True)
class PlacedStep:
    """A layout with its cut and recompute levels, and what a step takes and holds."""

    layout: Layout
    schedule: ScheduleName
    micro_batches: int
    boundaries: Boundaries
    """Of the whole model's layers; those of a spread encoder are counted with the first stage."""
    recompute: tuple[Level, ...]
    """The level of every layer of the model."""
    step_seconds: float
    """Mean over the steps of the packing."""
    recompute_seconds: float
    """Seconds of all devices together that a step recomputes."""
    peak_bytes: int
    """What the fullest device holds."""


def place_pipeline(
    profile: ModelProfile, packing: Packing, layout: Layout, request: PlanRequest, schedule: ScheduleName
) -> PlacedStep:
    """One pipeline through encoder and LLM, or one of each where both have devices of their own (DistTrain).

    Raises:
        InfeasibleError: A stage does not fit with as much recomputed as possible; ``missing_bytes`` says by how much.
    """
    return _placed(StepModel(profile, packing, layout, request, schedule))


def place_spread(
    profile: ModelProfile, packing: Packing, layout: Layout, request: PlanRequest, schedule: ScheduleName, level: Level
) -> PlacedStep:
    """The encoder on all devices: each encodes its share of the step before the LLM's pipeline, and trains on it after.

    Features go from where they are made to the first stages in one all-to-all, and their gradients come back in
    another one. The encoder's weights are on every device, and its optimizer's state is shared by all.

    Args:
        layout: The LLM's stages, replicas and tensor ranks; ``layout.encoder`` is spread.
        level: What the encoder recomputes: ``"none"`` keeps its activations through the pipeline.

    Raises:
        InfeasibleError: A device does not fit what it must hold; ``missing_bytes`` says by how much.
    """
    assert layout.is_spread, "the caller spreads the encoder"
    return _placed(SpreadModel(profile, packing, layout, request, schedule, level=level))


def _placed(model: StepModel) -> PlacedStep:
    """The closed formula's best partition, its levels, and the mean seconds of a step."""
    if (missing := model.missing[0]) > 0:
        raise InfeasibleError(f"memory must hold every stage of {model}", missing_bytes=missing)
    choice = propose(model)
    plan, packing = choice.plan, model.packing
    held = plan.footprint(model.whole, packing.largest, packing.fullest_mean).stages(plan.partition, plan.recompute)
    if not isfinite(choice.step_seconds):
        budgets = model.request.budgets(plan.layout)
        over = max(stage.total - budget for stage, budget in zip(held, budgets, strict=True))
        raise InfeasibleError("the spread encoder must fit beside the LLM's state", missing_bytes=over)
    return PlacedStep(
        layout=plan.layout,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        boundaries=plan.partition.boundaries,
        recompute=plan.recompute,
        step_seconds=choice.step_seconds,
        recompute_seconds=_recomputed(model.whole, packing, plan.recompute, plan.layout),
        peak_bytes=max(stage.total for stage in held),
    )


def _recomputed(profile: ModelProfile, packing: Packing, levels: tuple[Level, ...], layout: Layout) -> float:
    """Seconds of all devices together that all micro-batches of a mean step recompute."""
    loads, border = packing.all_loads, 0 if layout.encoder is None else encoder_layers(profile.layers)
    seconds = recompute_seconds(profile, loads)[np.arange(len(levels)), [LEVELS.index(level) for level in levels]]
    encoder = layout.num_tensor if layout.encoder is None else layout.encoder.num_tensor
    whole = float(seconds[:border].sum()) * encoder + float(seconds[border:].sum()) * layout.num_tensor
    return whole * loads.shape[1] * loads.shape[2]
