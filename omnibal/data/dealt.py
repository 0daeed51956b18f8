"""Packs made for the whole epoch, shuffled, and dealt to the ranks: what ISF and plain random packing share."""

import math
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs

ATTEMPTS: Final = 4
"""Draws of an epoch's packs, before those of the reference epoch serve once more."""


class DealtPacks:
    """Arranges epochs whose packs know nothing of steps.

    The number of steps is that of epoch 0 and a reserve: the square root of its packs, some standard deviations of
    their number. An epoch with fewer packs splits some of them, so that no
    rank is without work; one that would need more steps draws again.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        step_packs: Packs per step, over all ranks and micro-batches.
        iterations: Rounds of ISF; with one, packs are closed as the samples are drawn.
        seed: The same seed gives the same epochs.
        samples: Which samples take part; None for all.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        limits: PackLimits,
        *,
        step_packs: int,
        iterations: int,
        seed: int,
        samples: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._lengths = lengths
        self._limits = limits
        self._step_packs = step_packs
        self._iterations = iterations
        self._seed = seed
        self._samples = samples
        self._num_samples = len(lengths) if samples is None else len(samples)

    @cached_property
    def window_starts(self) -> IntArray:
        """One window: packs are made for all samples at once."""
        most_steps = -(-self._num_samples // self._step_packs)  # from there on every sample has a pack of its own
        reserve = math.isqrt(len(self._reference))
        steps = -(-(len(self._reference) + reserve) // self._step_packs)
        return np.array([0, min(steps, most_steps)])

    @cached_property
    def _reference(self) -> Packs:
        return self._pack(0, 0)

    def window(self, epoch: int, index: int) -> Packs:  # there is but one
        """Pack and arrange a whole epoch."""
        num_packs = int(self.window_starts[-1]) * self._step_packs
        draws = (self._pack(epoch, attempt) for attempt in range(ATTEMPTS if epoch else 0))
        packs = next((draw for draw in draws if len(draw) <= num_packs), self._reference)
        return deal(packs, num_packs, np.random.default_rng([self._seed, epoch, ATTEMPTS]))

    def _pack(self, epoch: int, attempt: int) -> Packs:
        generator = np.random.default_rng([self._seed, epoch, attempt])
        return iterative_sampling_and_filtering(
            self._lengths, self._limits, iterations=self._iterations, seed=generator, samples=self._samples
        )


def deal(packs: Packs, num_packs: int, generator: np.random.Generator) -> Packs:
    """Shuffle packs and split as many, those with most samples first, as it takes to have ``num_packs``.

    Where there are fewer samples than packs, the last packs are empty.

    Args:
        packs: At most ``num_packs`` packs, none of them empty.
        num_packs: How many to return.
        generator: Source of the order.

    >>> dealt = deal(Packs([0, 1, 2], [0, 2, 3]), 4, np.random.default_rng(0))
    >>> sorted(dealt.samples.tolist()), dealt.sizes.tolist()
    ([0, 1, 2], [1, 1, 1, 0])
    """
    sizes = packs.sizes
    while len(sizes) < num_packs and (sizes > 1).any():
        largest = np.argsort(-sizes, kind="stable")[: num_packs - len(sizes)]
        parts = np.ones(len(sizes), dtype=np.int64)
        parts[largest[sizes[largest] > 1]] = 2
        halves = np.repeat(sizes, parts) // np.repeat(parts, parts)
        seconds = np.cumsum(parts)[parts == 2] - 1
        halves[seconds] = sizes[parts == 2] - halves[seconds - 1]
        sizes = halves
    split = Packs(packs.samples, np.concatenate([[0], np.cumsum(sizes)]))
    dealt = split.take(generator.permutation(len(split)))
    empty = np.full(num_packs - len(dealt), len(dealt.samples))
    return Packs(dealt.samples, np.concatenate([dealt.starts, empty]))
