"""The step of one layout, wherever the encoder is: in the pipeline, on devices of its own, or on all devices.

Partition and recompute levels come from the same closed formula for every placement (`omnibal.planner.search.propose`),
so that no placement wins by being searched more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import Load
from omnibal.errors import InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import Footprint
from omnibal.memory.recompute import recompute_seconds
from omnibal.pipeline.optimize import Boundaries
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import ScheduleName, one_f_one_b
from omnibal.pipeline.simulate import simulate_step
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
    """Of the whole model's layers; of the LLM's alone where the encoder is spread."""
    recompute: tuple[Level, ...]
    """The level of every layer of the model."""
    step_seconds: float
    """Mean over the steps of the packing."""
    recompute_seconds: float
    """Seconds of all devices together that a step recomputes."""
    peak_bytes: int
    """What the fullest device holds."""


def split_profile(profile: ModelProfile) -> tuple[ModelProfile, ModelProfile]:
    """Encoder and LLM as profiles of their own."""
    count = encoder_layers(profile.layers)
    encoder, language = profile.layers[:count], profile.layers[count:]
    if any(layer.trainable for layer in encoder):
        # Gradients for the encoder pass through every layer of the LLM, also where these are frozen: a first layer
        # that counts as trained, and has no gradient of its own, says so.
        language = (replace(language[0], trainable=True), *language[1:])
    return replace(profile, layers=encoder, frozen=None), replace(profile, layers=language, frozen=None)


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
    assert layout.encoder is not None and layout.encoder.placement == "spread", "the caller spreads the encoder"
    encoder, language = split_profile(profile)
    alone, pipeline = layout.parts
    # Images are dealt to the devices one by one, so all get about the same share of a step. Memory is that of the
    # largest step.
    loads = packing.all_loads
    packs = packing.micro_batches * layout.num_replicas / alone.num_replicas
    levels = encoder.levels_like(every_layer(level, len(encoder.layers)))
    largest = packs * Load.stack(step.mean() for step in loads).max()
    held = Footprint(encoder, largest, one_f_one_b(1, 1), alone, 0).stage(0, range(len(encoder.layers)), levels)
    budgets, overhead = request.budgets(pipeline), request.cluster.overhead_bytes
    if (over := held.total + overhead - min(budgets)) > 0:
        raise InfeasibleError("the spread encoder must fit every device", missing_bytes=over)
    # All that does not come and go stays beside the pipeline; the first stage has its replica's features, too, and
    # their gradients where the encoder is trained.
    ways = 2 if any(layer.trainable for layer in encoder.layers) else 1
    features = ways * packing.micro_batches * int(encoder.layers[-1].output_bytes(packing.largest))
    passing = held.transient + held.logits
    beside = [held.total - passing + features * (stage == 0) for stage in range(pipeline.num_stages)]
    left = tuple(budget - own for budget, own in zip(budgets, beside, strict=True))
    model = StepModel(language, packing, pipeline, request, schedule, left)
    boundaries, own_levels, seconds = _propose(model)
    # The encoder's backward pass comes when the LLM's activations are gone, but not its state.
    peaks = [
        own + max(stage.total, stage.parameters + stage.gradients + stage.optimizer + overhead + passing)
        for own, stage in zip(beside, model.footprint.stages(Partition(boundaries), own_levels), strict=True)
    ]
    if (over := max(peak - budget for peak, budget in zip(peaks, budgets, strict=True))) > 0:
        raise InfeasibleError("the spread encoder must fit beside the LLM's state", missing_bytes=over)
    encoding = simulate_step(
        encoder, Partition((0, len(encoder.layers))), [(packs * loads.mean()).reshape((1,))],
        request.cluster.links_of(alone), zero_stage=layout.zero_stage, recompute=levels,
        num_replicas=alone.num_replicas,
    ).step_seconds  # fmt: skip
    # A device of the first stage encodes a part of what its replica needs: that part stays where it is.
    moved = 1 - 1 / (layout.num_stages * layout.num_tensor)
    replica = float(encoder.layers[-1].output_bytes(loads).sum(axis=2).mean()) * moved
    recomputed = _recomputed(language, packing, own_levels, pipeline)
    return PlacedStep(
        layout=layout,
        schedule=schedule,
        micro_batches=packing.micro_batches,
        boundaries=boundaries,
        recompute=(*levels, *own_levels),
        step_seconds=seconds + encoding + ways * replica / model.links.bandwidth_bytes_per_second,
        recompute_seconds=recomputed + _recomputed(encoder, packing, levels, alone),
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
