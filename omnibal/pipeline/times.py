"""Seconds of a whole step, layer by layer, and what an encoder that is on all devices adds beside the LLM's pipeline.

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
from typing import Final, NamedTuple

import numpy as np

from omnibal.cluster import Layout, Links, check_zero_stage
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.profile.records import ModelProfile


class Unit(NamedTuple):
    """The first layers of a model, where they have replicas of their own (units)."""

    num_layers: int
    num_replicas: int
    links: Links


class StepTimes(NamedTuple):
    """Sums over layers: entry ``b`` minus entry ``a`` of the last axis is what layers ``a`` to ``b - 1`` take."""

    # Shape (replicas, micro-batches, layers + 1), in seconds:
    forward: FloatArray
    backward: FloatArray  # to the inputs, recomputation included; none before the first trained layer
    weight: FloatArray  # backward to the weights
    split: FloatArray  # what the backward pass takes longer if the one to the weights waits
    # No sums: a transfer of the activation, and of its gradient, if the model is cut at boundary i. Zero at both ends;
    # no gradient crosses where no layer before the boundary is trained.
    crossing: FloatArray
    gradient_crossing: FloatArray
    # Shape (layers + 1,), in seconds:
    reduce: FloatArray  # adding up gradients over the replicas
    gather: FloatArray  # sending updated weights to the other replicas, if each replica updates a share
    optimizer: FloatArray


def step_times(
    profile: ModelProfile,
    loads: Iterable[Load],
    links: Links,
    *,
    zero_stage: int = 1,
    recompute: Sequence[str] | None = None,
    num_replicas: int | None = None,
    unit: Unit | None = None,
) -> StepTimes:
    """Seconds of every layer for every micro-batch of every replica; arguments and errors as of `simulate_step`.

    ``num_replicas`` add up their gradients, where ``loads`` are not one Load for each. With units ``unit`` has the
    encoder's layers, and ``loads`` hold all micro-batches of a step, `numbered`.
    """
    load = stacked(loads)
    num_replicas = num_replicas or load.shape[0]
    check_zero_stage(zero_stage)
    layers = profile.layers
    crossing = _evaluate([layer.output_bytes for layer in layers[:-1]], load) / links.bandwidth_bytes_per_second
    crossing = np.pad(crossing + links.latency_seconds, ((0, 0), (0, 0), (1, 1)))
    sends_gradient = np.arange(len(layers) + 1) > profile.frozen_front
    whole = _once_a_step(profile, links, num_replicas, zero_stage)
    if unit is not None:
        first, border = _once_a_step(profile, unit.links, unit.num_replicas, zero_stage), unit.num_layers
        whole = [
            np.concatenate([own[: border + 1], own[border] + behind[border + 1 :] - behind[border]])
            for own, behind in zip(first, whole, strict=True)
        ]
    return StepTimes(
        summed(_evaluate([layer.forward_seconds for layer in layers], load)),
        summed(backward_of_layers(profile, load, recompute)),
        summed(_evaluate([layer.weight_seconds for layer in layers], load)),
        summed(_evaluate([layer.split_seconds for layer in layers], load)),
        crossing,
        crossing * sends_gradient,
        *whole,
    )


def stacked(loads: Iterable[Load]) -> Load:
    """Loads of the replicas as one, (replicas, micro-batches)."""
    load = Load.stack(loads)
    if len(load.shape) != 2 or 0 in load.shape:
        raise ConfigError(
            f"loads must be one Load per replica with one entry per micro-batch each, got shape {load.shape} of all"
        )
    return load


def numbered(load: Load) -> Load:
    """The micro-batches of a step, (replicas, micro-batches), in the order of their numbers in units' schedules."""
    replicas, micro_batches = load.shape
    numbers = np.arange(replicas * micro_batches)
    return load[numbers % replicas, numbers // replicas]


def _once_a_step(profile: ModelProfile, links: Links, num_replicas: int, zero_stage: int) -> list[FloatArray]:
    """The last three fields of `StepTimes`, for layers that all have so many replicas."""
    # A ring all-reduce moves 2 (replicas - 1) / replicas times the gradients. Under ZeRO 1 a gradient moves once, from
    # replica to replica to the one that updates its weight, and the weight once, on to all others.
    once = summed(np.array([layer.gradient_bytes for layer in profile.layers])) / links.between_replicas
    owners = num_replicas if zero_stage else 1
    is_shared = owners > 1
    reduce = once if is_shared else once * 2 * (num_replicas - 1) / num_replicas
    return [reduce, once * is_shared, summed(np.array([layer.optimizer_seconds / owners for layer in profile.layers]))]


def backward_of_layers(profile: ModelProfile, load: Load, recompute: Sequence[str] | None = None) -> FloatArray:
    """Seconds of each layer's backward pass to its inputs, recomputation included; shape (*load.shape, layers)."""
    levels = _levels(profile, recompute)
    costs = [c.backward_seconds + c.recompute_seconds[k] for c, k in zip(profile.layers, levels, strict=True)]
    backward = _evaluate(costs, load)
    # Backward passes run through frozen layers behind the first trained one, too, and through none before it.
    backward[..., : profile.frozen_front] = 0
    return backward


def summed(layers: FloatArray) -> FloatArray:
    """Sums over the layers before each boundary, shape (…, layers) -> (…, layers + 1)."""
    sums = np.zeros((*layers.shape[:-1], layers.shape[-1] + 1))
    np.cumsum(layers, axis=-1, out=sums[..., 1:])
    return sums


def _levels(profile: ModelProfile, recompute: Sequence[str] | None) -> Sequence[str]:
    if recompute is None:
        return ["none"] * len(profile.layers)
    if len(recompute) != len(profile.layers):
        raise ConfigError(f"recompute must have a level for each of {len(profile.layers)} layers, got {len(recompute)}")
    for layer, level in zip(profile.layers, recompute, strict=True):
        if level not in layer.saved_bytes:
            raise ConfigError(
                f"recompute must be one of {', '.join(layer.saved_bytes)} for {layer.name}, got {level!r}"
            )
    return recompute


def _evaluate(models: Sequence[CostModel], load: Load) -> FloatArray:
    """Values of all models for a load, shape (*load.shape, models)."""
    # Most layers of a model cost the same: equal models are evaluated once.
    places = {model: place for place, model in enumerate(dict.fromkeys(models))}
    values = np.stack([model(load) for model in places], axis=-1) if models else np.zeros((*load.shape, 0))
    return values.take([places[model] for model in models], axis=-1)


# In place of the number of a micro-batch: an instruction of the spread encoder, on a device's share of the images
IMAGES: Final = -1


def split_profile(profile: ModelProfile) -> tuple[ModelProfile, ModelProfile]:
    count = encoder_layers(profile.layers)
    encoder, language = profile.layers[:count], profile.layers[count:]
    if any(layer.trainable for layer in encoder):
        # Gradients for the encoder pass through every layer of the LLM, also where these are frozen: a first layer
        # that counts as trained, and has no gradient of its own, says so.
        language = (replace(language[0], trainable=True), *language[1:])
    return replace(profile, layers=encoder, frozen=None), replace(profile, layers=language, frozen=None)


def share_of_step(load: Load, layout: Layout) -> Load:
    """What each device encodes, where ``load`` is what a mean replica of the LLM gets in a step."""
    alone, _ = layout.parts
    return load * (layout.num_replicas / alone.num_replicas)


@dataclass(frozen=True)
class Exchanges:
    """Seconds of the all-to-alls of a step."""

    pixels: float
    features: float
    gradients: float  # of features; 0 where the encoder is frozen

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

    times: StepTimes  # of the encoder's layers; its one micro-batch is a device's share
    exchanges: Exchanges

    @classmethod
    def of(
        cls, encoder: ModelProfile, load: Load, layout: Layout, links: Links, recompute: Sequence[str] | None = None
    ) -> EncoderWork:
        """``load`` holds the micro-batches of the step, (replicas, micro-batches); ``links`` join all devices."""
        shares = [share_of_step(load.mean() * load.shape[1], layout).reshape((1,))]
        zero, devices = layout.zero_stage, layout.parts[0].num_replicas
        times = step_times(encoder, shares, links, zero_stage=zero, recompute=recompute, num_replicas=devices)
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
