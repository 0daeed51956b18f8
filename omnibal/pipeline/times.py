"""Seconds of a whole step, layer by layer: what every partition of it is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from omnibal.cluster import Links, check_zero_stage
from omnibal.compiled import compiled
from omnibal.cost import CostModel, FloatArray, IntArray, Load
from omnibal.errors import ConfigError
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import Operation, Table
from omnibal.profile.records import ModelProfile

_BW, _W = int(Operation.BW), int(Operation.W)


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
) -> StepTimes:
    """Seconds of every layer for every micro-batch of every replica; arguments and errors as of `simulate_step`.

    Args:
        num_replicas: How many replicas add up their gradients, where ``loads`` are not one Load for each.
    """
    load = Load.stack(loads)
    if len(load.shape) != 2 or 0 in load.shape:
        raise ConfigError(
            f"loads must be one Load per replica with one entry per micro-batch each, got shape {load.shape} of all"
        )
    num_replicas = num_replicas or load.shape[0]
    check_zero_stage(zero_stage)
    layers = profile.layers
    crossing = _evaluate([layer.output_bytes for layer in layers[:-1]], load) / links.bandwidth_bytes_per_second
    crossing = np.pad(crossing + links.latency_seconds, ((0, 0), (0, 0), (1, 1)))
    sends_gradient = np.arange(len(layers) + 1) > profile.frozen_front
    # A ring all-reduce moves 2 (replicas - 1) / replicas times the gradients. Under ZeRO 1 a gradient moves once, from
    # replica to replica to the one that updates its weight, and the weight once, on to all others.
    once = summed(np.array([layer.gradient_bytes for layer in layers])) / links.between_replicas
    owners = num_replicas if zero_stage else 1
    is_shared = owners > 1
    return StepTimes(
        forward=summed(_evaluate([layer.forward_seconds for layer in layers], load)),
        backward=summed(backward_of_layers(profile, load, recompute)),
        weight=summed(_evaluate([layer.weight_seconds for layer in layers], load)),
        split=summed(_evaluate([layer.split_seconds for layer in layers], load)),
        crossing=crossing,
        gradient_crossing=crossing * sends_gradient,
        reduce=once if is_shared else once * 2 * (num_replicas - 1) / num_replicas,
        gather=once * is_shared,
        optimizer=summed(np.array([layer.optimizer_seconds / owners for layer in layers])),
    )


def backward_of_layers(profile: ModelProfile, load: Load, recompute: Sequence[str] | None = None) -> FloatArray:
    """Seconds of each layer's backward pass to its inputs, recomputation included; shape (*load.shape, layers)."""
    levels = _levels(profile, recompute)
    costs = [c.backward_seconds + c.recompute_seconds[k] for c, k in zip(profile.layers, levels, strict=True)]
    backward = _evaluate(costs, load)
    # Backward passes run through frozen layers behind the first trained one, too, and through none before it.
    backward[..., : profile.frozen_front] = 0
    return backward


@compiled
def durations_of(times: StepTimes, replica: int, boundaries: IntArray) -> FloatArray:
    """Seconds of F, BW, B and W on every stage of a partition, shape (4, micro-batches, stages)."""
    num_stages, micro_batches = len(boundaries) - 1, times.forward.shape[1]
    # Row by Operation: 0 F, 1 BW, 2 B, 3 W. A stage's seconds are the difference of two sums over layers.
    result = np.empty((4, micro_batches, num_stages))
    for m in range(micro_batches):
        for stage in range(num_stages):
            first, last = boundaries[stage], boundaries[stage + 1]
            result[0, m, stage] = times.forward[replica, m, last] - times.forward[replica, m, first]
            to_inputs = times.backward[replica, m, last] - times.backward[replica, m, first]
            result[3, m, stage] = times.weight[replica, m, last] - times.weight[replica, m, first]
            result[1, m, stage] = to_inputs + result[3, m, stage]
            result[2, m, stage] = to_inputs + times.split[replica, m, last] - times.split[replica, m, first]
    return result


@compiled
def transfers_of(times: StepTimes, replica: int, boundaries: IntArray) -> FloatArray:
    """Seconds of every micro-batch's transfer over every cut, shape (micro-batches, stages - 1)."""
    crossing: FloatArray = times.crossing[replica][:, boundaries[1:-1]]
    return crossing


@compiled
def release_of(times: StepTimes, replica: int, boundaries: IntArray, micro_batch: int = 0) -> FloatArray:
    """When each stage may begin its first forward pass, that of ``micro_batch``; shape (stages,)."""
    # Updated weights come from the other replicas layer by layer, while the stage already runs its first layers.
    # Layer l runs at release + (forward of the stage's layers before l), and needs the weights of all layers up to l.
    release = np.zeros(len(boundaries) - 1)
    for stage in range(len(release)):
        first, last = boundaries[stage], boundaries[stage + 1]
        for layer in range(first, last):
            come = times.gather[layer + 1] - times.gather[first]
            turn = times.forward[replica, micro_batch, layer] - times.forward[replica, micro_batch, first]
            release[stage] = max(release[stage], come - turn)
    return release


@compiled
def complete_gradients(
    times: StepTimes, replica: int, boundaries: IntArray, table: Table, starts: FloatArray, ready: FloatArray
) -> None:
    """Raise ``ready``, shape (layers,), to the time at which a replica has the complete gradient of each layer."""
    # Gradients are complete layer by layer from the last one on, during a stage's last backward pass to the weights.
    for stage in range(len(boundaries) - 1):
        # Find the stage's last BW or W, and walk through its layers from the last to the first.
        for position in range(table.lengths[stage] - 1, -1, -1):
            operation, m = table.operations[stage, position], table.micro_batches[stage, position]
            if operation not in (_BW, _W):
                continue
            clock = starts[stage, position]
            for layer in range(boundaries[stage + 1] - 1, boundaries[stage] - 1, -1):
                clock += times.weight[replica, m, layer + 1] - times.weight[replica, m, layer]
                if operation == _BW:
                    clock += times.backward[replica, m, layer + 1] - times.backward[replica, m, layer]
                ready[layer] = max(ready[layer], clock)
            break


@compiled
def reduced_at(times: StepTimes, boundaries: IntArray, ready: FloatArray) -> FloatArray:
    """When each stage has added up its gradients over the replicas, shape (stages,)."""
    # A stage's reductions run one after another, from its last layer on: each starts when the layer is ready and the
    # one before it has ended.
    reduced = np.zeros(len(boundaries) - 1)
    for stage in range(len(reduced)):
        for layer in range(boundaries[stage + 1] - 1, boundaries[stage] - 1, -1):
            reduced[stage] = max(reduced[stage], ready[layer]) + times.reduce[layer + 1] - times.reduce[layer]
    return reduced


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
