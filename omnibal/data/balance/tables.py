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
# Rows of ``subsets``, for either pack of an exchange: its samples; then its subsets, as bit masks, and their loads, in
# the order of the columns of ``samples``.
MEMBER, MASK, VISION_SUM, COST_SUM, TOKEN_SUM, FURTHER_SUM = range(6)
# Columns of ``Rules.further`` and of ``Further.goals``, a row per further encoder.
WEIGHT, MOST, TOLERATED = range(3)
AIM, GAIN_ROOM, GAIN_WIDTH, SLACK, OVER, OTHER_OVER = range(6)

NOWHERE: Final = -1
"""End of a list of samples."""
MOST_SUBSETS: Final = 64
"""Subsets of a pack that an exchange tries to give away: some microseconds for two packs."""


class Mixes(NamedTuple):
    """How many samples of which sizes every step holds; see ``mixes.py``."""

    counts: FloatArray
    """Shape (steps, thresholds + 1): samples that do not exceed each threshold; in the last column all samples."""
    expected_share: FloatArray
    """Share of all samples that do not exceed each threshold."""
    inverse_variance: FloatArray
    """One over p · (1 − p), with p the expected share: the variance that a single sample brings."""
    deviation: FloatArray
    """How far each step's mix is from that of all samples (``mix_deviation``)."""
    scratch: Int64Array
    """What an exchange changes in a row of ``counts``."""


class Further(NamedTuple):
    """What exchanges need of encoders beyond the first; empty arrays where there is one encoder."""

    free: Int64Array
    """Shape (steps, further encoders): as ``Tables.free_vision``."""
    goals: Int64Array
    """Scratch, shape (further encoders, 6): what ``Goal`` and ``OverLimit`` say of vision load."""
    distances: Int32Array
    """Scratch, shape (MOST_SUBSETS,): distances of one subset to all others."""


ONE_ENCODER: Final = Further(
    np.zeros((0, 0), dtype=np.int64), np.zeros((0, 6), dtype=np.int64), np.zeros(0, dtype=np.int32)
)


class Tables(NamedTuple):
    """The samples and packs of consecutive steps that are planned together."""

    samples: Int32Array
    """A row per sample."""
    packs: Int64Array
    """A row per pack, step after step."""
    mixes: Mixes
    free_vision: Int64Array
    """For each step, how far above the mean a pack's vision load may be at no loss: one of its packs is, anyway."""
    scratch_packs: Int64Array
    scratch_weights: Int64Array
    subsets: Int32Array
    """Scratch space of an exchange: the samples and subsets of two packs."""
    further: Further = ONE_ENCODER


@compiled_part
def prepend(samples: Int32Array, packs: Int64Array, pack: Integer, sample: Integer) -> None:
    """Link a sample in front of a pack's list."""
    samples[sample, NEXT] = packs[pack, FIRST]
    packs[pack, FIRST] = sample
