"""Seconds of a step without a pipeline: what each phase takes, where ranks wait for each other, and what they send.

Assumptions:

- Ranks are equally fast, and only their micro-batches differ.
- A rank never runs ahead of a meeting: what follows one begins when the last rank has come.
- Where parameters are gathered layer by layer, every layer of a phase takes the same share of the phase on all ranks,
  so the waits before its layers add up to one wait at the end of the phase; and no rank skips a phase.
- Communication is free as long as ranks compute meanwhile: parameters of the next layers are gathered, and gradients of
  the last ones reduced, beside a whole phase (DeepSpeed's ``overlap_comm`` and prefetching, FSDP's and DDP's own).
- All devices of a node send and receive at the same time, each over its share of the network (NCCL's rings or trees).
- Gradients travel in the 16 bits of the forward pass.
- A micro-batch takes at least the time in which the host starts its operations, one by one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from omnibal.cluster import Cluster, Layout
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.device import LINK_FRACTION
from omnibal.errors import ConfigError
from omnibal.profile.records import LayerCost, Level, ModelProfile

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
"""What data-parallel ranks share; plain DDP accumulates under ``no_sync``, as Trainer and Accelerate do."""
Meeting = Literal["step", "micro_batch", "phase"]

MEETINGS: Final[Mapping[Sharding, Meeting]] = {
    "ddp": "step",  # gradients are reduced in the last micro-batch only
    "zero1": "step",
    "zero2": "micro_batch",  # DeepSpeed reduces each micro-batch's gradients to the rank that keeps them
    "zero3": "phase",  # parameters are gathered as layers run, forward and backward
    "fsdp": "phase",
}
"""What ranks do on their own before they wait for each other."""
CostByPhase = Mapping[str, CostModel]  # what a micro-batch costs in each phase, in seconds
PHASES: Final = ("vision forward", "language forward", "language backward", "vision backward")
"""The order in which all ranks run them; the projector belongs to vision."""
SOUND_PHASES: Final = ("sound forward", "sound backward")
"""Further phases of a model that hears, first and last."""
LAUNCH_SECONDS: Final = 30e-6
"""What a host takes to start one operation of transformers' blocks: on one H200's machine it took 0.47 ms for the 14 of
a ViT block's forward pass and 1.02 ms for the 38 of a decoder block, in a 1B model (tools/gpu/RESULTS.md, "Layers").
With twice the operations backward, a micro-batch of an eighth of a pack comes to 0.11 s; its layers took 0.13 s."""
BACKWARD_OPERATIONS: Final = 2  # over those of the forward pass
_RMS_NORM, _ROTARY = 8, 10  # operations of a norm in float32, and of a rotary embedding of queries and keys


def phase_seconds(profile: ModelProfile, loads: Load, *, recompute: Level = "none") -> dict[str, FloatArray]:
    """Seconds that micro-batches of any shape take in each phase, without any wait."""
    return {phase: cost(loads) for phase, cost in phase_costs(profile, recompute=recompute).items()}


def phase_costs(profile: ModelProfile, *, recompute: Level | tuple[Level, ...] = "none") -> dict[str, CostModel]:
    """The costs that ``phase_seconds`` evaluates, for callers with many micro-batches.

    ``recompute`` is one level, or one for each layer.
    """
    levels = (recompute,) * len(profile.layers) if isinstance(recompute, str) else recompute
    hears = any(layer.module == "sound" for layer in profile.layers)
    phases = (SOUND_PHASES[0], *PHASES, SOUND_PHASES[1]) if hears else PHASES
    costs: dict[str, CostModel] = dict.fromkeys(phases, CostModel())
    for layer, reached, level in zip(profile.layers, profile.reached, levels, strict=True):
        part = layer.part
        costs[f"{part} forward"] += layer.forward_seconds
        if reached:
            again = layer.recompute_seconds.get(level, CostModel())
            costs[f"{part} backward"] += layer.backward_seconds + layer.weight_seconds + again
    return costs


def host_seconds(profile: ModelProfile, *, recompute: Level | tuple[Level, ...] = "none") -> float:
    """The least seconds of a micro-batch, whatever it holds: a host starts all operations of its blocks.

    Measured costs have it in them. ``recompute`` is one level, or one for each layer.
    """
    if profile.versions:
        return 0.0
    levels = (recompute,) * len(profile.layers) if isinstance(recompute, str) else recompute
    passes = (
        1 + (BACKWARD_OPERATIONS + (level != "none") if is_reached else 0)
        for is_reached, level in zip(profile.reached, levels, strict=True)
    )
    return LAUNCH_SECONDS * sum(operations(layer) * each for layer, each in zip(profile.layers, passes, strict=True))


def operations(layer: LayerCost) -> int:
    """Kernels that the forward pass of a block starts, run operation by operation; 0 of what is no block.

    Experts count as one MLP, and adapters not at all.
    """
    sizes = layer.sizes
    if not layer.kind.endswith("_block"):
        return 0
    # Products, attention, sums of branches, the activation (and its product with the other branch), scales, norms.
    if layer.kind == "decoder_block":
        return 7 + 1 + 2 + 2 + _ROTARY + _RMS_NORM * (2 + sizes["qk_norms"])
    matrices, norms = sizes.get("mlp_matrices", 2), sizes["rms_norms"]
    scales = sizes.get("residual_scales", 2) + _ROTARY * sizes.get("rotary", 0)
    return 4 + matrices + 1 + 2 + matrices - 1 + scales + 2 - norms + _RMS_NORM * (norms + sizes["qk_norms"])


def sample_costs(profile: ModelProfile, *, recompute: Level = "none") -> dict[str, CostModel]:
    """What a sample costs in each encoder and the LLM, both passes; a micro-batch's fixed costs are left out."""
    costs = phase_costs(profile, recompute=recompute)
    parts = [phase.removesuffix(" forward") for phase in costs if phase.endswith("forward")]
    return {part: replace(costs[f"{part} forward"] + costs[f"{part} backward"], fixed=0.0) for part in parts}


def wait(costs: Mapping[str, ArrayLike], layout: Sharding) -> dict[str, FloatArray]:
    """Seconds that each rank of each step waits, by the phase that causes it.

    A meeting is reached last by the rank with the largest sum of the phases before it (the first of several). Another
    rank waits for the difference, and a phase causes what the last rank spends more in it. Where ranks meet after
    several phases, that is negative for a phase in which the last rank spends less. Over all phases the sum is what the
    rank waits; with its own seconds it is the same on all ranks of a step.

    Args:
        costs: Of each phase, in any order ("vision forward", "language backward", …), the seconds that it takes alone:
            arrays of one shape (steps, ranks, micro-batches), finite and not negative.
        layout: How the ranks share their work.

    Returns:
        For each phase, in the order of ``costs``, an array of shape (steps, ranks).

    Raises:
        ConfigError: The layout is unknown, there is no phase, or an array's shape or values are not as above.

    Under DDP one rank's long texts make up for the other's many tiles; under ZeRO 3 each phase is waited for:

    >>> costs = {"vision": [[[3.0], [1.0]]], "language": [[[1.0], [3.0]]]}
    >>> {phase: seconds.tolist() for phase, seconds in wait(costs, "zero3").items()}
    {'vision': [[0.0, 2.0]], 'language': [[2.0, 0.0]]}
    >>> sum(wait(costs, "ddp").values()).tolist()
    [[0.0, 0.0]]
    """
    if layout not in MEETINGS:
        raise ConfigError(f"layout must be one of {', '.join(MEETINGS)}, got {layout!r}")
    seconds = _stacked(costs)  # (phases, steps, ranks, micro-batches)
    if MEETINGS[layout] == "phase":
        waited = (seconds.max(axis=2, keepdims=True) - seconds).sum(axis=3)
    elif MEETINGS[layout] == "micro_batch":
        waited = _until_last(seconds).sum(axis=3)
    else:
        waited = _until_last(seconds.sum(axis=3, keepdims=True))[..., 0]
    return dict(zip(costs, waited, strict=True))


def _until_last(seconds: FloatArray) -> FloatArray:
    """Waits by phase, shape (phases, steps, ranks, meetings), where ranks meet after all phases of a meeting."""
    last = seconds.sum(axis=0).argmax(axis=1)[:, None]  # the rank that comes last, (steps, 1, meetings)
    return np.take_along_axis(seconds, last[None], axis=2) - seconds


def step_seconds(loads: Load, costs: CostByPhase, layout: Sharding) -> tuple[FloatArray, FloatArray]:
    """Seconds that each rank of each step computes, and that it waits; all ranks of a step have one sum of both."""
    seconds = {phase: cost(loads) for phase, cost in costs.items()}
    busy = np.sum(list(seconds.values()), axis=0).sum(axis=2)
    return busy, np.sum(list(wait(seconds, layout).values()), axis=0)


def _stacked(costs: Mapping[str, ArrayLike]) -> FloatArray:
    if not costs:
        raise ConfigError("costs must hold at least one phase, got none")
    arrays = {phase: np.asarray(seconds, dtype=np.float64) for phase, seconds in costs.items()}
    shapes = {phase: array.shape for phase, array in arrays.items()}
    shape = next(iter(shapes.values()))
    if len(shape) != 3 or 0 in shape or set(shapes.values()) != {shape}:
        raise ConfigError(f"costs must be of one shape (steps, ranks, micro-batches), none of them 0, got {shapes}")
    for phase, array in arrays.items():
        wrong = ~(np.isfinite(array) & (array >= 0))
        if wrong.any():
            raise ConfigError(f"costs[{phase!r}] must be finite and not negative, got {array[wrong].flat[0]:g}")
    return np.stack(list(arrays.values()))


def bandwidth(cluster: Cluster) -> float:
    """Bytes per second that every device gets while all of them gather or reduce.

    Links that a cluster's record gives are taken as they are; of data sheets' a part is reached.
    """
    between = cluster.links_of(Layout(num_replicas=cluster.num_devices)).between_replicas
    if cluster.links is not None:
        return between
    if cluster.num_nodes == 1:
        return LINK_FRACTION * between
    return LINK_FRACTION * min(cluster.device.link_bytes_per_second, cluster.devices_per_node * between)


def exposed_seconds(
    profile: ModelProfile,
    sharding: Sharding,
    cluster: Cluster,
    costs: Mapping[str, FloatArray],
    *,
    hides: bool = True,
) -> FloatArray:
    """Seconds of every step in which ranks only communicate.

    Args:
        costs: From ``phase_seconds``.
        hides: Whether ranks compute beside what they send, as assumed above.
    """
    # In a ring every rank sends (ranks - 1) / ranks of the bytes that all ranks end up with, or give their part of.
    share = (cluster.num_devices - 1) / cluster.num_devices / bandwidth(cluster)
    slowest = {phase: seconds.max(axis=1) for phase, seconds in costs.items()}  # of all ranks; (steps, micro-batches)
    backward = np.sum([seconds for phase, seconds in slowest.items() if phase.endswith("backward")], axis=0)
    trained = sum(layer.gradient_bytes for layer in profile.layers) * share
    if MEETINGS[sharding] == "phase":
        parts = {phase.partition(" ")[0] for phase in costs}
        weights = {part: _bytes(profile, part, "parameter_bytes") * share for part in parts}
        reduced = {part: _bytes(profile, part, "gradient_bytes") * share for part in parts}
        exposed = np.zeros(len(backward))
        for phase, seconds in slowest.items():
            part, _, direction = phase.partition(" ")
            sent = weights[part] + (reduced[part] if direction == "backward" else 0.0)
            # A phase of no seconds is the backward pass of a frozen front, through which no gradient goes.
            exposed += (np.maximum(sent - hides * seconds, 0) * (seconds > 0)).sum(axis=1)
        return exposed
    if MEETINGS[sharding] == "micro_batch":
        beside: FloatArray = np.maximum(trained - hides * backward, 0).sum(axis=1)
        return beside + trained  # updated parameters are gathered in the end
    # DDP sums gradients on every rank (reduce and gather); ZeRO 1 leaves each rank its part, and gathers parameters.
    last: FloatArray = np.maximum((2 * trained if sharding == "ddp" else trained) - hides * backward[:, -1], 0)
    return last + (0.0 if sharding == "ddp" else trained)


def _bytes(profile: ModelProfile, part: str, name: str) -> int:
    return sum(getattr(layer, name) for layer in profile.layers if layer.part == part)
