"""The step of one layout, wherever the encoder is: in the pipeline, on devices of its own, or on all devices.

Partition and recompute levels come from the same closed formula for every placement (`omnibal.planner.search.propose`),
so that no placement wins by being searched more.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np

from omnibal.cluster import Layout
from omnibal.errors import InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.recompute import recompute_seconds
from omnibal.memory.spread import SpreadFootprint
from omnibal.pipeline.optimize import Boundaries
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.pipeline.spread import simulate_spread, split_profile
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.search import StepModel, propose
from omnibal.profile.records import LEVELS, Level, ModelProfile, every_layer


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
    model = StepModel(profile, packing, layout, request, schedule)
    boundaries, levels, seconds = _propose(model)
    held = model.footprint.stages(Partition(boundaries), levels)
    return PlacedStep(
        layout=layout,
        schedule=schedule,
        micro_batches=packing.micro_batches,
        boundaries=boundaries,
        recompute=levels,
        step_seconds=seconds,
        recompute_seconds=_recomputed(profile, packing, levels, layout),
        peak_bytes=max(stage.total for stage in held),
    )


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
    encoder, language = split_profile(profile)
    (alone, pipeline), border = layout.parts, len(encoder.layers)
    levels = profile.levels_like((*every_layer(level, border), *every_layer("full", len(language.layers))))
    footprint = SpreadFootprint(
        profile, packing.largest, packing.fullest_mean, SCHEDULES[schedule](layout.num_stages, packing.micro_batches),
        layout, request.cluster.overhead_bytes,
    )  # fmt: skip
    budgets = request.budgets(pipeline)
    left = tuple(budget - own for budget, own in zip(budgets, footprint.beside_bytes(levels), strict=True))
    model = StepModel(language, packing, pipeline, request, schedule, left)
    boundaries, own_levels, _ = _propose(model)
    whole, partition = (*levels[:border], *own_levels), Partition((0, *(border + cut for cut in boundaries[1:])))
    peaks = [stage.total for stage in footprint.stages(partition, whole)]
    if (over := max(peak - budget for peak, budget in zip(peaks, budgets, strict=True))) > 0:
        raise InfeasibleError("the spread encoder must fit beside the LLM's state", missing_bytes=over)
    steps = [
        simulate_spread(
            profile, partition, loads, layout, model.links, encoder_links=request.cluster.links_of(alone),
            recompute=whole, schedule=schedule,
        ).step_seconds
        for loads in packing.steps
    ]  # fmt: skip
    recomputed = _recomputed(language, packing, own_levels, pipeline)
    return PlacedStep(
        layout=layout,
        schedule=schedule,
        micro_batches=packing.micro_batches,
        boundaries=partition.boundaries,
        recompute=whole,
        step_seconds=fmean(steps),
        recompute_seconds=recomputed + _recomputed(encoder, packing, whole[:border], alone),
        peak_bytes=max(peaks),
    )


def _propose(model: StepModel) -> tuple[Boundaries, tuple[Level, ...], float]:
    """The closed formula's best partition, its levels, and the mean seconds of a step."""
    if (missing := model.missing[0]) > 0:
        raise InfeasibleError(f"memory must hold every stage of {model}", missing_bytes=missing)
    choice = propose(model)
    return choice.boundaries, model.levels(choice.boundaries), choice.step_seconds


def _recomputed(profile: ModelProfile, packing: Packing, levels: tuple[Level, ...], layout: Layout) -> float:
    """Seconds of all devices together that all micro-batches of a mean step recompute."""
    loads, border = packing.all_loads, encoder_layers(profile.layers) if layout.has_units else 0
    seconds = recompute_seconds(profile, loads)[np.arange(len(levels)), [LEVELS.index(level) for level in levels]]
    (_, encoder), (_, language) = layout.shape(0), layout.shape(layout.num_stages - 1)
    whole = float(seconds[:border].sum()) * encoder + float(seconds[border:].sum()) * language
    return whole * loads.shape[1] * loads.shape[2]
