"""Seconds of a whole step, layer by layer: what every partition of it is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from omnibal.cluster import Links, check_zero_stage
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
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


def check_partition(profile: ModelProfile, partition: Partition) -> None:
    if partition.num_layers != len(profile.layers):
        raise ConfigError(
            f"partition must be of the profile's {len(profile.layers)} layers, got one of {partition.num_layers}"
        )


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
