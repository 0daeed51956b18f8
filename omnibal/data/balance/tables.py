"""The arrays that the compiled parts of the planner work on.

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
Integer = Any
"""An integer of Python or NumPy: compiled code makes no difference."""

# Loads stand in one order everywhere: cost, tokens, and the load of each encoder. Encoder 0 is the ViT; others, such as
# one of sound, stand behind it.
# Columns of ``samples``. The samples of a pack are a linked list: NEXT is the next sample of the same pack. MIX has one
# bit per threshold of ``mixes.py`` that the sample does not exceed, and one more that is always set. Encoder e has the
# column VISION + e.
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

NOWHERE: Final = -1
"""End of a list of samples."""
MOST_SUBSETS: Final = 64
"""Subsets of a pack that an exchange tries to give away: some microseconds for two packs."""


class Tables(NamedTuple):
    """The samples and packs of consecutive steps that are planned together."""

    samples: Int32Array
    """A row per sample."""
    packs: Int64Array
    """A row per pack, step after step."""
    mixes: FloatArray
    """A row per step: samples that do not exceed each threshold, all samples, and how far the step's mix is from that
    of all samples (``mix_deviation``)."""
    usual: FloatArray
    """What steps' mixes are compared with."""
    free: Int64Array
    """For each step and encoder, how far above the mean a pack's load may be at no loss: one pack is, anyway."""
    order: Int64Array
    """Scratch, (packs,)."""
    weights: Int64Array
    """Scratch, (packs,)."""
    subsets: Int32Array
    """Scratch, (2, rows, MOST_SUBSETS): the samples and subsets of two packs."""
    goals: Int64Array
    """Scratch, (encoders, 6): what a swap should do."""

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
def prepend(samples: Int32Array, packs: Int64Array, pack: Integer, sample: Integer) -> None:
    """Link a sample in front of a pack's list."""
    samples[sample, NEXT] = packs[pack, FIRST]
    packs[pack, FIRST] = sample
