"""What a plan will be like, and what it gains over random batches, one idea after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Final

import numpy as np

from omnibal.cost import FloatArray, Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import random_padded_steps
from omnibal.families.base import encoder_layers
from omnibal.memory.recompute import recompute_seconds
from omnibal.pipeline.partition import cut_parts
from omnibal.pipeline.simulate import StepSimulation
from omnibal.pipeline.times import step_times, summed
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.planner.packings import Packing, StepLoads, spread_steps
from omnibal.profile.records import LEVELS, ModelProfile, every_layer

RANDOM: Final = "random batches"
"""The name of the first variant."""


def predict(profile: ModelProfile, plan: Plan, packing: Packing) -> Prediction:
    """Means over the steps of a packing; memory is that of the largest possible micro-batch."""
    steps = [plan.simulate(profile, loads) for loads in packing.steps]
    # Waiting for the slowest replica is idle time of the others, so all share its makespan.
    busy = np.mean(
        [replica.stage_busy_seconds / step.pipeline_seconds for step in steps for replica in step.replicas], axis=0
    )
    loads = [load for step in packing.steps for load in step]
    times = step_times(profile, loads, plan.links)
    levels = [LEVELS.index(level) for level in plan.recompute]
    footprint = plan.footprint(profile, packing.largest, packing.fullest_mean)
    memory = footprint.stages(plan.partition, plan.recompute)
    at_levels, stages = recompute_seconds(profile, Load.stack(loads)), []
    again = summed(at_levels[np.arange(len(levels)), levels])
    # Of a spread encoder, whose layers are counted with the first stage, every device has its share.
    on_all = encoder_layers(profile.layers) if plan.layout.is_spread else 0
    share = plan.layout.num_replicas / plan.layout.num_devices

    def mean(sums: FloatArray, layers: range) -> float:
        own, encoder = range(max(layers.start, on_all), layers.stop), range(on_all)
        return _mean_between(sums, own) + share * _mean_between(sums, encoder)

    for stage in range(plan.num_stages):
        layers = plan.partition.layers(stage)
        recompute = mean(again, layers)
        stages.append(
            StagePrediction(
                forward_seconds=_short(mean(times.forward, layers)),
                backward_seconds=_short(mean(times.backward + times.weight, layers) + recompute),
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
    return float(f"{value:.6g}")


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to train, with ``name`` saying what has been balanced."""

    name: str
    profile: ModelProfile
    plan: Plan
    steps: StepLoads
    samples_per_step: float

    @cached_property
    def simulated(self) -> tuple[StepSimulation, ...]:
        return tuple(self.plan.simulate(self.profile, loads) for loads in self.steps)

    @property
    def step_seconds(self) -> float:
        return fmean(step.step_seconds for step in self.simulated)

    @property
    def samples_per_second(self) -> float:
        return self.samples_per_step / self.step_seconds

    @property
    def bubble_ratio(self) -> float:
        return fmean(step.bubble_ratio for step in self.simulated)

    @cached_property
    def load(self) -> Load:
        return Load.stack(Load.stack(step) for step in self.steps)


def variants_up_to(
    plan: Plan, profile: ModelProfile, lengths: SampleLengths, *, batch_size: int, steps: int, seed: int = 0
) -> tuple[Variant, ...]:
    """From random batches to the plan: nothing balanced, then data, model, memory, and a schedule other than 1F1B.

    The first variant trains on random padded micro-batches of ``batch_size`` samples, with about as many samples a step
    as the plan, cut by parameters and with every layer recomputed.
    """
    num_replicas = plan.layout.num_replicas
    epoch = arrange_epoch(lengths, plan.limits, num_replicas=num_replicas, micro_batches=plan.micro_batches, seed=seed)
    packed = Packing.of(epoch, lengths, plan.limits, spread_steps(epoch.num_steps, steps))
    alike = round(packed.samples_per_step / (num_replicas * batch_size))
    micro_batches = max(1, min(alike, len(lengths) // (num_replicas * batch_size)))  # a step of few data is all of them
    padded = random_padded_steps(
        lengths, batch_size=batch_size, num_replicas=num_replicas, micro_batches=micro_batches, steps=steps, seed=seed
    )
    full, trained = every_layer("full", len(profile.layers)), [layer.gradient_bytes for layer in profile.layers]
    unsplit = replace(plan, schedule="1f1b", predicted=None)
    cut = replace(unsplit, partition=cut_parts(profile.layers, trained, plan.layout), recompute=full)
    before: StepLoads = tuple(tuple(step) for step in padded)
    random = Variant(
        RANDOM, profile, replace(cut, micro_batches=micro_batches), before,
        float(num_replicas * micro_batches * batch_size),
    )  # fmt: skip
    plans = {"+ data": cut, "+ model": replace(unsplit, recompute=full), "+ memory": unsplit}
    if plan.schedule != "1f1b":
        plans["+ schedule"] = plan
    balanced = [Variant(name, profile, found, packed.steps, packed.samples_per_step) for name, found in plans.items()]
    return (random, *balanced)
