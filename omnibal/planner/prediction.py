"""What a step under a plan will be like, stage by stage."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from omnibal.cost import FloatArray, Load
from omnibal.memory.footprint import LEVELS
from omnibal.memory.recompute import recompute_seconds
from omnibal.pipeline.simulate import Mode
from omnibal.pipeline.times import step_times
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.planner.steps import Packing
from omnibal.profile.records import ModelProfile


def predict(profile: ModelProfile, plan: Plan, packing: Packing, *, mode: Mode = "rendezvous") -> Prediction:
    """Means over the steps of a packing; memory is that of the largest micro-batch there can be.

    Args:
        profile: What the layers cost.
        plan: With a cluster.
        packing: What the micro-batches hold.
        mode: Of 1F1B's transfers.

    Raises:
        ConfigError: The plan has no cluster, or profile, plan and packing do not fit each other.
    """
    steps = [plan.simulate(profile, loads, mode=mode) for loads in packing.steps]
    busy = np.mean(
        [replica.busy_seconds / step.pipeline_seconds for step in steps for replica in step.replicas], axis=0
    )
    loads = [load for step in packing.steps for load in step]
    times = step_times(profile, loads, plan.links)
    levels = [LEVELS.index(level) for level in plan.recompute]
    footprint = plan.footprint(profile, packing.largest, target_share=packing.target_share)
    memory = footprint.stages(plan.partition, plan.recompute)
    stages = []
    for stage in range(plan.num_stages):
        layers = plan.partition.layers(stage)
        backward = times.weight + (times.backward if stage else times.first_backward)
        at_levels = recompute_seconds(profile, Load.stack(loads), stage)
        recompute = sum(float(at_levels[layer, levels[layer]]) for layer in layers)
        stages.append(
            StagePrediction(
                forward_seconds=_short(_mean_between(times.forward, layers)),
                backward_seconds=_short(_mean_between(backward, layers) + recompute),
                recompute_seconds=_short(recompute),
                idle_ratio=_short(1 - busy[stage]),
                pending_bytes=int(footprint.pending_bytes(stage)[layers.start, layers.stop]),
                memory=memory[stage],
            )
        )
    return Prediction(
        step_seconds=_short(fmean(step.step_seconds for step in steps)),
        samples_per_step=_short(packing.samples_per_step),
        bubble_ratio=_short(fmean(step.bubble_ratio for step in steps)),
        stages=tuple(stages),
    )


def _mean_between(sums: FloatArray, layers: range) -> float:
    return float((sums[..., layers.stop] - sums[..., layers.start]).mean())


def _short(value: float) -> float:
    """As many digits as a plan should say."""
    return float(f"{value:.6g}")
