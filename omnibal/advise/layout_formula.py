"""Seconds of a step of one layout by a formula: microseconds each, to choose which layouts are simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import add
from typing import Final

import numpy as np

from omnibal.cluster import Cluster, Layout, Links
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.errors import InfeasibleError
from omnibal.memory.footprint import TrainingState
from omnibal.pipeline.optimize import least_maximum
from omnibal.pipeline.problem import differences
from omnibal.profile.records import Level, ModelProfile

FILL: Final = 1 / 3
"""Bubble of a zero-bubble schedule in that of 1F1B, ``(stages - 1) · slowest``, where F, B and W take equally long
(Qi et al., ICLR 2024): the formula ranks what the best schedule may do."""


@dataclass(frozen=True)
class PartCounts:
    """What a part of the model costs per sample, on each of the devices that share its layers."""

    passes: tuple[float, ...]  # seconds of every layer, forward and backward
    recomputed: tuple[float, ...]  # seconds that full recomputation adds to every layer
    kept: float  # bytes that autograd keeps without recomputation
    kept_recomputed: float
    state: float  # bytes of weights and gradients, whatever the replicas
    shared: float  # bytes of optimizer state, divided by the replicas
    gradients: float  # bytes that replicas add up after a step
    sent: float  # bytes that pass a cut behind the first layers
    update: float  # seconds of the optimizer, divided by the replicas
    num_layers: int

    @classmethod
    def of(cls, profile: ModelProfile, sample: Load, precision_of: Callable[[int], Layout]) -> PartCounts:
        layers = profile.layers[profile.frozen_front :]
        evaluated: dict[CostModel, float] = {}

        def value(cost: CostModel) -> float:
            if cost not in evaluated:
                evaluated[cost] = float(cost(sample))
            return evaluated[cost]

        passes = [
            value(layer.forward_seconds) + (value(layer.backward_seconds) + value(layer.weight_seconds)) * trained
            for trained, part in ((False, profile.layers[: profile.frozen_front]), (True, layers))
            for layer in part
        ]
        # TrainingState adds up what replicas share and what they do not: two numbers of replicas tell them apart.
        one, two = (float(TrainingState(profile, precision_of(count)).whole[0, -1]) for count in (1, 2))
        again = [value(layer.recompute_seconds["full"]) for layer in layers]
        return cls(
            passes=tuple(passes),
            recomputed=(0.0,) * profile.frozen_front + tuple(again),
            kept=sum(value(layer.saved_bytes["none"]) for layer in layers),
            kept_recomputed=sum(value(layer.saved_bytes["full"]) for layer in layers),
            state=2 * two - one,
            shared=2 * (one - two),
            gradients=sum(layer.gradient_bytes for layer in profile.layers),
            sent=value(profile.layers[0].output_bytes),
            update=sum(layer.optimizer_seconds for layer in profile.layers),
            num_layers=len(profile.layers),
        )

    @property
    def seconds(self) -> float:
        return sum(self.passes)

    @property
    def recompute(self) -> float:
        return sum(self.recomputed)

    def stage_state(self, layout: Layout) -> float:
        """Bytes of weights, gradients and optimizer state on a device of a mean stage."""
        return (self.state + self.shared / layout.num_replicas) / layout.num_stages

    def __add__(self, other: PartCounts) -> PartCounts:
        return PartCounts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def stage_seconds(self, in_flight: FloatArray, samples: float, room: float) -> float:
        """Seconds of the slowest stage for a micro-batch of so many samples, recomputing as little as fits.

        ``in_flight`` are the micro-batches that each stage keeps.
        """
        num_stages = len(in_flight)
        everything, least = (in_flight * samples * kept / num_stages for kept in (self.kept, self.kept_recomputed))
        # A partition gives fewer layers to the first stages, which keep most: the mean stage must fit.
        if (missing := float(least.mean()) - room) > 0:
            raise InfeasibleError("all layers recomputed must fit", missing_bytes=round(missing))
        share = float(np.clip((everything - room) / np.maximum(everything - least, 1), 0, 1).mean())
        kept = _slowest_stage(self.passes, num_stages)
        again = _slowest_stage(tuple(map(add, self.passes, self.recomputed)), num_stages) if share else kept
        return samples * (kept + share * (again - kept))


@lru_cache(maxsize=1024)
def _slowest_stage(passes: tuple[float, ...], num_stages: int) -> float:
    sums = np.cumsum((0.0, *passes))
    return least_maximum(np.stack([differences(sums)] * num_stages))[0]


@dataclass(frozen=True, eq=False)
class StepFormula:
    """About what a step of a layout takes: ``(micro_batches + FILL · (stages - 1)) · slowest``, and sums of gradients.

    A stage is a mean one in memory, the slowest one in seconds, and recomputes as little as fits.
    """

    cluster: Cluster
    samples_per_step: int
    largest_sample: float
    """Seconds of the longest sample of a step over those of a mean one."""
    room: float
    """Bytes of a device for the model and what it keeps."""
    _known_links: dict[Layout, Links] = field(default_factory=dict)

    def seconds(
        self, vision: PartCounts, language: PartCounts, layout: Layout, micro_batches: int, level: Level
    ) -> float:
        """Seconds of a step; ``level`` is what a spread encoder recomputes.

        Raises:
            InfeasibleError: A mean stage with all layers recomputed does not fit.
        """
        samples = self.samples_per_step / (layout.num_replicas * micro_batches)
        if layout.encoder is None:
            return self._pipeline(vision + language, layout, micro_batches, samples)
        if layout.encoder.placement == "own":
            return self._units(vision, language, layout, micro_batches, samples)
        encoder, behind = layout.parts
        share = self.samples_per_step / encoder.num_replicas
        kept, again = (vision.kept, 0.0) if level == "none" else (vision.kept_recomputed, vision.recompute)
        encoding, beside = share * (vision.seconds + again), vision.stage_state(encoder) + share * kept
        rest = self._pipeline(language, behind, micro_batches, samples, beside)
        return encoding + self._sums(vision, encoder, encoding) + rest

    def _units(
        self, vision: PartCounts, language: PartCounts, layout: Layout, micro_batches: int, samples: float
    ) -> float:
        encoder, behind = layout.parts
        # LLM replicas that an encoder works for; it has as many micro-batches in flight for each stage behind it.
        served = behind.num_replicas / encoder.num_replicas
        in_flight = behind.num_stages * served + np.arange(encoder.num_stages, 0.0, -1)
        encoding = vision.stage_seconds(in_flight, samples, self.room - vision.stage_state(encoder))
        in_flight = _in_flight(behind.num_stages, micro_batches)
        seconds = language.stage_seconds(in_flight, samples, self.room - language.stage_state(behind))
        fill = self._fill(language, behind, seconds, samples) + 2 * self._transfer(vision, behind, samples)
        # Encoders run 1F1B, whose bubbles nothing fills. One that serves several replicas makes the last of them wait.
        turns = (1 + 2 * max(served, 1)) / 3
        waits = encoding * self._uneven(samples) * (encoder.num_stages - 1 + turns)
        paces = encoding * served * micro_batches + FILL * seconds, seconds * micro_batches + waits
        return max(paces) + fill + max(self._sums(vision, encoder, encoding), self._sums(language, behind, seconds))

    def _pipeline(
        self, part: PartCounts, layout: Layout, micro_batches: int, samples: float, beside: float = 0.0
    ) -> float:
        """Seconds of one pipeline whose devices hold ``beside`` bytes more."""
        room = self.room - beside - part.stage_state(layout)
        slowest = part.stage_seconds(_in_flight(layout.num_stages, micro_batches), samples, room)
        pace = max(slowest, self._transfer(part, layout, samples))
        fill = self._fill(part, layout, slowest, samples)
        return pace * micro_batches + fill + self._sums(part, layout, slowest)

    def _fill(self, part: PartCounts, layout: Layout, seconds: float, samples: float) -> float:
        """Seconds in which stages wait for the largest micro-batch to pass all others, there and back.

        ``seconds`` is what a mean micro-batch takes on a stage.
        """
        passing = FILL * seconds * self._uneven(samples) + 2 * self._transfer(part, layout, samples)
        return (layout.num_stages - 1) * passing

    def _uneven(self, samples: float) -> float:
        """The largest of even micro-batches of so many samples over a mean one."""
        return max(self.largest_sample / samples, 1.0)

    def _transfer(self, part: PartCounts, layout: Layout, samples: float) -> float:
        return samples * part.sent / self._links(layout).bandwidth_bytes_per_second if layout.num_stages > 1 else 0.0

    def _sums(self, part: PartCounts, layout: Layout, seconds: float) -> float:
        """Seconds of the optimizer, of sums of gradients, and of updated weights coming back, that nothing hides.

        ``seconds`` is what a micro-batch takes on a stage, a third of it forward.
        """
        update = part.update / (layout.num_stages * layout.num_replicas)
        if layout.num_replicas == 1:
            return update
        once = part.gradients / (layout.num_stages * self._links(layout).between_replicas)
        # Weights come beside the first forward pass, gradients go beside the last backward pass.
        return update + max(once - seconds / 3, 0) + max(once - seconds * 2 / 3, 0)

    def _links(self, layout: Layout) -> Links:
        if layout not in self._known_links:
            self._known_links[layout] = self.cluster.links_of(layout)
        return self._known_links[layout]


def _in_flight(num_stages: int, micro_batches: int) -> FloatArray:
    in_flight: FloatArray = np.minimum(np.arange(num_stages, 0.0, -1), micro_batches)
    return in_flight
