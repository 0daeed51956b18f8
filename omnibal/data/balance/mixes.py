"""The watch on mixes: exchanges between steps must not sort the samples, or steps would not be random any more."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.rules import Rules
from omnibal.data.balance.tables import (
    COST,
    FURTHER,
    MEMBER,
    MIX,
    VISION,
    FloatArray,
    Int32Array,
    Int64Array,
    Mixes,
    Tables,
)

# Thresholds stand at these quantiles of the samples' sizes, close to the ends too: large samples are what packs compete
# for. Vision loads count once each, however rare: a rare number of tiles is swapped for one of like cost (without these
# thresholds χ² of the tile counts is 1.32 in place of 0.98 where one sample in a hundred has four tiles).
QUANTILES: Final = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
DISTINCT_QUANTILES: Final = (0, 1 / 2, 3 / 4)
EVERY: Final = 8
"""Thresholds are set by every eighth sample; how many samples are below is counted exactly."""
LEAST_VARIANCE: Final = 1e-9
"""Of a threshold that all samples or none exceed."""


def count_mixes(samples: Int32Array, order: Int64Array, starts: Int64Array) -> Mixes:
    """Choose thresholds of size, of cost beyond vision units and of each encoder; count every step's samples below."""
    drawn = samples[::EVERY].astype(np.float64) if len(samples) else np.zeros((1, samples.shape[1]))
    vision, cost = drawn[:, VISION], drawn[:, COST]
    # Size alone does not tell a long text from a picture. So the second measure is what a sample costs beyond what its
    # vision units would say, at the mean cost of a unit.
    per_unit = cost.sum() / max(vision.sum(), 1.0)
    sizes = (
        (vision + cost, QUANTILES),
        (cost - vision * per_unit, QUANTILES),
        *((np.unique(units), DISTINCT_QUANTILES) for units in (vision, *drawn[:, FURTHER:].T)),
    )
    thresholds = np.concatenate([np.quantile(size, shares, method="lower") for size, shares in sizes])
    steps, columns = len(starts) - 1, thresholds.size
    mixes = Mixes(
        np.zeros((steps, columns + 1)), np.empty(columns), np.empty(columns), np.empty(steps),
        np.zeros(columns + 1, dtype=np.int64),
    )  # fmt: skip
    _count(mixes, samples, order, starts, thresholds, per_unit)
    return mixes


@compiled
def _count(
    mixes: Mixes, samples: Int32Array, order: Int64Array, starts: Int64Array, thresholds: FloatArray, per_unit: float
) -> None:
    # Sizes are compared with thresholds here and never again: an exchange moves a sample's bits from the counts of one
    # step to those of another. The last bit is set in all samples: its column counts them.
    half, last, counts = len(QUANTILES), len(thresholds), mixes.counts
    for step in range(len(counts)):
        for place in range(starts[step], starts[step + 1]):
            sample = order[place]
            vision, cost = np.float64(samples[sample, VISION]), np.float64(samples[sample, COST])
            bits = 1 << last  # then a bit per threshold of each measure
            for number in range(half):
                bits |= (vision + cost <= thresholds[number]) << number
                bits |= (cost - vision * per_unit <= thresholds[half + number]) << (half + number)
            for number in range(2 * half, last):
                encoder = (number - 2 * half) // len(DISTINCT_QUANTILES)
                units = vision if encoder == 0 else np.float64(samples[sample, FURTHER + encoder - 1])
                bits |= (units <= thresholds[number]) << number
            samples[sample, MIX] = bits
            for column in range(last + 1):
                counts[step, column] += bits >> column & 1
    # Compared is with the window's own samples, which are random themselves, not with those of the whole epoch.
    for column in range(last):
        share = counts[:, column].sum() / max(len(order), 1)
        mixes.expected_share[column] = share
        mixes.inverse_variance[column] = 1 / max(share * (1 - share), LEAST_VARIANCE)
    for step in range(len(counts)):
        mixes.deviation[step] = _mix_deviation(mixes, step, 0)


@compiled_part
def _mix_deviation(mixes: Mixes, step: int, sign: int) -> Any:
    """Σ over thresholds of (samples below − expected)² / variance, for a step plus ``sign`` · ``mixes.scratch``.

    A step of n samples that were drawn at random has thresholds × n on average.
    """
    last = len(mixes.expected_share)
    total, deviation = mixes.counts[step, last] + sign * mixes.scratch[last], 0.0
    for column in range(last):
        count = mixes.counts[step, column] + sign * mixes.scratch[column]
        away = count - total * mixes.expected_share[column]
        deviation += away * away * mixes.inverse_variance[column]
    return deviation


@compiled_part
def stays_random(
    tables: Tables, rules: Rules, step: int, other_step: int, mine: int, theirs: int, give: int, take: int, free: bool
) -> bool:
    """Enter a swap between two steps into their mixes, unless it takes one farther off than random steps are.

    Args:
        tables: ``mixes`` is changed in place; ``subsets`` lists the members of both packs.
    """
    mixes, change = tables.mixes, tables.mixes.scratch
    for column in range(len(change)):
        change[column] = 0
    # What the first step gains below each threshold, which is what the second one loses.
    for side, members, mask in ((0, mine, give), (1, theirs, take)):
        for member in range(members):
            if mask >> member & 1:
                bits = tables.samples[tables.subsets[side, MEMBER, member], MIX]
                for column in range(len(change)):
                    change[column] += (2 * side - 1) * (bits >> column & 1)
    # Refused is only what takes a step farther off than it is: one that is far off by chance comes nearer bit by bit.
    after, other_after = _mix_deviation(mixes, step, 1), _mix_deviation(mixes, other_step, -1)
    sorted_more = _too_far(mixes, rules, step, 1, after) or _too_far(mixes, rules, other_step, -1, other_after)
    if sorted_more and not free:
        return False
    mixes.deviation[step], mixes.deviation[other_step] = after, other_after
    for column in range(len(change)):
        mixes.counts[step, column] += change[column]
        mixes.counts[other_step, column] -= change[column]
    return True


@compiled_part
def _too_far(mixes: Mixes, rules: Rules, step: int, sign: int, after: Any) -> bool:
    """Whether a change takes a step's mix farther from that of all samples than it is, and farther than it may be."""
    last, effort = len(mixes.expected_share), rules.effort
    total = mixes.counts[step, last] + sign * mixes.scratch[last]
    # Of n samples: 0.4 + 30 / n of what random steps have on average, and never more than these.
    most = min(effort.mix_deviation * total + effort.mix_samples, effort.most_mix_deviation * total)
    return bool(after > max(mixes.deviation[step], last * most))
