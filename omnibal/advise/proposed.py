"""The limits to give the planner, so that its steps hold as many samples as an estimate's."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np

from omnibal.advise.estimate import Estimate
from omnibal.data.balance.demand import survey
from omnibal.data.balance.layout import WINDOW, blocks_of
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import NEARBY, TRAP_WASTE, forced_waste
from omnibal.data.limits import MOST, PackLimits
from omnibal.data.policies import DEFAULT_COST

SURVEYED: Final = 1 << 14
"""Samples that the packs of all are told from."""
EPOCH: Final = 1 << 20
"""Samples of an epoch whose size nobody knows."""
WIDEST: Final = 4
"""How many times the most that even packs hold limits may be."""
HALVINGS: Final = 24


@dataclass(frozen=True)
class Proposal:
    """Limits, and what the planner makes under them.

    Attributes:
        limits: Of a pack.
        samples_per_step: Of all ranks, on average over an epoch.
        oversized: Share of the samples that are larger than a pack and have one of their own.
    """

    limits: PackLimits
    samples_per_step: float
    oversized: float


def propose(
    estimate: Estimate, lengths: SampleLengths, *, num_samples: int | None = None, holds_all: bool = False
) -> Proposal:
    """Limits in about the proportion of what even packs hold, under which a step has the estimate's samples.

    A sample that is larger has a pack of its own, and at least half of the samples fit. Some vision limits waste room
    whatever the packer does (``omnibal.data.limit_search``): the nearest above that does not is taken, and tokens
    limit the step.

    Args:
        estimate: Of even packs.
        lengths: Of the samples, or of a part of them.
        num_samples: Of an epoch, where known.
        holds_all: Whether limits must hold every sample, as for streams, which leave out larger ones.
    """
    part = lengths
    if len(lengths) > SURVEYED:
        part = lengths.take(np.random.default_rng(0).permutation(len(lengths))[:SURVEYED])
    packs, wanted = estimate.setting.cluster.num_devices * estimate.way.micro_batches, estimate.samples_per_step
    vision, tokens = estimate.limits.vision_units, estimate.limits.llm_tokens
    summary = lengths.summary
    least = (int(np.median(part.vision_units)), max(int(np.median(part.llm_tokens)), 1))
    least = (summary.max_vision_units, max(summary.max_llm_tokens, 1)) if holds_all else least

    def scaled(factor: float) -> PackLimits:
        return PackLimits(_within(least[0], factor * vision), _within(least[1], factor * tokens))

    factor = _smallest(lambda factor: samples_made(part, scaled(factor), packs) >= wanted, 1 / WIDEST**2, WIDEST)
    units = _without_trap(part, scaled(factor).vision_units)
    most = _within(least[1], WIDEST * factor * tokens)
    limits = PackLimits(units, ceil(_smallest(
        lambda limit: samples_made(part, PackLimits(units, ceil(limit)), packs) >= wanted, least[1], most
    )))  # fmt: skip
    made = samples_made(part, limits, packs, num_samples=num_samples)
    return Proposal(limits, made, len(limits.oversized(lengths)) / len(lengths))


def samples_made(lengths: SampleLengths, limits: PackLimits, packs: int, *, num_samples: int | None = None) -> float:
    """Samples of a step of so many packs, as ``BalancedPacks`` sizes an epoch; nothing is planned.

    Args:
        lengths: Of the samples, or of a part of them.
        limits: Of a pack.
        packs: Of a step.
        num_samples: Of an epoch, whose number of steps is whole; by default an epoch is long.
    """
    count = num_samples or EPOCH
    demand = survey(lengths, limits, DEFAULT_COST, samples=None, drawn=None)._replace(num_samples=count)
    steps = demand.packs_needed(blocks_of(count), min(count, WINDOW)) / packs
    return count / (steps if num_samples is None else max(ceil(steps), 1))


def _within(least: int, limit: float) -> int:
    return min(max(ceil(limit), least), MOST)


def _smallest(suffices: Callable[[float], bool], low: float, high: float) -> float:
    """By halving ratios, about the smallest number from ``low`` to ``high`` that suffices, or ``high``."""
    if suffices(low):
        return low
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _without_trap(lengths: SampleLengths, limit: int) -> int:
    """The nearest vision limit from this one on that wastes no room by arithmetic alone; this one where none does."""

    def wastes(tried: int) -> bool:
        counts = np.bincount(np.minimum(lengths.vision_units, tried), minlength=tried + 1)
        return forced_waste(counts) > TRAP_WASTE

    return next((limit + step for step in range(max(NEARBY) + 1) if not wastes(limit + step)), limit) if limit else 0
