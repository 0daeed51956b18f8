"""The step of one layout, wherever the encoder is: in the pipeline, on devices of its own, or on all devices.

Partition and recompute levels come from the same closed formula for every placement (`omnibal.planner.search.propose`),
so that no placement wins by being searched more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cluster import Layout
from omnibal.cost import Load
from omnibal.errors import InfeasibleError
from omnibal.families.base import encoder_layers
from omnibal.memory.footprint import Footprint, StageMemory
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
    encoder, language = split_profile(profile)
    shared = _SpreadEncoder(encoder, packing, layout, request, level)
    left = tuple(budget - own for budget, own in zip(shared.budgets, shared.beside, strict=True))
    model = StepModel(language, packing, shared.pipeline, request, schedule, left)
    boundaries, own_levels, seconds = _propose(model)
    recomputed = _recomputed(language, packing, own_levels, shared.pipeline)
    return PlacedStep(
        layout=layout,
        schedule=schedule,
        micro_batches=packing.micro_batches,
        boundaries=boundaries,
        recompute=(*shared.levels, *own_levels),
        step_seconds=seconds + shared.seconds,
        recompute_seconds=recomputed + _recomputed(encoder, packing, shared.levels, shared.alone),
        peak_bytes=shared.peak_bytes(model.footprint.stages(Partition(boundaries), own_levels)),
    )


class _SpreadEncoder:
    """What an encoder on all devices holds beside the LLM's pipeline, and the seconds that it adds to a step."""

    def __init__(
        self, profile: ModelProfile, packing: Packing, layout: Layout, request: PlanRequest, level: Level
    ) -> None:
        assert layout.is_spread, "the caller spreads the encoder"
        self._profile, self._packing, self._request = profile, packing, request
        self.alone, self.pipeline = layout.parts
        self.budgets, self._overhead = request.budgets(self.pipeline), request.cluster.overhead_bytes
        layers = profile.layers
        self.levels = profile.levels_like(every_layer(level, len(layers)))
        # Images are dealt to the devices one by one, so all get about the same share of a step. Memory is that of the
        # largest step.
        self._packs = packing.micro_batches * layout.num_replicas / self.alone.num_replicas
        largest = self._packs * Load.stack(step.mean() for step in packing.all_loads).max()
        held = Footprint(profile, largest, one_f_one_b(1, 1), self.alone, 0).stage(0, range(len(layers)), self.levels)
        if (over := held.total + self._overhead - min(self.budgets)) > 0:
            raise InfeasibleError("the spread encoder must fit every device", missing_bytes=over)
        # All that does not come and go stays beside the pipeline; the first stage has its replica's features, too, and
        # their gradients where the encoder is trained.
        self._ways = 2 if any(layer.trainable for layer in layers) else 1
        features = self._ways * packing.micro_batches * int(layers[-1].output_bytes(packing.largest))
        self._passing = held.transient + held.logits
        self.beside = [held.total - self._passing + features * (stage == 0) for stage in range(layout.num_stages)]

    def peak_bytes(self, stages: Sequence[StageMemory]) -> int:
        """What the fullest device holds, given what the LLM's stages do."""
        # The encoder's backward pass comes when the LLM's activations are gone, but not its state.
        peaks = [
            own
            + max(stage.total, stage.parameters + stage.gradients + stage.optimizer + self._overhead + self._passing)
            for own, stage in zip(self.beside, stages, strict=True)
        ]
        if (over := max(peak - budget for peak, budget in zip(peaks, self.budgets, strict=True))) > 0:
            raise InfeasibleError("the spread encoder must fit beside the LLM's state", missing_bytes=over)
        return max(peaks)

    @property
    def seconds(self) -> float:
        """Passes before and behind the LLM's pipeline, sums of gradients, the optimizer, and features on their way."""
        cluster, loads, layers = self._request.cluster, self._packing.all_loads, self._profile.layers
        encoding = simulate_step(
            self._profile, Partition((0, len(layers))), [(self._packs * loads.mean()).reshape((1,))],
            cluster.links_of(self.alone), zero_stage=self.alone.zero_stage, recompute=self.levels,
            num_replicas=self.alone.num_replicas,
        ).step_seconds  # fmt: skip
        # A device of the first stage encodes a part of what its replica needs: that part stays where it is.
        moved = 1 - 1 / (self.pipeline.num_stages * self.pipeline.num_tensor)
        features = float(layers[-1].output_bytes(loads).sum(axis=2).mean()) * moved
        return encoding + self._ways * features / cluster.links_of(self.pipeline).bandwidth_bytes_per_second


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
