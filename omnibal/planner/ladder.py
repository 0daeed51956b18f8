"""What a plan gains, one idea after the other: from random padded micro-batches to its data, partition and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

import numpy as np

from omnibal.cluster import Links
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import random_padded_steps
from omnibal.data.sampler import BalancedBatchSampler
from omnibal.memory.footprint import Level
from omnibal.pipeline.balanced import parameter_cut
from omnibal.pipeline.boundaries import Partition
from omnibal.pipeline.schedule import SCHEDULES, Schedule, ScheduleName
from omnibal.pipeline.simulate import StepSimulation, simulate_step
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile

Steps = tuple[tuple[Load, ...], ...]
"""For each step a Load per replica with an entry per micro-batch."""


@dataclass(frozen=True, eq=False)
class Rung:
    """One way to train.

    Attributes:
        name: What has been balanced.
        profile: What the layers cost.
        steps: What micro-batches hold.
        samples_per_step: On average.
        partition: Where the model is cut.
        recompute: A level for each layer.
        links: How fast data moves.
        zero_stage: As ``simulate_step`` takes it.
        schedule: What the stages run.
    """

    name: str
    profile: ModelProfile
    steps: Steps
    samples_per_step: float
    partition: Partition
    recompute: tuple[Level, ...]
    links: Links
    zero_stage: int
    schedule: ScheduleName = "1f1b"

    @property
    def table(self) -> Schedule:
        """What every stage runs."""
        return SCHEDULES[self.schedule](self.partition.num_stages, self.load.shape[-1])

    @cached_property
    def simulated(self) -> tuple[StepSimulation, ...]:
        """Every step."""
        return tuple(
            simulate_step(
                self.profile, self.partition, loads, self.links, zero_stage=self.zero_stage, recompute=self.recompute,
                schedule=self.table,
            )
            for loads in self.steps
        )  # fmt: skip

    @property
    def step_seconds(self) -> float:
        """Mean of the steps."""
        return fmean(step.step_seconds for step in self.simulated)

    @property
    def samples_per_second(self) -> float:
        """Throughput of all replicas."""
        return self.samples_per_step / self.step_seconds

    @property
    def bubble_ratio(self) -> float:
        """Mean of the steps."""
        return fmean(step.bubble_ratio for step in self.simulated)

    @cached_property
    def load(self) -> Load:
        """Every micro-batch, shape (steps, replicas, micro-batches)."""
        return Load.stack(Load.stack(step) for step in self.steps)


def plan_ladder(
    profile: ModelProfile,
    plan: Plan,
    lengths: SampleLengths,
    *,
    num_replicas: int,
    batch_size: int,
    steps: int,
    links: Links,
    zero_stage: int,
    seed: int = 0,
) -> tuple[Rung, ...]:
    """From present batching to the plan: nothing balanced, then data, model, memory, and the schedule if it is another.

    The first row trains on random micro-batches of ``batch_size`` samples, padded, with about as many samples a step as
    the plan, cut by parameters, everything recomputed.

    Raises:
        ConfigError: The plan does not fit the profile, or there are fewer samples than a step needs.
    """
    sampler = BalancedBatchSampler(
        lengths, plan.limits, num_replicas=num_replicas, rank=0, micro_batches=plan.micro_batches, seed=seed
    )
    numbers = np.unique(np.linspace(0, max(sampler.num_steps - 2, 0), steps).astype(int))  # the last may be short
    chosen = [sampler.step(int(number)) for number in numbers]
    packed = tuple(tuple(step.load(lengths)) for step in chosen)
    samples = fmean(step.num_samples for step in chosen)
    micro_batches = max(1, round(samples / (num_replicas * batch_size)))
    padded = random_padded_steps(
        lengths, batch_size=batch_size, num_replicas=num_replicas, micro_batches=micro_batches, steps=steps, seed=seed
    )
    before: Steps = tuple(tuple(step) for step in padded)
    cut = parameter_cut(profile, plan.num_stages)
    everything: Level = "full"
    full = (everything,) * len(profile.layers)
    padded_samples = float(num_replicas * micro_batches * batch_size)
    rungs = (
        Rung("as today", profile, before, padded_samples, cut, full, links, zero_stage),
        Rung("+ data", profile, packed, samples, cut, full, links, zero_stage),
        Rung("+ model", profile, packed, samples, plan.partition, full, links, zero_stage),
        Rung("+ memory", profile, packed, samples, plan.partition, plan.recompute, links, zero_stage),
    )
    return rungs if plan.schedule == "1f1b" else (*rungs, replace(rungs[-1], name="+ schedule", schedule=plan.schedule))
