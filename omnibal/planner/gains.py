"""What a plan gains, one idea after the other: from random padded micro-batches to its data, partition and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from omnibal.cost import Load
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import random_padded_steps
from omnibal.memory.footprint import Level
from omnibal.pipeline.balanced import parameter_cut
from omnibal.pipeline.simulate import StepSimulation
from omnibal.plan import Plan
from omnibal.planner.steps import Packing, Steps, spread_steps
from omnibal.profile.records import ModelProfile


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to train.

    Attributes:
        name: What has been balanced.
        profile: What the layers cost.
        plan: Partition, recompute levels, schedule, layout and cluster.
        steps: What micro-batches hold.
        samples_per_step: On average.
    """

    name: str
    profile: ModelProfile
    plan: Plan
    steps: Steps
    samples_per_step: float

    @cached_property
    def simulated(self) -> tuple[StepSimulation, ...]:
        """Every step."""
        return tuple(self.plan.simulate(self.profile, loads) for loads in self.steps)

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


def variants_up_to(
    plan: Plan, profile: ModelProfile, lengths: SampleLengths, *, batch_size: int, steps: int, seed: int = 0
) -> tuple[Variant, ...]:
    """From present batching to the plan: nothing balanced, then data, model, memory, and the schedule if it is another.

    The first one trains on random micro-batches of ``batch_size`` samples, padded, with about as many samples a step as
    the plan, cut by parameters, everything recomputed.

    Raises:
        ConfigError: The plan does not fit the profile or has no cluster, or there are fewer samples than a step needs.
    """
    num_replicas = plan.layout.num_replicas
    epoch = arrange_epoch(lengths, plan.limits, num_replicas=num_replicas, micro_batches=plan.micro_batches, seed=seed)
    packed = Packing.of(epoch, lengths, plan.limits, spread_steps(epoch.num_steps, steps))
    micro_batches = max(1, round(packed.samples_per_step / (num_replicas * batch_size)))
    padded = random_padded_steps(
        lengths, batch_size=batch_size, num_replicas=num_replicas, micro_batches=micro_batches, steps=steps, seed=seed
    )
    everything: Level = "full"
    full = (everything,) * len(profile.layers)
    unsplit = replace(plan, schedule="1f1b", predicted=None)
    cut = replace(unsplit, partition=parameter_cut(profile, plan.num_stages), recompute=full)
    before: Steps = tuple(tuple(step) for step in padded)
    today = Variant(
        "as today", profile, replace(cut, micro_batches=micro_batches), before,
        float(num_replicas * micro_batches * batch_size),
    )  # fmt: skip
    plans = {"+ data": cut, "+ model": replace(unsplit, recompute=full), "+ memory": unsplit}
    if plan.schedule != "1f1b":
        plans["+ schedule"] = plan
    balanced = [Variant(name, profile, found, packed.steps, packed.samples_per_step) for name, found in plans.items()]
    return (today, *balanced)
