"""The watch on mixes: exchanges between steps must not sort the samples, or steps would not be random any more."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled_part
from omnibal.data.balance.rules import Effort
from omnibal.data.balance.tables import (
    CHANGE,
    COST,
    MEMBER,
    MIX,
    PRECISION,
    SHARE,
    VISION,
    FloatArray,
    Int32Array,
    Int64Array,
    Tables,
)

# Thresholds stand at these quantiles of the samples' sizes, close to the ends too: large samples are what packs compete
# for. Vision loads count once each, however rare: a rare number of tiles is swapped for one of like cost (without these
# thresholds χ² of the tile counts is 1.32 in place of 0.98 where one sample in a hundred has four tiles).
QUANTILES: Final[tuple[float, ...]] = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
DISTINCT_QUANTILES: Final[tuple[float, ...]] = (0, 1 / 2, 3 / 4)
EVERY: Final = 8
"""Thresholds are set by every eighth sample; how many samples are below is counted exactly."""
LEAST_VARIANCE: Final = 1e-9
"""Of a threshold that all samples or none exceed."""


def count_mixes(samples: Int32Array, order: Int64Array, starts: Int64Array) -> tuple[FloatArray, FloatArray]:
    """Choose thresholds of size, of cost beyond vision units and of each encoder; count every step's samples below.

    Returns:
        ``mixes`` and ``usual`` of ``Tables``; the column MIX of ``samples`` is written.
    """
    # Size alone does not tell a long text from a picture. So the second measure is what a sample costs beyond what its
    # vision units would say, at the mean cost of a unit.
    cost, drawn = samples[:, COST].astype(np.float64), slice(None, None, EVERY)
    encoders = np.ascontiguousarray(samples[:, VISION:].T, dtype=np.float64)
    vision = encoders[0]
    per_unit = cost[drawn].sum() / max(vision[drawn].sum(), 1.0)
    sizes = [vision + cost, cost - vision * per_unit, *encoders]
    # Sizes are compared with thresholds here and never again: an exchange moves a sample's bits from the counts of one
    # step to those of another. The last bit is set in all samples: its column counts them.
    below = []
    for number, size in enumerate(sizes):
        values, quantiles = size[drawn] if len(size) else np.zeros(1), QUANTILES
        if number > 1:
            values, quantiles = np.unique(values), DISTINCT_QUANTILES
        below += [size <= threshold for threshold in np.quantile(values, quantiles, method="lower")]
    below.append(np.ones(len(samples), dtype=bool))
    num_steps, last = len(starts) - 1, len(below) - 1
    mixes, usual = np.zeros((num_steps, last + 2)), np.zeros((3, last + 1))
    bits, sums = np.zeros(len(samples), dtype=np.int32), np.zeros(len(samples) + 1, dtype=np.int64)
    for column, is_below in enumerate(below):
        bits |= is_below.astype(np.int32) << column
        np.cumsum(is_below[order], out=sums[1:])
        mixes[:, column] = np.diff(sums[starts])
    samples[:, MIX] = bits
    # Compared is with the window's own samples, which are random themselves, not with those of the whole epoch.
    share = usual[SHARE] = mixes[:, : last + 1].sum(axis=0) / max(len(order), 1)
    usual[PRECISION] = 1 / np.maximum(share * (1 - share), LEAST_VARIANCE)
    # As `_mix_deviation`, and in its order: sums of floating-point numbers depend on it.
    for column in range(last):
        away = mixes[:, column] - mixes[:, last] * share[column]
        mixes[:, last + 1] += away * away * usual[PRECISION, column]
    return mixes, usual


@compiled_part
def _mix_deviation(mixes: FloatArray, usual: FloatArray, step: int, sign: int) -> Any:
    """Σ over thresholds of (samples below − expected)² / variance, for a step plus ``sign`` times the change.

    A step of n samples that were drawn at random has thresholds × n on average.
    """
    last = usual.shape[1] - 1
    total, deviation = mixes[step, last] + sign * usual[CHANGE, last], 0.0
    for column in range(last):
        count = mixes[step, column] + sign * usual[CHANGE, column]
        away = count - total * usual[SHARE, column]
        deviation += away * away * usual[PRECISION, column]
    return deviation


@compiled_part
def stays_random(
    tables: Tables, effort: Effort, step: int, other_step: int, mine: int, theirs: int, give: int, take: int, free: bool
) -> bool:
    """Enter a swap between two steps into their mixes, unless it takes one farther off than random steps are.

    Args:
        tables: ``mixes`` is changed in place; ``subsets`` lists the members of both packs.
    """
    mixes, usual = tables.mixes, tables.usual
    last = usual.shape[1] - 1
    for column in range(last + 1):
        usual[CHANGE, column] = 0
    # What the first step gains below each threshold, which is what the second one loses.
    for side, members, mask in ((0, mine, give), (1, theirs, take)):
        for member in range(members):
            if mask >> member & 1:
                bits = tables.samples[tables.subsets[side, MEMBER, member], MIX]
                for column in range(last + 1):
                    usual[CHANGE, column] += (2 * side - 1) * (bits >> column & 1)
    # Refused is only what takes a step farther off than it is: one that is far off by chance comes nearer bit by bit.
    after, other_after = _mix_deviation(mixes, usual, step, 1), _mix_deviation(mixes, usual, other_step, -1)
    for changed, sign, deviation in ((step, 1, after), (other_step, -1, other_after)):
        # Of n samples: 0.4 + 30 / n of what random steps have on average, and never more than these.
        total = mixes[changed, last] + sign * usual[CHANGE, last]
        most = min(effort.mix_deviation * total + effort.mix_samples, effort.most_mix_deviation * total)
        if deviation > max(mixes[changed, last + 1], last * most) and not free:
            return False
    for column in range(last + 1):
        mixes[step, column] += usual[CHANGE, column]
        mixes[other_step, column] -= usual[CHANGE, column]
    mixes[step, last + 1], mixes[other_step, last + 1] = after, other_after
    return True
