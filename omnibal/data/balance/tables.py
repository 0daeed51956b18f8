"""The arrays that the compiled parts of the planner work on, and the watch on the steps' mixes among them.

All loads are integers, because every rank of every machine must come to the same packs, and sums of floating-point
numbers depend on their order. One unit of each load is 1 / 2**20 of a mean pack or so (``rules.py``).
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled_part

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Integer = Any  # an integer of Python or NumPy: compiled code makes no difference

# Loads stand in one order everywhere: cost, tokens, and the load of each encoder. Encoder 0 is the ViT; others, such as
# one of sound, stand behind it.
# Columns of ``samples``. The samples of a pack are a linked list: NEXT is the next sample of the same pack. MIX has one
# bit per threshold of ``count_mixes`` that the sample does not exceed, and one more that is always set. Encoder e has
# the column VISION + e.
NEXT, MIX, COST, TOKENS, VISION = range(5)
# Columns of ``packs``: first sample of the list, number of samples, loads above the mean of the step, and what is left
# until the limits (below 0 where the pack is over a limit). Encoder e has VISION_OVER_MEAN + 2e and VISION_ROOM + 2e.
FIRST, COUNT, COST_OVER_MEAN, TOKEN_ROOM, VISION_OVER_MEAN, VISION_ROOM = range(6)
# Rows of ``subsets``, for either pack of an exchange: distances of one subset to all others; the pack's samples; then
# its subsets, as bit masks, and their loads. Encoder e has the row VISION_SUM + e.
DISTANCE, MEMBER, MASK, COST_SUM, TOKEN_SUM, VISION_SUM = range(6)
# Rows of ``usual``: share of all samples that do not exceed each threshold; 1 / (p · (1 − p)), with p this share: one
# over the variance that a single sample brings; and what an exchange changes in a row of ``mixes``.
SHARE, PRECISION, CHANGE = range(3)
# Columns of ``Rules.encoders``, a row per encoder: load of a unit, units that a pack may hold, load by which packs may
# differ.
WEIGHT, MOST, TOLERATED = range(3)
# Columns of ``goals``, a row per encoder: the load whose move from the first pack to the second makes both alike; what
# the first may gain; that, and what the second may gain; how far from the first a swap may come at no loss; how far
# either pack is over its limit (below 0 where there is room).
AIM, GAIN_ROOM, GAIN_WIDTH, SLACK, OVER, OTHER_OVER = range(6)

# Thresholds stand at these quantiles of the samples' sizes, close to the ends too: large samples are what packs compete
# for. Vision loads count once each, however rare: a rare number of tiles is swapped for one of like cost (without these
# thresholds χ² of the tile counts is 1.32 in place of 0.98 where one sample in a hundred has four tiles).
QUANTILES: Final[tuple[float, ...]] = (1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 31 / 32)
DISTINCT_QUANTILES: Final[tuple[float, ...]] = (0, 1 / 2, 3 / 4)
EVERY: Final = 8  # thresholds are set by every eighth sample; how many samples are below is counted exactly
LEAST_VARIANCE: Final = 1e-9  # of a threshold that all samples or none exceed
MIX_DEVIATION, MOST_MIX_DEVIATION, MIX_SAMPLES = 0.4, 1.0, 30
"""How far an exchange may take a step's mix from that of all samples, where random steps are at 1 on average.

Any step counts as larger by 30 samples: in a small one, a few exchanges are soon as much as chance. But never more than
random steps are.
"""
NOWHERE: Final = -1  # end of a list of samples
MOST_SUBSETS: Final = 64
"""Subsets of a pack that an exchange tries to give away: some microseconds for two packs."""


class Tables(NamedTuple):
    """The samples and packs of consecutive steps that are planned together."""

    samples: Int32Array  # a row per sample
    packs: Int64Array  # a row per pack, step after step
    # A row per step: samples that do not exceed each threshold, all samples, and how far the step's mix is from that
    # of all samples (``mix_deviation``).
    mixes: FloatArray
    usual: FloatArray  # what steps' mixes are compared with
    # For each step and encoder, how far above the mean a pack's load may be at no loss: one pack is, anyway.
    free: Int64Array
    order: Int64Array  # scratch, (packs,)
    weights: Int64Array  # scratch, (packs,)
    subsets: Int32Array  # scratch, (2, rows, MOST_SUBSETS): the samples and subsets of two packs
    goals: Int64Array  # scratch, (encoders, 6): what a swap should do

    @classmethod
    def of(cls, samples: Int32Array, packs: Int64Array, mixes: FloatArray, usual: FloatArray) -> "Tables":
        encoders = samples.shape[1] - VISION
        return cls(
            samples=samples,
            packs=packs,
            mixes=mixes,
            usual=usual,
            free=np.zeros((len(mixes), encoders), dtype=np.int64),
            order=np.empty(len(packs), dtype=np.int64),
            weights=np.empty(len(packs), dtype=np.int64),
            subsets=np.zeros((2, VISION_SUM + encoders, MOST_SUBSETS), dtype=np.int32),
            goals=np.zeros((encoders, 6), dtype=np.int64),
        )


@compiled_part
def scrambled(value: Any) -> Any:
    """Turn 64 bits into 32 that look random (multiplications as in Steele, Lea and Flood's SplitMix, 2014)."""
    value = value * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return value >> np.uint64(32)


@compiled_part
def prepend(samples: Int32Array, packs: Int64Array, pack: Integer, sample: Integer) -> None:
    samples[sample, NEXT] = packs[pack, FIRST]
    packs[pack, FIRST] = sample


def count_mixes(samples: Int32Array, order: Int64Array, starts: Int64Array) -> tuple[FloatArray, FloatArray]:
    """Choose thresholds of size, of cost beyond vision units and of each encoder; count every step's samples below.

    The results are ``mixes`` and ``usual`` of ``Tables``; the column MIX of ``samples`` is written.
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
    tables: Tables, step: int, other_step: int, mine: int, theirs: int, give: int, take: int, free: bool
) -> bool:
    """Enter a swap between two steps into their mixes, unless it takes one farther off than random steps are.

    Exchanges between steps must not sort the samples, or steps would not be random any more. ``subsets`` lists the
    members of both packs.
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
        total = mixes[changed, last] + sign * usual[CHANGE, last]
        most = min(MIX_DEVIATION * total + MIX_SAMPLES, MOST_MIX_DEVIATION * total)
        if deviation > max(mixes[changed, last + 1], last * most) and not free:
            return False
    for column in range(last + 1):
        mixes[step, column] += usual[CHANGE, column]
        mixes[other_step, column] -= usual[CHANGE, column]
    mixes[step, last + 1], mixes[other_step, last + 1] = after, other_after
    return True
