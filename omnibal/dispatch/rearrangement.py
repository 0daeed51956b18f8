"""Which sample goes from which rank to which: a record that can be undone, chained and measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from omnibal.cost import FloatArray, IntArray
from omnibal.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Rearrangement:
    """Samples of one step on their way from the ranks that hold them to the ranks that work on them.

    Samples are numbered over all ranks, from 0. On every rank they lie in ascending order of their numbers, before and
    after; so where a sample lies follows from where it goes, and rearrangements chain without further bookkeeping.

    Args:
        source: The rank that holds each sample before, (samples,).
        destination: The rank that holds each sample after, (samples,).
        num_ranks: Ranks of the group that exchanges samples.

    >>> move = Rearrangement([0, 0, 1, 1], [1, 0, 0, 1], num_ranks=2)
    >>> move.held_by(0).tolist(), move.brought_to(0).tolist()
    ([0, 1], [1, 2])
    >>> move.volumes([5, 1, 7, 2]).tolist()  # from rank 0: 1 stays, 5 go to rank 1
    [[1.0, 5.0], [7.0, 2.0]]
    """

    source: IntArray
    destination: IntArray
    num_ranks: int

    def __post_init__(self) -> None:
        for name in ("source", "destination"):
            ranks = np.array(getattr(self, name), dtype=np.int64)  # a copy: the caller's arrays stay writable
            wrong = ranks[(ranks < 0) | (ranks >= self.num_ranks)]
            if ranks.ndim != 1 or wrong.size:
                got = f"shape {ranks.shape}" if ranks.ndim != 1 else f"{wrong[0]}"
                raise ConfigError(f"{name} must hold a rank from 0 to {self.num_ranks - 1} for each sample, got {got}")
            ranks.flags.writeable = False  # StepPlan keeps what it computes from them
            object.__setattr__(self, name, ranks)
        if len(self.source) != len(self.destination):
            lengths = f"{len(self.source)} and {len(self.destination)}"
            raise ConfigError(f"source and destination must be equally long, got {lengths}")

    def __len__(self) -> int:
        return len(self.source)

    @property
    def is_still(self) -> bool:
        return np.array_equal(self.source, self.destination)

    def held_by(self, rank: int) -> IntArray:
        """Samples that a rank holds before, ascending."""
        return np.flatnonzero(self.source == rank)

    def brought_to(self, rank: int) -> IntArray:
        """Samples that a rank holds after, ascending."""
        return np.flatnonzero(self.destination == rank)

    def sent_by(self, rank: int) -> IntArray:
        """Samples in the order in which a rank hands them to an all-to-all: by their destinations."""
        samples = self.held_by(rank)
        return samples[np.argsort(self.destination[samples], kind="stable")]

    def received_by(self, rank: int) -> IntArray:
        """Samples in the order in which an all-to-all brings them to a rank: by their sources."""
        samples = self.brought_to(rank)
        return samples[np.argsort(self.source[samples], kind="stable")]

    def inverse(self) -> Rearrangement:
        """The way back: samples go from ``destination`` to ``source``."""
        return Rearrangement(self.destination, self.source, self.num_ranks)

    def after(self, other: Rearrangement) -> Rearrangement:
        """Two rearrangements in one: ``other`` first, then this one, which must begin where ``other`` ends.

        Features that an encoder made where it was even go straight to where the LLM is even by
        ``to_llm.after(to_encoder.inverse())`` (Π_M ∘ Π_E⁻¹ in the paper), in one exchange where undoing the first and
        then doing the second takes two.
        """
        if self.num_ranks != other.num_ranks or not np.array_equal(self.source, other.destination):
            raise ConfigError("source must be the other's destination, got other ranks; a rearrangement was left out")
        return Rearrangement(other.source, self.destination, self.num_ranks)

    def volumes(self, sizes: npt.ArrayLike) -> FloatArray:
        """What goes from which rank to which, (num_ranks before, num_ranks after); what stays is on the diagonal.

        Args:
            sizes: What each sample weighs, in any unit, (samples,).
        """
        dense: FloatArray = self.sparse_volumes(sizes).toarray()
        return dense

    def sparse_volumes(self, sizes: npt.ArrayLike) -> csr_array:
        """:meth:`volumes` without the zeros, which are nearly all of 2560 × 2560 ranks."""
        values = np.asarray(sizes, dtype=np.float64)
        if values.shape != self.source.shape:
            raise ConfigError(f"sizes must hold one for each of {len(self)} samples, got shape {values.shape}")
        return csr_array((values, (self.source, self.destination)), shape=(self.num_ranks, self.num_ranks))
