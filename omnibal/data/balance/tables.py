"""The arrays that the compiled parts of the planner work on.

Integers, because every rank of every machine must come to the same packs, and sums of floating-point numbers depend
on their order.
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

# Columns of a window's samples: the next sample in the same pack, a bit for each threshold of size that
# it does not exceed (and one more), and the loads.
NEXT, MIX, VISION, COST, TOKENS = range(5)
# Columns of its packs: first sample, number of samples, how far its loads are above what it should hold, what is left
# until its limits (negative where it holds too much). All loads are in the units of the samples' loads.
FIRST, COUNT, VISION_EXCESS, COST_EXCESS, VISION_ROOM, TOKEN_ROOM = range(6)
# Rows of the scratch table of a pack in an exchange: its samples; its subsets as bit masks, and their loads.
MEMBER, MASK, VISION_SUM, COST_SUM, TOKEN_SUM = range(5)

NOWHERE: Final = -1
"""End of a chain of samples."""
MOST_SUBSETS: Final = 64
"""Subsets of a pack that an exchange tries to give away: some microseconds for two packs."""


class Mixes(NamedTuple):
    """What sizes of samples the steps of a window hold; see ``mixes.py``."""

    counts: FloatArray
    """A row per step: how many of its samples do not exceed each threshold of size; in the last column all of them."""
    usual: FloatArray
    """The share of all samples that do not exceed each threshold."""
    precision: FloatArray
    """One over the variance of that for a single sample."""
    strangeness: FloatArray
    """How far each step's mix is from that of all samples, not divided by thresholds and samples."""
    change: Int64Array
    """Room for what an exchange changes in a row of ``counts``."""


class Window(NamedTuple):
    """Consecutive steps that are planned together."""

    samples: Int32Array
    """A row per sample."""
    packs: Int64Array
    """A row per pack, step after step."""
    mixes: Mixes
    """What sizes of samples each step holds."""
    free_vision: Int64Array
    """For each step, how far above the mean a pack's vision load may be at no loss: one of its packs is, anyway."""
    order: Int64Array
    """Room for a list of packs."""
    weights: Int64Array
    """Room for what each of them weighs."""
    scratch: Int32Array
    """Room for the samples and subsets of two packs."""


@compiled_part
def prepend(samples: Int32Array, packs: Int64Array, pack: Integer, sample: Integer) -> None:
    """Link a sample in front of a pack's chain."""
    samples[sample, NEXT] = packs[pack, FIRST]
    packs[pack, FIRST] = sample
