"""Epoch: which samples every rank runs in every step, window by window."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Unpack

import numpy as np
import numpy.typing as npt

from omnibal.cost import smallest_first
from omnibal.data.balance import BalancedPacks
from omnibal.data.isf import ShuffledPacks
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixed_packs import MixedPacks, Origin
from omnibal.data.packing_spec import PackingOptions, PackingSpec, Ranks
from omnibal.data.packs import Packs
from omnibal.errors import ConfigError, integer


class Arrangement(Protocol):
    """A planning method applied to a spec and ranks: it plans any window of any epoch."""

    def window_starts(self, epoch: int) -> IntArray:
        """First step of every window of an epoch, and the number of steps behind them."""

    def window(self, epoch: int, index: int) -> Packs:
        """Plan one window: the packs of its steps, rank after rank."""


@dataclass(frozen=True)
class Window:
    """Consecutive steps of an epoch that were planned together."""

    first_step: int
    """Steps of the epoch before this window."""
    num_replicas: int
    micro_batches: int
    packs: Packs
    """The packs: step after step, rank after rank."""
    steps: npt.NDArray[np.int64]
    """Indices into ``packs`` by (step − first_step, rank, micro-batch)."""

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def pack(self, step: int, rank: int, micro_batch: int) -> IntArray:
        """Samples of one micro-batch; ``step`` counts from the epoch's beginning."""
        return self.packs[int(self.steps[step - self.first_step, rank, micro_batch])]


class Epoch:
    """One epoch's samples, arranged as steps × ranks × micro-batches.

    Every sample is in exactly one pack. All ranks have the same number of steps. Packs keep the limits but for single
    oversized samples. Packs without a sample are in the last step only.

    Under ``"balanced"`` all epochs have the same number of steps, and no pack is empty unless there are fewer samples
    than packs. Under ``"isf"`` and ``"random"`` an epoch has the steps that its packs fill.

    Iterating yields the windows; each is planned when it is asked for, and does not need those before it.
    """

    def __init__(
        self, arrangement: Arrangement, epoch: int, ranks: Ranks, *, uneven: SampleLengths | None = None
    ) -> None:
        self.arrangement, self.epoch, self.ranks = arrangement, epoch, ranks
        self._uneven = uneven  # lengths, where a rank's packs of a step have yet to be put in running order
        self.num_replicas, self.micro_batches = ranks.num_replicas, ranks.micro_batches

    def __repr__(self) -> str:
        shape = f"{self.num_steps} steps, {self.num_replicas} ranks, {self.micro_batches} micro-batches"
        return f"Epoch({self.epoch}: {shape})"

    @property
    def num_steps(self) -> int:
        """Steps of every rank: known before anything is planned under ``"balanced"``, else by planning the epoch."""
        return int(self.arrangement.window_starts(self.epoch)[-1])

    def at(self, epoch: int) -> "Epoch":
        """Return another epoch of the same samples, arranged anew."""
        return Epoch(self.arrangement, epoch, self.ranks, uneven=self._uneven)

    def __iter__(self) -> Iterator[Window]:
        return self.windows()

    def windows(self, first_step: int = 0) -> Iterator[Window]:
        """Plan and yield the windows in turn, beginning with the one that holds ``first_step``; none at the end."""
        if not 0 <= first_step <= self.num_steps:
            raise ConfigError(f"first_step must lie between 0 and {self.num_steps}, got {first_step}")
        starts = self.arrangement.window_starts(self.epoch)
        first = int(np.searchsorted(starts, first_step, side="right")) - 1
        return (self._window(index) for index in range(first, len(starts) - 1))

    def _window(self, index: int) -> Window:
        packs = self.arrangement.window(self.epoch, index)
        first_step = int(self.arrangement.window_starts(self.epoch)[index])
        return Window(first_step, self.num_replicas, self.micro_batches, packs, self.running_order(packs))

    def running_order(self, packs: Packs) -> npt.NDArray[np.int64]:
        """Indices into the packs of whole steps by (step, rank, micro-batch).

        Uneven packs run as even ones do, the smallest first, then all others from the largest on; a pack's size is its
        share of its rank's vision units in the step plus its share of the tokens.
        """
        places = np.arange(len(packs)).reshape(-1, self.num_replicas, self.micro_batches)
        if self._uneven is None:
            return places
        # Packs themselves stay as they were dealt: saved positions count them, and earlier versions ran them so.
        sizes = np.zeros(places.shape)
        for load in (packs.vision_units(self._uneven)[places], packs.llm_tokens(self._uneven)[places]):
            sizes += load / np.maximum(load.sum(axis=-1, keepdims=True), 1)
        return np.take_along_axis(places, smallest_first(sizes), axis=-1)

    @cached_property
    def packs(self) -> Packs:
        """All packs: step after step, rank after rank. Plans and keeps the whole epoch."""
        return Packs.concatenate(window.packs for window in self)

    @cached_property
    def steps(self) -> npt.NDArray[np.int64]:
        """Indices into ``packs`` by (step, rank, micro-batch)."""
        if self._uneven is not None:
            return self.running_order(self.packs)
        shape = (self.num_steps, self.num_replicas, self.micro_batches)
        return np.arange(self.num_steps * self.num_replicas * self.micro_batches).reshape(shape)


def arrange_epoch(
    lengths: SampleLengths,
    limits: PackLimits,
    *,
    num_replicas: int,
    micro_batches: int = 1,
    epoch: int = 0,
    **options: Unpack[PackingOptions],
) -> Epoch:
    """Arrange all samples as packs for every step, rank and micro-batch; or under a mixture what it draws of them.

    Args:
        lengths: Loads of every sample.
        limits: The most a pack may hold.
        num_replicas: Data-parallel ranks.
        micro_batches: Packs per rank and step.
        epoch: Which epoch; each one draws other packs.
        **options: ``method``, ``seed``, ``oversized``, ``cost``, ``exchange_steps``, ``iterations`` and ``mixture``:
            see ``PackingSpec``.

    Raises:
        ConfigError: An argument is out of range.
        InfeasibleError: The samples do not fit into packs in any order that is tried.
        DataError: ``oversized`` is ``"error"`` and there is such a sample, or ``"drop"`` and there is no other.

    >>> lengths = SampleLengths([1, 3, 5, 4, 1], [300, 800, 1400, 1100, 300])
    >>> epoch = arrange_epoch(lengths, PackLimits(9, 4096), num_replicas=2, method="random")
    >>> epoch.num_steps, sorted(epoch.packs.samples.tolist())
    (1, [0, 1, 2, 3, 4])
    """
    spec = PackingSpec(lengths, limits, **options)  # type: ignore[arg-type]  # a mapping becomes a mixture
    return arrange(spec, Ranks(num_replicas, micro_batches)).at(integer("epoch", epoch, 0))


def arrange(spec: PackingSpec, ranks: Ranks, origin: Origin | None = None) -> Epoch:
    """Epoch 0 of a spec; ``origin`` is where other ranks left a mixture, None if nobody did."""
    arrangement: Arrangement
    if spec.mixture is not None:
        arrangement = MixedPacks(spec, ranks, origin)
    elif spec.method == "balanced":
        arrangement = BalancedPacks(spec, ranks)
    else:
        arrangement = ShuffledPacks(spec, ranks)
    return Epoch(arrangement, 0, ranks, uneven=spec.lengths if spec.method == "isf" else None)
