"""Traps: vision limits that waste room whatever the packer does.

With samples of 1, 3, 4 and 5 tiles a limit of 12 wastes a tenth of every pack, 10 and 16 almost nothing.
"""

import numpy as np

from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import histogram_bound, histogram_volume, load_histograms

TRAP_WASTE = 0.03  # a limit that wastes more than this by arithmetic alone deserves a warning
NEARBY = range(-4, 5)  # limits that a warning considers as a remedy, relative to the trap


def find_trap(lengths: SampleLengths, limits: PackLimits) -> str | None:
    """Say why a vision limit wastes room whatever the packer does, and which nearby limit does not.

    Returns:
        A sentence, or None where the samples' sizes alone force no more than 3 % of waste.

    >>> print(find_trap(SampleLengths([5, 3] * 50, [100] * 100), PackLimits(9, 9000)))
    vision limit 9 is a trap: the samples need at least 50 packs where their volume asks for 45 (+11 %); no more \
than 1 of 5 vision units (50 % of the samples) fits, which leaves 4 of 9 to the 50 % that are so small; 8 wastes 0.0 %
    """
    _, vision, _ = load_histograms(lengths, limits)
    limit = limits.vision_units
    if forced_waste(vision) <= TRAP_WASTE:
        return None
    size = _worst_size(vision)
    fitting, free = divmod(limit, size)
    shares = 100 * vision / vision[1:].sum()
    waste, remedy = min((forced_waste(_under_limit(vision, other)), other) for other in _nearby_limits(vision, limit))
    return (
        f"vision limit {limit} is a trap: the samples need at least {histogram_bound(vision)} packs where their volume "
        f"asks for {histogram_volume(vision)} (+{100 * forced_waste(vision):.0f} %); no more than {fitting} of {size} "
        f"vision units ({shares[size]:.0f} % of the samples) fit{'s' if fitting == 1 else ''}, which leaves {free} of "
        f"{limit} to the {shares[1 : free + 1].sum():.0f} % that are so small"
        + (f"; {remedy} wastes {100 * waste:.1f} %" if waste <= TRAP_WASTE else "")
    )


def forced_waste(counts: IntArray) -> float:
    """Share of packs beyond the volume that no packer can avoid, for ``counts[i]`` samples of size ``i``.

    The limit is ``len(counts) − 1``.
    """
    volume = histogram_volume(counts)
    return histogram_bound(counts) / volume - 1 if volume else 0.0


def _worst_size(counts: IntArray) -> int:
    """The size that leaves most room when packs are filled with it alone, weighed by its volume."""
    limit = len(counts) - 1
    sizes = np.arange(1, limit + 1)
    return int(sizes[np.argmax(counts[1:] * sizes * (limit % sizes))])


def _nearby_limits(counts: IntArray, limit: int) -> list[int]:
    largest = int(np.flatnonzero(counts)[-1])
    return [limit + step for step in NEARBY if step and limit + step >= largest]


def _under_limit(counts: IntArray, limit: int) -> IntArray:
    """The same samples under another limit, which all of them keep."""
    resized = np.zeros(limit + 1, dtype=np.int64)
    kept = min(len(counts), limit + 1)
    resized[:kept] = counts[:kept]
    return resized
