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

# Columns of ``samples``. The samples of a pack are a linked list: NEXT is the next sample of the same pack. MIX has one
# bit per threshold of ``mixes.py`` that the sample does not exceed, and one more that is always set. Then the loads;
# from FURTHER on those of further encoders, such as sound beside a ViT.
NEXT, MIX, VISION, COST, TOKENS, FURTHER = range(6)
# Columns of ``packs``: first sample of the list, number of samples, loads above the mean of the step, and what is left
# until the limits (below 0 where the pack is over a limit). Further encoder e has the columns FURTHER_PACK + 2e (load
# above the mean) and FURTHER_PACK + 2e + 1 (what is left until its limit).
FIRST, COUNT, VISION_OVER_MEAN, COST_OVER_MEAN, VISION_ROOM, TOKEN_ROOM, FURTHER_PACK = range(7)
# Rows of ``subsets``, for either pack of an exchange: distances of one subset to all others; the pack's samples; then
# its subsets, as bit masks, and their loads, in the order of the columns of ``samples``.
DISTANCE, MEMBER, MASK, VISION_SUM, COST_SUM, TOKEN_SUM, FURTHER_SUM = range(7)
# Rows of ``usual``: share of all samples that do not exceed each threshold; 1 / (p · (1 − p)), with p this share: one
# over the variance that a single sample brings; and what an exchange changes in a row of ``mixes``.
SHARE, PRECISION, CHANGE = range(3)
# Columns of ``Rules.further`` and of ``goals``, a row per further encoder.
WEIGHT, MOST = range(2)
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
    """Scratch, (further encoders, 6): what ``Goal`` and ``OverLimit`` say of vision load."""

    @classmethod
    def of(cls, samples: Int32Array, packs: Int64Array, mixes: FloatArray, usual: FloatArray) -> "Tables":
        """Tables with scratch space."""
        num_further = samples.shape[1] - FURTHER
        return cls(
            samples=samples,
            packs=packs,
            mixes=mixes,
            usual=usual,
            free=np.zeros((len(mixes), 1 + num_further), dtype=np.int64),
            order=np.empty(len(packs), dtype=np.int64),
            weights=np.empty(len(packs), dtype=np.int64),
            subsets=np.zeros((2, FURTHER_SUM + num_further, MOST_SUBSETS), dtype=np.int32),
            goals=np.zeros((num_further, 6), dtype=np.int64),
        )


@compiled_part
def prepend(samples: Int32Array, packs: Int64Array, pack: Integer, sample: Integer) -> None:
    """Link a sample in front of a pack's list."""
    samples[sample, NEXT] = packs[pack, FIRST]
    packs[pack, FIRST] = sample
