"""Steps that stand for an epoch: what every prediction is made from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from omnibal.cost import CostModel, IntArray, Load
from omnibal.data.epoch import Epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, largest_load
from omnibal.profile.records import ModelProfile

Steps = tuple[tuple[Load, ...], ...]
"""For each step a Load per replica with an entry per micro-batch."""


@dataclass(frozen=True)
class Packing:
    """What micro-batches are like under some limits."""

    limits: PackLimits
    micro_batches: int
    """Per step and replica."""
    samples_per_step: float
    """Mean over an epoch, all replicas."""
    steps: Steps
    """Some of an epoch's."""
    largest: Load
    """A micro-batch that none within the limits exceeds."""
    target_share: float
    """The largest share of a micro-batch's tokens that can carry loss."""
    numbers: tuple[int, ...] = ()
    """Which steps of the epoch these are; none where they are of no epoch."""

    @classmethod
    def of(cls, epoch: Epoch, lengths: SampleLengths, limits: PackLimits, numbers: IntArray) -> Packing:
        """Steps of an arranged epoch, such as :func:`spread_steps` chooses; the whole epoch is planned.

        Args:
            epoch: Of these lengths under these limits.
            lengths: What the samples hold.
            limits: The most a pack may hold.
            numbers: Of the steps.
        """
        load = epoch.packs.load(lengths)
        return cls(
            limits=limits,
            micro_batches=epoch.micro_batches,
            samples_per_step=samples_per_pack(epoch) * epoch.num_replicas * epoch.micro_batches,
            steps=tuple(tuple(load[packs] for packs in epoch.steps[number]) for number in numbers),
            largest=largest_load(lengths, limits),
            target_share=largest_target_share(lengths),
            numbers=tuple(map(int, numbers)),
        )

    @classmethod
    def alike(cls, limits: PackLimits, *, num_replicas: int, micro_batches: int) -> Packing:
        """One step of packs that are all as large as the limits allow, each of one sample."""
        pack = Load(limits.vision_units, limits.llm_tokens, limits.llm_tokens**2)
        step = (Load.stack([pack] * micro_batches),) * num_replicas
        return cls(limits, micro_batches, float(num_replicas * micro_batches), (step,), pack, 1.0)

    @property
    def all_loads(self) -> Load:
        """Every micro-batch of the steps, shape (steps, replicas, micro-batches)."""
        return Load.stack(Load.stack(step) for step in self.steps)

    def median_step(self, profile: ModelProfile) -> Packing:
        """The same with one step only, whose slowest replica takes the median time, were stages no matter."""
        parts = (layer.forward_seconds + layer.backward_seconds + layer.weight_seconds for layer in profile.layers)
        seconds = sum(parts, start=CostModel())(self.all_loads).sum(axis=2).max(axis=1)
        middle = int(np.argsort(seconds, kind="stable")[len(seconds) // 2])
        return replace(self, steps=(self.steps[middle],), numbers=self.numbers[middle : middle + 1])


def spread_steps(num_steps: int, count: int) -> IntArray:
    """Numbers of at most so many steps, spread evenly over an epoch.

    The last step is left out unless it is the only one: it may be short of samples.

    Example:
        >>> spread_steps(101, 3).tolist(), spread_steps(3, 8).tolist(), spread_steps(1, 4).tolist()
        ([0, 50, 99], [0, 1], [0])
    """
    return np.unique(np.linspace(0, max(num_steps - 1, 1) - 1, count).round().astype(np.int64))


def samples_per_pack(epoch: Epoch) -> float:
    """Of the packs that hold any, on average."""
    sizes = epoch.packs.sizes
    return float(sizes.sum() / (sizes > 0).sum())


def largest_target_share(lengths: SampleLengths) -> float:
    """The largest share of a pack's tokens that can carry loss: 1 where nothing is known."""
    if lengths.target_tokens is None:
        return 1.0
    return float((lengths.target_tokens / np.maximum(lengths.llm_tokens, 1)).max(initial=0))
