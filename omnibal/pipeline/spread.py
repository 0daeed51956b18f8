"""Simulation of a step whose encoder is on all devices, before the LLM's pipeline and behind it.

    rank 0   pixels E features F0 F1 B0 … gradients E'
    rank 1   pixels E features    F0 …    gradients E'

A device of the first stage reads its replica's images, and every device encodes (E) an even share of the step's: all
but one in so many devices of what it reads leaves it as pixels, and comes back as features. Behind the last pass of the
pipeline gradients of features take the same way, and the encoder runs backward (E'). Updated weights of the encoder
come before the LLM's, and gradients of the LLM are summed before the encoder's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from omnibal.cluster import Layout, Links
from omnibal.cost import FloatArray, Load
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, Instruction, Operation, ScheduleName, Table, as_table
from omnibal.pipeline.simulate import Simulation, StepSimulation, simulate_step
from omnibal.pipeline.times import (
    StepTimes,
    check_partition,
    complete_gradients,
    reduced_at,
    release_of,
    step_times,
)
from omnibal.profile.records import ModelProfile

IMAGES: Final = -1
"""In place of the number of a micro-batch: an instruction of the spread encoder, on a device's share of the images."""


def split_profile(profile: ModelProfile) -> tuple[ModelProfile, ModelProfile]:
    """Encoder and LLM as profiles of their own."""
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


def simulate_spread(
    profile: ModelProfile,
    partition: Partition,
    loads: Iterable[Load],
    layout: Layout,
    links: Links,
    *,
    encoder_links: Links | None = None,
    recompute: Sequence[str] | None = None,
    schedule: ScheduleName = "1f1b",
) -> StepSimulation:
    """Predict one optimizer step; the encoder's passes are instructions of the micro-batch ``IMAGES``.

    Arguments are those of `omnibal.pipeline.units.simulate_units`, but for ``partition``: the LLM's stages, the first
    of which begins with the encoder's layers; and ``encoder_links``, which join all devices.

    Raises:
        ConfigError: Partition, loads and layout do not fit together, or the first stage holds no layer of the LLM.
    """
    if not layout.is_spread:
        raise ConfigError(f"layout must spread the encoder, got {layout}")
    behind, (encoder, language) = language_partition(profile, partition), split_profile(profile)
    border, load = len(encoder.layers), Load.stack(loads)
    if load.shape[0] != layout.num_replicas or partition.num_stages != layout.num_stages:
        raise ConfigError(
            f"layout must have the loads' {load.shape[0]} replicas and the partition's {partition.num_stages} stages, "
            f"got {layout}"
        )
    levels = (None, None) if recompute is None else (recompute[:border], recompute[border:])
    work = EncoderWork.of(encoder, load, layout, encoder_links or links, levels[0])
    own, exchanges, whole = work.times, work.exchanges, np.array([0, border])
    # Before the pipeline, all devices together; the LLM's weights come meanwhile, behind the encoder's.
    encodes = max(exchanges.pixels, float(release_of(own, 0, whole)[0]))
    encoded = encodes + float(own.forward[0, 0, -1])
    begins = encoded + exchanges.features
    step = simulate_step(
        language, behind, list(load), links, zero_stage=layout.zero_stage, recompute=levels[1],
        schedule=SCHEDULES[schedule](layout.num_stages, load.shape[1]),
        head_start_seconds=begins - float(own.gather[-1]),
    )  # fmt: skip
    # Behind it, all devices together again.
    passes, reduced = [(Operation.F, encodes, encoded)], begins + step.reduced_seconds
    if encoder.frozen_front < border:
        backward = begins + step.pipeline_seconds + exchanges.gradients
        ends = backward + float(own.backward[0, 0, -1] + own.weight[0, 0, -1])
        passes.append((Operation.BW, backward, ends))
        ready = np.full(border, reduced.max())
        complete_gradients(own, 0, whole, as_table([[Instruction(Operation.BW, 0)]]), np.array([[backward]]), ready)
        reduced = np.maximum(reduced, reduced_at(own, whole, ready))
    replicas = tuple(_with_images(replica, begins, passes) for replica in step.replicas)
    return StepSimulation(replicas, reduced, step.optimizer_seconds + float(own.optimizer[-1]))


def _with_images(simulation: Simulation, begins: float, passes: Sequence[tuple[Operation, float, float]]) -> Simulation:
    """A replica whose pipeline begins so late, with the encoder's passes (operation, start, end) on each stage."""
    table, lengths = simulation.table, simulation.table.lengths
    rows, columns = table.operations.shape
    shape, inner = (rows, columns + len(passes)), np.s_[:, 1 : columns + 1]
    starts, ends = np.zeros(shape), np.zeros(shape)
    operations, micro_batches = np.zeros(shape, dtype=np.int8), np.zeros(shape, dtype=np.int32)
    operations[inner], micro_batches[inner] = table.operations, table.micro_batches
    starts[inner], ends[inner] = simulation.starts + begins, simulation.ends + begins
    # The first pass goes before, the second one behind what each row runs.
    for place, (operation, start, end) in zip((np.zeros(rows, dtype=int), lengths + 1), passes, strict=False):
        here = np.arange(rows), place
        operations[here], micro_batches[here], starts[here], ends[here] = operation, IMAGES, start, end
    return Simulation(Table(operations, micro_batches, lengths + len(passes)), starts, ends, simulation.schedule)
