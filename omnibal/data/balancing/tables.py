"""The tables that the balanced planner works on.

Compiled code works on three plain integer arrays:

- ``samples``, int32, a row per sample: the next sample of its pack (``NEXT``), its vision units and tokens (from
  ``SIZES`` on), and its loads in ``DIMENSIONS`` dimensions, each at most 2**24 either way (from ``LOADS`` on);
- ``packs``, int64, a row per pack: its first sample (``FIRST``), its number of samples (``COUNT``), its room for more
  vision units and tokens (from ``ROOM`` on), and how far its loads are from what it should hold (from ``EXCESS`` on);
- ``scratch``, int32, one table for each of two packs: room for their members and subsets.

Integers, because every rank of every machine must come to the same packs, and sums of floating-point numbers depend
on the processor. Arrays, because handing records of arrays to a function takes longer than an exchange.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.compiled import compiled

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Integer = Any
"""An integer of Python or NumPy: compiled code makes no difference."""

DIMENSIONS: Final = 3
"""Vision units, cost and tokens, each in units of its own: see ``omnibal.data.balancing.scales``."""
NEXT: Final = 0
SIZES: Final = 1
LOADS: Final = 3
FIRST: Final = 0
COUNT: Final = 1
ROOM: Final = 2
EXCESS: Final = 4
NOWHERE: Final = -1
"""End of a chain of samples."""

MEMBERS: Final = 0
MASKS: Final = 1
SUMS: Final = 2
MOST_MEMBERS: Final = 31
"""Samples of a pack that an exchange looks at; a subset of them is a mask of 32 bits."""
MOST_SUBSETS: Final = 64
"""Subsets of a pack that an exchange tries to give away."""


def make_scratch() -> Int32Array:
    """Room for the members and subsets of two packs."""
    return np.zeros((2, SUMS + DIMENSIONS, MOST_SUBSETS), dtype=np.int32)


@compiled
def prepend(samples: Int32Array, packs: Int64Array, pack: int, sample: int) -> None:
    """Link a sample in front of a pack's chain."""
    samples[sample, NEXT] = packs[pack, FIRST]
    packs[pack, FIRST] = sample
