"""Packs made for a whole epoch, shuffled, and dealt to the ranks: what ISF and plain random packing share."""

import numpy as np
import numpy.typing as npt

from omnibal.data.isf import iterative_sampling_and_filtering
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs


class ShuffledPacks:
    """Arranges epochs whose packs know nothing of steps: shuffled and dealt as they are.

    An epoch has the steps that its packs fill, so epochs differ in their number of steps by a few, and how many they
    are is known once the packs are made: tenths of a second for a million samples. Empty packs fill the last step.

    Source: Yao et al., OmniBal, ICML 2025, section 4.1, which does not say how packs reach the ranks. Deviation from
    its published code, which gives each rank one stretch of the packs in the order in which they were made, so that
    some ranks have all the full ones, and drops what does not fill a step: packs are shuffled, and none is dropped.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        num_replicas: Data-parallel ranks.
        micro_batches: Packs per rank and step.
        iterations: Rounds of ISF; with one, packs are closed as the samples are drawn.
        seed: The same seed gives the same epochs.
        samples: Which samples take part; None for all.
    """

    def __init__(
        self,
        lengths: SampleLengths,
        limits: PackLimits,
        *,
        num_replicas: int,
        micro_batches: int,
        iterations: int,
        seed: int,
        samples: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._lengths = lengths
        self._limits = limits
        self._shape = (micro_batches, num_replicas)
        self._step_packs = num_replicas * micro_batches
        self._iterations = iterations
        self._seed = seed
        self._samples = samples
        self._num_steps: dict[int, int] = {}
        self._latest: tuple[int, Packs] | None = None

    def window_starts(self, epoch: int) -> IntArray:
        """One window: packs are made for all samples at once."""
        if epoch not in self._num_steps:
            self._num_steps[epoch] = len(self.window(epoch, 0)) // self._step_packs
        return np.array([0, self._num_steps[epoch]])

    def window(self, epoch: int, index: int) -> Packs:  # there is but one
        """Pack and arrange a whole epoch; the latest one is remembered."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._arrange(epoch)
        return self._latest[1]

    def _arrange(self, epoch: int) -> Packs:
        generator = np.random.default_rng([self._seed, epoch])
        packs = iterative_sampling_and_filtering(
            self._lengths, self._limits, iterations=self._iterations, seed=generator, samples=self._samples
        )
        num_packs = -(-len(packs) // self._step_packs) * self._step_packs
        order = np.arange(num_packs).reshape(-1, *self._shape)
        last = order[-1:]  # gives every rank a pack before any gets a second one
        last[:] = last.swapaxes(1, 2).reshape(last.shape)
        return deal(packs, num_packs, generator, split=False).take(order.ravel())


def deal(packs: Packs, num_packs: int, generator: np.random.Generator, *, split: bool) -> Packs:
    """Shuffle packs and add to them until there are ``num_packs``.

    Args:
        packs: At most ``num_packs`` packs, none of them empty.
        num_packs: How many to return.
        generator: Source of the order.
        split: Split packs, those with most samples first; the last packs are then empty only where there are fewer
            samples than packs. Otherwise all that are added are empty.

    >>> dealt = deal(Packs([0, 1, 2], [0, 2, 3]), 4, np.random.default_rng(0), split=True)
    >>> sorted(dealt.samples.tolist()), dealt.sizes.tolist()
    ([0, 1, 2], [1, 1, 1, 0])
    """
    sizes = packs.sizes
    while split and len(sizes) < num_packs and (sizes > 1).any():
        largest = np.argsort(-sizes, kind="stable")[: num_packs - len(sizes)]
        parts = np.ones(len(sizes), dtype=np.int64)
        parts[largest[sizes[largest] > 1]] = 2
        halves = np.repeat(sizes, parts) // np.repeat(parts, parts)
        seconds = np.cumsum(parts)[parts == 2] - 1
        halves[seconds] = sizes[parts == 2] - halves[seconds - 1]
        sizes = halves
    whole = Packs(packs.samples, np.concatenate([[0], np.cumsum(sizes)]))
    dealt = whole.take(generator.permutation(len(whole)))
    empty = np.full(num_packs - len(dealt), len(dealt.samples))
    return Packs(dealt.samples, np.concatenate([dealt.starts, empty]))
