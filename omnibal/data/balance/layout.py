"""Layout: which steps, and which places in the random order, are planned together.

The order is cut at fixed places into blocks that have equal numbers of steps, whatever they hold: so no part of an
epoch depends on what comes before it. Each block's steps are divided evenly into windows; where the windows begin in
the order depends on the loads in the block.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

WINDOW: Final = 1 << 15
"""Samples in a window, about: planning them takes some hundredths of a second."""
BLOCK: Final = 1 << 19
"""Samples in a block, about: finding its windows takes some hundredths of a second."""


def blocks_of(num_samples: int) -> int:
    """Number of blocks in an order of so many samples, at least 1; fewer where there are fewer steps."""
    return max(round(num_samples / BLOCK), 1)


@dataclass(frozen=True)
class Layout:
    """The parts of an epoch: the same in all epochs.

    Args:
        num_samples: Number of samples.
        num_steps: Number of steps.
        step_packs: Packs per step.

    >>> Layout(num_samples=100_000, num_steps=1_000, step_packs=8).window_starts.tolist()
    [0, 333, 666, 1000]
    """

    num_samples: int
    num_steps: int
    step_packs: int

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks, at least 1."""
        return min(blocks_of(self.num_samples), max(self.num_steps, 1))

    @cached_property
    def window_starts(self) -> npt.NDArray[np.int64]:
        """First step of every window, and the number of steps behind them."""
        starts = [np.zeros(1, dtype=np.int64)]
        for block in range(self.num_blocks):
            first, last = self.block_steps(block)
            begin, end = self.block_places(block)
            windows = max(min((end - begin) // WINDOW, last - first), 1)
            starts.append(first + np.arange(1, windows + 1) * (last - first) // windows)
        return np.concatenate(starts)

    def block_of(self, step: int) -> int:
        """The block that holds a step."""
        return ((step + 1) * self.num_blocks - 1) // max(self.num_steps, 1)

    def block_steps(self, block: int) -> tuple[int, int]:
        """First step of a block, and the step behind its last one."""
        return block * self.num_steps // self.num_blocks, (block + 1) * self.num_steps // self.num_blocks

    def block_places(self, block: int) -> tuple[int, int]:
        """First place of a block in the random order, and the place behind its last one."""
        first, last = self.block_steps(block)
        return self._place(first), self._place(last)

    def _place(self, step: int) -> int:
        """As many samples as the steps before have of all steps; at least one for each of their packs."""
        if self.num_samples <= self.num_steps * self.step_packs:
            return min(step * self.step_packs, self.num_samples)
        return step * self.num_samples // self.num_steps

    def cut(self, block: int, shares: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Cut a block's places where its load is divided as its steps are.

        Args:
            block: Which block.
            shares: Load of the sample at each of its places.

        Returns:
            Where each of its windows begins, and where the last one ends. No window has fewer samples than packs,
            but the last one of an epoch that has.
        """
        (first, last), (begin, _) = self.block_steps(block), self.block_places(block)
        starts = self.window_starts
        steps = starts[(starts >= first) & (starts <= last)] - first
        return begin + cut_evenly(shares, steps, self.step_packs)


def cut_evenly(shares: npt.NDArray[np.int32], steps: npt.NDArray[np.int64], step_packs: int) -> npt.NDArray[np.int64]:
    """Cut samples in a row into windows where their load is divided as their steps are.

    Args:
        shares: Load of each sample.
        steps: First step of every window, from 0, and the number of steps behind them.
        step_packs: Packs per step.

    Returns:
        Where each window begins, and where the last one ends. No window has fewer samples than packs, but the last
        one where there are too few.
    """
    number, packs = len(shares), steps * step_packs
    if number <= packs[-1]:
        return np.minimum(packs, number)
    sums = np.cumsum(shares, dtype=np.int64)
    places = np.searchsorted(sums, steps * sums[-1] // steps[-1], side="right")
    cuts: npt.NDArray[np.int64] = np.clip(places, packs, number - packs[-1] + packs)
    cuts[0], cuts[-1] = 0, number  # also where samples at the ends have no load
    return cuts
