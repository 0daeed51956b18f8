"""What a device holds where the encoder is on all devices, beside a stage of the LLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from omnibal.cluster import OVERHEAD_BYTES, Layout
from omnibal.cost import IntArray, Load
from omnibal.memory.footprint import Footprint, StageMemory
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import Schedule, one_f_one_b
from omnibal.pipeline.spread import language_partition, share_of_step, split_profile
from omnibal.profile.records import Level, ModelProfile


@dataclass(frozen=True, eq=False)
class SpreadFootprint:
    """The memory of every stage of the LLM with a spread encoder beside it.

    ``load`` is the largest micro-batch there can be, ``mean`` the mean one of the step that has most images: all images
    of a step are encoded before its pipeline, and kept until they are trained on behind it. ``schedule`` is the LLM's.
    """

    profile: ModelProfile
    load: Load
    mean: Load
    schedule: Schedule
    layout: Layout
    overhead_bytes: int = OVERHEAD_BYTES

    @cached_property
    def language(self) -> Footprint:
        return Footprint(
            split_profile(self.profile)[1], self.load, self.schedule, self.layout.parts[1], self.overhead_bytes
        )

    @cached_property
    def encoder(self) -> Footprint:
        """The encoder by itself, on a device's share of the images; nothing of a process."""
        share = share_of_step(self._of_replica, self.layout)
        return Footprint(split_profile(self.profile)[0], share, one_f_one_b(1, 1), self.layout.parts[0], 0)

    @property
    def border(self) -> int:
        return len(self.encoder.profile.layers)

    @property
    def _of_replica(self) -> Load:
        return self.mean * self.schedule.micro_batches

    def beside_bytes(self, levels: Sequence[Level]) -> tuple[int, ...]:
        """What a device of each stage holds during the LLM's passes beside what the LLM does."""
        own = self._alone(levels)
        held = own.total - own.transient - own.logits
        return tuple(held + self._features(stage) for stage in range(self.schedule.num_stages))

    def stages(self, partition: Partition, levels: Sequence[Level]) -> tuple[StageMemory, ...]:
        behind = language_partition(self.profile, partition)
        return tuple(self.stage(stage, behind.layers(stage), levels) for stage in range(self.schedule.num_stages))

    def stage(self, stage: int, layers: range, levels: Sequence[Level]) -> StageMemory:
        border, own = self.border, self._alone(levels)
        levels_behind = levels[border + layers.start : border + layers.stop]
        language = self.language.stage(stage, layers, levels_behind)
        held = {
            name: getattr(own, name) + getattr(language, name)
            for name in ("parameters", "gradients", "optimizer", "activations", "pending", "buffers")
        }
        held["buffers"] += self._features(stage)
        kept = held["activations"] + held["pending"] + held["buffers"]
        # Beyond what is kept: a pass of the LLM; one of the encoder, when the LLM has freed all; the optimizer's step,
        # when the encoder has; and pixels on their way, when nobody keeps anything yet.
        _, passing = self.language.passing_bytes(stage, layers, levels_behind)
        _, encoding = self.encoder.passing_bytes(0, range(border), levels[:border])
        of_language = language.activations + language.pending + language.buffers
        states = self.language.state(stage), self.encoder.state(0)
        update = max(int(states[0].update[layers.start, layers.stop]), int(states[1].update[0, border]))
        needed = max(passing, encoding - of_language, update - kept, self._arriving(stage) - kept)
        return StageMemory(
            **held,
            transient=needed,
            logits=max(self.language.least_transient(stage) - needed, 0),
            overhead=self.overhead_bytes,
        )

    def pending_bytes(self, stage: int) -> IntArray:
        """As of ``Footprint``, in layers of the whole model; nothing of the encoder waits."""
        pending: IntArray = np.pad(self.language.pending_bytes(stage), (self.border, 0), mode="edge")
        return pending

    def _alone(self, levels: Sequence[Level]) -> StageMemory:
        return self.encoder.stage(0, range(self.border), levels[: self.border])

    def _features(self, stage: int) -> int:
        """Bytes of a replica's features, and of their gradients where the encoder is trained; on the first stage."""
        if stage:
            return 0
        layers = self.encoder.profile.layers
        ways = 1 + (self.encoder.profile.frozen_front < self.border)
        # The LLM's buffers count the features of micro-batches in flight, which are parts of these.
        counted = self.schedule.in_flight[0] * int(self.language.profile.layers[0].saved_bytes["full"](self.load))
        return max(ways * int(layers[-1].output_bytes(self._of_replica)) - counted, 0)

    def _arriving(self, stage: int) -> int:
        """Bytes of pixels in an all-to-all: what comes, and what the first stage sends, as read and in its order."""
        pixels = self.encoder.profile.layers[0].saved_bytes["full"]
        share = int(pixels(self.encoder.load))
        return 2 * share if stage else share + 2 * int(pixels(self._of_replica))
