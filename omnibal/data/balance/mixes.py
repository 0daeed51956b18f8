"""Mixes: what sizes of samples a step holds, and the watch that keeps exchanges between steps from sorting them."""

from typing import Any, Final

import numpy as np

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.rules import Rules
from omnibal.data.balance.tables import (
    COST,
    MEMBER,
    MIX,
    TOKENS,
    VISION,
    FloatArray,
    Int32Array,
    Int64Array,
    Mixes,
    Window,
)

QUANTILES: Final = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
"""Shares of the samples at which thresholds are set, the ends included: large samples are what packs compete for."""
KINDS: Final = (0, 1 / 2, 3 / 4)
"""The same of the vision loads that occur, each counted once: a rare number of tiles is swapped for one of like cost.

Without these thresholds χ² of the tile counts is 1.32 in place of 0.98 where one sample in a hundred has four tiles.
"""
EVERY: Final = 8
"""Thresholds are set by every eighth sample; how many are below is counted exactly."""
LEAST_VARIANCE: Final = 1e-9
"""Of a threshold that all samples or none exceed."""


def count_mixes(samples: Int32Array, order: Int64Array, starts: Int64Array) -> Mixes:
    """Set thresholds by size, by cost beyond vision units, and by vision units; count every step's samples below.

    Args:
        samples: Their bits are set.
        order: Samples, step after step.
        starts: Where steps begin in ``order``.
    """
    drawn = samples[::EVERY].astype(np.float64) if len(samples) else np.zeros((1, TOKENS + 1))
    vision, cost = drawn[:, VISION], drawn[:, COST]
    per_unit = cost.sum() / max(vision.sum(), 1.0)
    loads = (vision + cost, QUANTILES), (cost - vision * per_unit, QUANTILES), (np.unique(vision), KINDS)
    thresholds = np.concatenate([np.quantile(load, shares, method="lower") for load, shares in loads])
    steps, columns = len(starts) - 1, thresholds.size
    mixes = Mixes(
        np.empty((steps, columns + 1)), np.empty(columns), np.empty(columns), np.empty(steps),
        np.empty(columns + 1, dtype=np.int64),
    )  # fmt: skip
    _count(mixes, samples, order, starts, thresholds, per_unit)
    return mixes


@compiled
def _count(
    mixes: Mixes, samples: Int32Array, order: Int64Array, starts: Int64Array, thresholds: FloatArray, per_unit: float
) -> None:
    """Set the bit of every threshold that a sample does not exceed, and one more; count bits by steps."""
    # Sizes are compared with thresholds here and never again: an exchange moves a sample's bits from the counts of one
    # step to those of another. The last bit is set in all samples: its column counts them.
    half, last, counts = len(QUANTILES), len(thresholds), mixes.counts
    counts[:] = 0
    for step in range(len(counts)):
        for place in range(starts[step], starts[step + 1]):
            sample = order[place]
            vision, cost = np.float64(samples[sample, VISION]), np.float64(samples[sample, COST])
            bits = 1 << last
            for number in range(half):
                bits |= (vision + cost <= thresholds[number]) << number
                bits |= (cost - vision * per_unit <= thresholds[half + number]) << (half + number)
            for number in range(2 * half, last):
                bits |= (vision <= thresholds[number]) << number
            samples[sample, MIX] = bits
            for column in range(last + 1):
                counts[step, column] += bits >> column & 1
    for column in range(last):
        usual = counts[:, column].sum() / max(len(order), 1)
        mixes.usual[column], mixes.precision[column] = usual, 1 / max(usual * (1 - usual), LEAST_VARIANCE)
    mixes.change[:] = 0
    for step in range(len(counts)):
        mixes.strangeness[step] = _strangeness(mixes, step, 0)


@compiled_part
def _strangeness(mixes: Mixes, step: int, sign: int) -> Any:
    """How far a step's mix is from that of all samples, once it has changed (``sign`` 1 or −1; 0: as it is).

    For every threshold of size, the samples below it are counted and compared with what is to be expected, in standard
    deviations. This is the sum of the squares over thresholds, not yet divided by the samples: steps that are drawn at
    random have thresholds × samples on average.
    """
    last = len(mixes.usual)
    total, strangeness = mixes.counts[step, last] + sign * mixes.change[last], 0.0
    for column in range(last):
        away = mixes.counts[step, column] + sign * mixes.change[column] - total * mixes.usual[column]
        strangeness += away * away * mixes.precision[column]
    return strangeness


@compiled_part
def stays_random(
    window: Window, rules: Rules, step: int, other_step: int, mine: int, theirs: int, give: int, take: int, free: bool
) -> bool:
    """Count a swap between two steps in their mixes, unless it makes one of them stranger than random steps are.

    Without this, exchanges would sort: steps would collect what evens out well with what they have.

    Args:
        window: Its mixes are changed in place; its scratch lists the members of both packs.
        rules: Which steps count as random.
        step: The step of the first pack.
        other_step: That of the second.
        mine: Members of the first pack.
        theirs: Members of the second.
        give: Mask of those that leave the first pack.
        take: Mask of those that come to it.
        free: Count the swap, whatever becomes of the mixes.
    """
    mixes, change, scratch = window.mixes, window.mixes.change, window.scratch
    for column in range(len(change)):
        change[column] = 0
    # What the first step gains below each threshold, and the second one loses.
    for side, members, mask in ((0, mine, give), (1, theirs, take)):
        for member in range(members):
            if mask >> member & 1:
                bits = window.samples[scratch[side, MEMBER, member], MIX]
                for column in range(len(change)):
                    change[column] += (2 * side - 1) * (bits >> column & 1)
    after, other_after = _strangeness(mixes, step, 1), _strangeness(mixes, other_step, -1)
    stranger = _is_strange(mixes, rules, step, 1, after) or _is_strange(mixes, rules, other_step, -1, other_after)
    if stranger and not free:
        return False
    mixes.strangeness[step], mixes.strangeness[other_step] = after, other_after
    for column in range(len(change)):
        mixes.counts[step, column] += change[column]
        mixes.counts[other_step, column] -= change[column]
    return True


@compiled_part
def _is_strange(mixes: Mixes, rules: Rules, step: int, sign: int, after: Any) -> bool:
    """Tell whether a change takes a step's mix farther from all samples' than it is, and farther than it may be."""
    last, effort = len(mixes.usual), rules.effort
    total = mixes.counts[step, last] + sign * mixes.change[last]
    most = min(effort.strangeness * total + effort.strange_samples, effort.strangest * total)
    return bool(after > max(mixes.strangeness[step], last * most))
