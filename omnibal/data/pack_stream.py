"""PackStream: an epoch's packs in running order, cut into steps for any number of ranks.

An epoch is arranged once, for the ranks that begin it. Its packs in running order are a stream, and a position in
the stream is all that another number of ranks needs to go on: it cuts the same stream into steps of its own size.
Nothing is lost or repeated, nothing is planned again but the window at hand, and the position is one integer.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load
from omnibal.data.checks import ranks
from omnibal.data.epoch import Epoch
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.packs import Packs, deal

MOST_WINDOWS_KEPT = 2  # a step of other ranks may lie across two windows


@dataclass(frozen=True)
class Ranks:
    """Who runs a step: data-parallel ranks, and how many packs each of them gets.

    Raises:
        ConfigError: One of the numbers is below 1 or no integer, or a step would have too many packs.
    """

    num_replicas: int
    micro_batches: int

    def __post_init__(self) -> None:
        checked = ranks(self.num_replicas, self.micro_batches)
        # A frozen record sets its own fields only through object.
        for name, number in zip(("num_replicas", "micro_batches"), checked, strict=True):
            object.__setattr__(self, name, number)

    @property
    def step_packs(self) -> int:
        """Packs in a step."""
        return self.num_replicas * self.micro_batches


@dataclass(frozen=True, eq=False)
class Population:
    """Samples that an epoch arranges.

    Args:
        lengths: Their loads.
        samples: Their indices in the dataset; None where they are the dataset.
        num_admitted: How many of them take part.
    """

    lengths: SampleLengths
    samples: IntArray | None
    num_admitted: int


class PackStream:
    """The packs of an epoch in running order, cut into steps from a position on.

    Where the steps are those that the epoch was arranged for, they are passed on untouched. Otherwise the packs of a
    step are sorted into micro-batches of like load.

    Args:
        epoch: The arrangement, for the ranks that began it.
        population: The samples that it arranges.
        packs_done: Packs of the stream that have been trained.
        ranks: Who runs the steps from there on.
        split: Packs are split so that none is empty while there are as many samples: those of the epoch have been, and
            those of other ranks' last step are.
    """

    def __init__(self, epoch: Epoch, population: Population, *, packs_done: int, ranks: Ranks, split: bool) -> None:
        self._epoch = epoch
        self._population = population
        self._windows: dict[int, tuple[int, Packs]] = {}
        self.arranged_for = Ranks(epoch.num_replicas, epoch.micro_batches)
        self.packs_done = packs_done
        self.ranks = ranks
        self._split = split

    @property
    def _untouched(self) -> bool:
        return self.ranks == self.arranged_for and self.packs_done % self.ranks.step_packs == 0

    @cached_property
    def num_packs(self) -> int:
        """Packs in the whole stream; empty ones count only where the steps are passed on untouched."""
        packs = self._epoch.num_steps * self.arranged_for.step_packs
        none_empty = self._split and self._population.num_admitted >= packs
        if self._untouched or none_empty or not packs:
            return packs
        first, last_window = self._window(packs - 1)
        return first + int((last_window.sizes > 0).sum())

    @property
    def num_steps(self) -> int:
        """Steps from the position on."""
        return -(-max(self.num_packs - self.packs_done, 0) // self.ranks.step_packs)

    def position(self, steps: int) -> int:
        """Packs of the stream that are done after ``steps`` more steps."""
        return min(self.packs_done + steps * self.ranks.step_packs, self.num_packs)

    def step(self, index: int) -> Packs:
        """Packs of the ``index``-th step from the position on."""
        first, last = self.position(index), self.position(index + 1)
        packs = self._slice(first, last)
        if not self._untouched:
            generator = np.random.default_rng([first, self.ranks.num_replicas])
            if last - first < self.ranks.step_packs:
                packs = deal(packs, self.ranks.step_packs, generator, split=self._split)
            packs = packs.take(_alike(packs.load(self._population.lengths), self.ranks, generator))
        return packs if self._population.samples is None else Packs(self._in_dataset(packs.samples), packs.starts)

    def next_pack(self, position: int) -> IntArray:
        """Samples of the first pack from a position on that has any; the same for all ranks, none at the end."""
        packs = self._slice(position, min(position + self.arranged_for.step_packs, self.num_packs))
        filled = np.flatnonzero(packs.sizes)
        return self._in_dataset(packs[filled[0]]) if len(filled) else np.zeros(0, dtype=np.int64)

    def _in_dataset(self, samples: IntArray) -> IntArray:
        return samples if self._population.samples is None else self._population.samples[samples]

    def _slice(self, first: int, last: int) -> Packs:
        parts = []
        while first < last:
            begin, window = self._window(first)
            end = min(last - begin, len(window))
            parts.append(window.between(first - begin, end))
            first = begin + end
        return parts[0] if len(parts) == 1 else Packs.concatenate(parts)

    def _window(self, position: int) -> tuple[int, Packs]:
        """The window that holds a pack, and the position of its first pack."""
        for first, packs in self._windows.values():
            if first <= position < first + len(packs):
                return first, packs
        window = next(self._epoch.windows(position // self.arranged_for.step_packs))
        packs = window.packs if self._untouched else window.packs.take(np.flatnonzero(window.packs.sizes))
        if len(self._windows) == MOST_WINDOWS_KEPT:
            self._windows.pop(next(iter(self._windows)))
        self._windows[window.first_step] = (window.first_step * self.arranged_for.step_packs, packs)
        return self._windows[window.first_step]


def _alike(load: Load, ranks: Ranks, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Order packs such that those of one micro-batch, over all ranks, have like loads; micro-batches as planned.

    The smallest runs first, the others from the largest on.
    """
    by_load = np.lexsort((load.llm_tokens, load.vision_units)).reshape(ranks.micro_batches, ranks.num_replicas)
    groups = generator.permuted(by_load, axis=1)[-np.arange(ranks.micro_batches)]
    return groups.T.ravel()
