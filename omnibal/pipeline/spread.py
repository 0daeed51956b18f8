"""What a step takes beside the LLM's pipeline if its encoder is on all devices.

    rank 0   pixels E features F0 F1 B0 … gradients E'
    rank 1   pixels E features    F0 …    gradients E'

A device of the first stage reads its replica's images, and every device encodes (E) an even share of the step's: all
but one in so many devices of what it reads leaves it as pixels, and comes back as features. Behind the last pass of the
pipeline gradients of features take the same way, and the encoder runs backward (E'). Updated weights of the encoder
come before the LLM's, and gradients of the LLM are summed before the encoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from omnibal.cluster import Layout, Links
from omnibal.cost import FloatArray, Load
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.times import StepTimes, check_partition, step_times
from omnibal.profile.records import ModelProfile

IMAGES: Final = -1
"""In place of the number of a micro-batch: an instruction of the spread encoder, on a device's share of the images."""


def split_profile(profile: ModelProfile) -> tuple[ModelProfile, ModelProfile]:
    count = encoder_layers(profile.layers)
    encoder, language = profile.layers[:count], profile.layers[count:]
    if any(layer.trainable for layer in encoder):
        # Gradients for the encoder pass through every layer of the LLM, also where these are frozen: a first layer
        # that counts as trained, and has no gradient of its own, says so.
        language = (replace(language[0], trainable=True), *language[1:])
    return replace(profile, layers=encoder, frozen=None), replace(profile, layers=language, frozen=None)


def language_partition(profile: ModelProfile, partition: Partition) -> Partition:
    """The stages in layers of the LLM alone; the encoder's are counted with the first one."""
    check_partition(profile, partition)
    border, (first, *others) = encoder_layers(profile.layers), partition.boundaries
    if others[0] <= border:
        raise ConfigError(
            f"the first stage of the partition must end in the language model, which begins with layer {border}, where "
            f"the encoder is spread, got an end before layer {others[0]}"
        )
    return Partition((first, *(boundary - border for boundary in others)))


def share_of_step(load: Load, layout: Layout) -> Load:
    """What each device encodes, where ``load`` is what a mean replica of the LLM gets in a step."""
    alone, _ = layout.parts
    return load * (layout.num_replicas / alone.num_replicas)


@dataclass(frozen=True)
class Exchanges:
    """Seconds of the all-to-alls of a step."""

    pixels: float
    features: float
    gradients: float
    """Of features; 0 where the encoder is frozen."""

    @classmethod
    def of(cls, encoder: ModelProfile, load: Load, layout: Layout, links: Links) -> Exchanges:
        """``load`` holds the micro-batches of the step, (replicas, micro-batches)."""
        alone, _ = layout.parts
        if alone.num_replicas == 1:
            return cls(0.0, 0.0, 0.0)
        # The fullest device of the first stage sends and gets; of the images that it reads one in so many devices
        # stays. The slowest link of any two devices counts.
        bandwidth = min(links.bandwidth_bytes_per_second, links.between_replicas)
        first, last = encoder.layers[0], encoder.layers[-1]

        def seconds(sizes: FloatArray) -> float:
            moved = float(sizes.sum(axis=1).max()) * (1 - 1 / alone.num_replicas)
            return links.latency_seconds + moved / bandwidth

        features = seconds(last.output_bytes(load))
        is_trained = encoder.frozen_front < len(encoder.layers)
        return cls(seconds(first.saved_bytes["full"](load)), features, features * is_trained)


@dataclass(frozen=True)
class EncoderWork:
    """What all devices do together for the images of a step, before the LLM's pipeline and behind it."""

    times: StepTimes
    """Of the encoder's layers; its one micro-batch is a device's share."""
    exchanges: Exchanges

    @classmethod
    def of(
        cls, encoder: ModelProfile, load: Load, layout: Layout, links: Links, recompute: Sequence[str] | None = None
    ) -> EncoderWork:
        """``load`` holds the micro-batches of the step, (replicas, micro-batches); ``links`` join all devices."""
        share, devices = share_of_step(load.mean() * load.shape[1], layout), layout.parts[0].num_replicas
        times = step_times(
            encoder, [share.reshape((1,))], links, zero_stage=layout.zero_stage, recompute=recompute,
            num_replicas=devices,
        )  # fmt: skip
        return cls(times, Exchanges.of(encoder, load, layout, links))

    @property
    def release_seconds(self) -> float:
        """When the encoder may begin: a layer's updated weights must have come by its turn."""
        return max(float((self.times.gather[1:] - self.times.forward[0, 0, :-1]).max()), 0.0)

    @property
    def forward_seconds(self) -> float:
        return float(self.times.forward[0, 0, -1])

    @property
    def backward_seconds(self) -> float:
        return float(self.times.backward[0, 0, -1] + self.times.weight[0, 0, -1])

    def reduced_seconds(self, earliest: float, backward_start: float) -> float:
        """When the gradients are summed over all devices, where no sum begins before ``earliest``."""
        # The backward pass goes from the last layer to the first. So do the sums: one waits for its layer's gradient
        # and for the sum before it.
        passed = self.times.backward[0, 0] + self.times.weight[0, 0]
        ready = (backward_start + passed[-1] - passed[:-1]).clip(min=earliest)
        return float((ready + self.times.reduce[1:]).max())
