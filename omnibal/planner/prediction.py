"""What a step under a choice will be like, stage by stage."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from omnibal.cost import FloatArray
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.simulate import StepSimulation, simulate_step
from omnibal.plan import Prediction, StagePrediction
from omnibal.planner.search import Choice


def simulate_choice(choice: Choice) -> list[StepSimulation]:
    """Every step of the choice's packing."""
    model = choice.model
    levels = model.levels(choice.boundaries)
    return [
        simulate_step(
            model.profile,
            choice.partition,
            loads,
            model.request.links,
            zero_stage=model.request.zero_stage,
            recompute=levels,
            schedule=model.schedule,
            mode=model.request.mode,
        )
        for loads in model.packing.steps
    ]


def predict(choice: Choice) -> Prediction:
    """Means over the steps of the choice's packing; memory is that of the largest micro-batch there can be."""
    model = choice.model
    steps, levels = simulate_choice(choice), model.levels(choice.boundaries)
    busy = np.mean(
        [replica.busy_seconds / step.pipeline_seconds for step in steps for replica in step.replicas], axis=0
    )
    memory = model.footprint.stages(choice.partition, levels)
    stages = tuple(_stage(choice, stage, float(1 - share), memory[stage]) for stage, share in enumerate(busy))
    return Prediction(
        step_seconds=_short(fmean(step.step_seconds for step in steps)),
        samples_per_step=_short(model.packing.samples_per_step),
        bubble_ratio=_short(fmean(step.bubble_ratio for step in steps)),
        stages=stages,
    )


def _stage(choice: Choice, stage: int, idle_ratio: float, memory: StageMemory) -> StagePrediction:
    times, layers = choice.model.average.times, choice.partition.layers(stage)
    backward = times.weight + (times.backward if stage else times.first_backward)
    recompute = choice.model.recompute_of(stage, choice.boundaries)
    return StagePrediction(
        forward_seconds=_short(_mean_between(times.forward, layers)),
        backward_seconds=_short(_mean_between(backward, layers) + recompute),
        recompute_seconds=_short(recompute),
        idle_ratio=_short(idle_ratio),
        pending_bytes=int(choice.model.footprint.pending_bytes(stage)[layers.start, layers.stop]),
        memory=memory,
    )


def _mean_between(sums: FloatArray, layers: range) -> float:
    return float((sums[..., layers.stop] - sums[..., layers.start]).mean())


def _short(value: float) -> float:
    """As many digits as a plan should say."""
    return float(f"{value:.6g}")
