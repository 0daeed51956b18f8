"""Seconds of a step in which ranks do nothing but talk to each other, under each trainer.

Assumptions:

- What ranks send while they compute costs nothing as far as they compute so long: parameters of the next layers are
  gathered, and gradients of the last ones reduced, beside the pass of a whole phase (DeepSpeed's ``overlap_comm`` and
  prefetching, FSDP's and DDP's own).
- All devices of a node send and receive at a time, each over its share of the network (NCCL's several rings or trees).
- Gradients travel in the 16 bits of the forward pass.
"""

from collections.abc import Mapping

import numpy as np

from omnibal.advise.wait import MEETINGS, Trainer
from omnibal.cluster import Cluster, Layout
from omnibal.cost import FloatArray
from omnibal.profile.records import ModelProfile


def bandwidth(cluster: Cluster) -> float:
    """Bytes per second that every device gets while all of them gather or reduce."""
    between = cluster.links_of(Layout(num_replicas=cluster.num_devices)).between_replicas
    if cluster.links is not None or cluster.num_nodes == 1:
        return between
    return min(cluster.device.link_bytes_per_second, cluster.devices_per_node * between)


def exposed_seconds(
    profile: ModelProfile, trainer: Trainer, cluster: Cluster, costs: Mapping[str, FloatArray]
) -> FloatArray:
    """What every step takes beyond its computations and waits, shape (steps,).

    Args:
        profile: What the layers hold.
        trainer: How ranks share their work.
        cluster: All of its devices are ranks.
        costs: Of each phase, as ``phase_seconds`` gives them, shape (steps, ranks, micro-batches).
    """
    ranks = cluster.num_devices
    share = (ranks - 1) / ranks / bandwidth(cluster)  # of bytes that all ranks end up with, or send their part of
    slowest = {phase: seconds.max(axis=1) for phase, seconds in costs.items()}  # (steps, micro-batches)
    steps = len(next(iter(slowest.values())))
    backward = slowest["language backward"] + slowest["vision backward"]
    trained = sum(layer.gradient_bytes for layer in profile.layers) * share
    meeting = MEETINGS[trainer]
    if meeting == "phase":
        gathered = {part: _bytes(profile, part, "parameter_bytes") * share for part in ("vision", "language")}
        reduced = {part: _bytes(profile, part, "gradient_bytes") * share for part in ("vision", "language")}
        exposed = np.zeros(steps)
        for phase, seconds in slowest.items():
            part, _, direction = phase.partition(" ")
            sent = gathered[part] + (reduced[part] if direction == "backward" else 0.0)
            exposed += (np.maximum(sent - seconds, 0) * (seconds > 0)).sum(axis=1)  # nothing passes a frozen front back
        return exposed
    if meeting == "micro_batch":
        beside: FloatArray = np.maximum(trained - backward, 0).sum(axis=1)
        return beside + trained  # updated parameters are gathered in the end
    reduced_at_once = 2 * trained if trainer == "ddp" else trained  # DDP hands the sums to all ranks
    updated = 0.0 if trainer == "ddp" else trained
    last: FloatArray = np.maximum(reduced_at_once - backward[:, -1], 0)
    return last + updated


def _bytes(profile: ModelProfile, part: str, name: str) -> int:
    layers = [layer for layer in profile.layers if (layer.module == "language") == (part == "language")]
    return sum(getattr(layer, name) for layer in layers)
