"""Mixes: what sizes of samples a step holds, and the watch that keeps exchanges between steps from sorting them."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled, compiled_part
from omnibal.data.balance.rules import Rules
from omnibal.data.balance.tables import COST, MEMBER, MIX, TOKENS, VISION, Int32Array, Int64Array, Window

FloatArray = npt.NDArray[np.float64]

QUANTILES: Final = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
"""Shares of the samples at which thresholds are set, the ends included: large samples are what packs compete for."""
EVERY: Final = 8
"""Thresholds are set by every eighth sample; how many are below is counted exactly."""


def count_mixes(samples: Int32Array, order: Int64Array, starts: Int64Array) -> tuple[Int64Array, FloatArray]:
    """Set thresholds by size, and by what a sample costs beyond its vision units; count every step's samples below.

    Args:
        samples: Their bits are set.
        order: Samples, step after step.
        starts: Where steps begin in ``order``.

    Returns:
        The columns ``mix`` and ``usual`` of a window.
    """
    drawn = samples[::EVERY].astype(np.float64) if len(samples) else np.zeros((1, TOKENS + 1))
    vision, cost = drawn[:, VISION], drawn[:, COST]
    per_unit = cost.sum() / max(vision.sum(), 1.0)
    thresholds = np.quantile([vision + cost, cost - vision * per_unit], QUANTILES, axis=1, method="lower")
    mix = _count(samples, order, starts, np.ascontiguousarray(thresholds.T), per_unit)
    return mix, mix[:, :-1].sum(axis=0) / max(len(order), 1)


@compiled
def _count(samples: Int32Array, order: Int64Array, starts: Int64Array, thresholds: FloatArray, per_unit: float) -> Any:
    """Set the bit of every threshold that a sample does not exceed, and one more; count bits by steps."""
    # Sizes are compared with thresholds here and never again: an exchange moves a sample's bits from the counts of one
    # step to those of another. The last bit is set in all samples: its column counts them.
    half = thresholds.shape[1]
    mix = np.zeros((len(starts) - 1, 2 * half + 1), dtype=np.int64)
    for step in range(len(mix)):
        for place in range(starts[step], starts[step + 1]):
            sample = order[place]
            vision, cost = np.float64(samples[sample, VISION]), np.float64(samples[sample, COST])
            bits = 1 << 2 * half
            for number in range(half):
                bits |= (vision + cost <= thresholds[0, number]) << number
                bits |= (cost - vision * per_unit <= thresholds[1, number]) << (half + number)
            samples[sample, MIX] = bits
            for column in range(2 * half + 1):
                mix[step, column] += bits >> column & 1
    return mix


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
    mix, change, scratch = window.mix, window.change, window.scratch
    for column in range(len(change)):
        change[column] = 0
    # What the first step gains below each threshold, and the second one loses.
    for side, members, mask in ((0, mine, give), (1, theirs, take)):
        for member in range(members):
            if mask >> member & 1:
                bits = window.samples[scratch[side, MEMBER, member], MIX]
                for column in range(len(change)):
                    change[column] += (2 * side - 1) * (bits >> column & 1)
    if not free and (_gets_stranger(window, rules, step, 1) or _gets_stranger(window, rules, other_step, -1)):
        return False
    for column in range(len(change)):
        mix[step, column] += change[column]
        mix[other_step, column] -= change[column]
    return True


@compiled_part
def _gets_stranger(window: Window, rules: Rules, step: int, sign: int) -> bool:
    """Tell whether a change takes a step's mix farther from all samples' than it is, and farther than it may be.

    For every threshold of size, the samples below it are counted and compared with what is to be expected, in standard
    deviations; the measure is the mean of the squares, which is 1 on average for steps that are drawn at random.
    """
    thresholds = len(window.usual)
    total = window.mix[step, thresholds]  # of samples; the last column counts them all
    new_total = total + sign * window.change[thresholds]
    before = after = 0.0
    for column in range(thresholds):
        usual = window.usual[column]
        variance = max(usual * (1 - usual), 1e-9)  # of a single sample
        away = window.mix[step, column] - total * usual
        new_away = window.mix[step, column] + sign * window.change[column] - new_total * usual
        before += away * away / variance
        after += new_away * new_away / variance
    # Sums over thresholds, not yet divided by the samples: on average a random step has thresholds × total.
    effort = rules.effort
    most = min(effort.strangeness * new_total + effort.strange_samples, effort.strangest * new_total)
    return bool(after > max(before, thresholds * most))
