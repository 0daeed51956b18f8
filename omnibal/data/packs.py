"""Packs: which samples share a micro-batch; kinds of input of a sample, and fillers for packs that lack one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from omnibal.cost import Load
from omnibal.data.lengths import IMAGE, SOUND, VIDEO, IntArray, SampleLengths
from omnibal.errors import ConfigError, DataError

Sample = TypeVar("Sample")
Loads = tuple[int, ...]
"""Vision units, LLM tokens and target tokens of a sample; of one with videos also the vision units that they bring; of
one with sounds beside images that and sound units."""
KIND_NAMES: Final = {IMAGE: "an image", VIDEO: "a video", SOUND: "a sound"}


class Packs:
    """Samples grouped into packs: pack ``p`` holds ``samples[starts[p]:starts[p + 1]]``, possibly none.

    Two flat arrays (compressed rows), so that a million packs are two allocations.

    Args:
        samples: Sample indices, pack after pack.
        starts: ``num_packs + 1`` positions in ``samples``, never falling, from 0 to ``len(samples)``.

    Raises:
        DataError: ``starts`` does not divide ``samples``.

    >>> packs = Packs([4, 0, 2], [0, 2, 2, 3])
    >>> [pack.tolist() for pack in packs]
    [[4, 0], [], [2]]
    >>> packs.llm_tokens(SampleLengths([1, 1, 3, 1, 2], [10, 20, 30, 40, 50])).tolist()
    [60, 0, 30]
    """

    samples: Final[IntArray]
    starts: Final[npt.NDArray[np.int64]]

    def __init__(self, samples: npt.ArrayLike, starts: npt.ArrayLike) -> None:
        self.samples = _integers("samples", samples)
        self.starts = _integers("starts", starts).astype(np.int64, copy=False)
        whole = len(self.starts) > 0 and self.starts[0] == 0 and self.starts[-1] == len(self.samples)
        if not whole or (np.diff(self.starts) < 0).any():
            raise DataError(
                f"starts must rise from 0 to the number of samples ({len(self.samples)}), got {self.starts}"
            )

    @classmethod
    def from_lists(cls, packs: Iterable[Sequence[int]]) -> "Packs":
        """Build packs from one sequence of sample indices each."""
        rows = [np.asarray(pack, dtype=np.int64) for pack in packs]
        samples = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
        return cls(samples, np.cumsum([0, *(len(row) for row in rows)]))

    @classmethod
    def concatenate(cls, parts: Iterable["Packs"]) -> "Packs":
        parts = list(parts)
        samples = np.concatenate([part.samples for part in parts]) if parts else np.zeros(0, dtype=np.int64)
        sizes = np.concatenate([part.sizes for part in parts]) if parts else np.zeros(0, dtype=np.int64)
        return cls(samples, _starts(sizes))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, pack: int) -> IntArray:
        if not -len(self) <= pack < len(self):
            raise IndexError(f"pack must lie between {-len(self)} and {len(self) - 1}, got {pack}")
        pack %= len(self)
        return self.samples[self.starts[pack] : self.starts[pack + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[pack] for pack in range(len(self)))

    def __repr__(self) -> str:
        return f"Packs({len(self)} packs of {len(self.samples)} samples)"

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts)

    def take(self, order: npt.ArrayLike) -> "Packs":
        """Return the given packs in the given order; a pack may be left out."""
        chosen = np.asarray(order, dtype=np.int64)
        sizes = self.sizes[chosen]
        starts = _starts(sizes)
        places = np.arange(starts[-1]) + np.repeat(self.starts[chosen] - starts[:-1], sizes)
        return Packs(self.samples[places], starts)

    def without(self, samples: npt.ArrayLike) -> "Packs":
        """A copy of these packs without some samples.

        >>> [pack.tolist() for pack in Packs([4, 0, 2], [0, 2, 2, 3]).without([2, 4])]
        [[0], [], []]
        """
        stays = ~np.isin(self.samples, samples)
        return Packs(self.samples[stays], _starts(stays.astype(np.int64))[self.starts])

    def between(self, first: int, last: int) -> "Packs":
        """Return packs ``first`` … ``last`` − 1, without a copy of their samples."""
        starts = self.starts[first : last + 1]
        return Packs(self.samples[starts[0] : starts[-1]], starts - starts[0])

    def vision_units(self, lengths: SampleLengths) -> npt.NDArray[np.int64]:
        return self.sums(lengths.vision_units)

    def llm_tokens(self, lengths: SampleLengths) -> npt.NDArray[np.int64]:
        return self.sums(lengths.llm_tokens)

    def load(self, lengths: SampleLengths) -> Load:
        """What each pack holds, one entry per pack; squares are summed within samples."""
        vision_squared = 0 if lengths.vision_squared is None else self.sums(lengths.vision_squared)
        squares = self.sums(lengths.llm_tokens, squared=True)
        targets = None if lengths.target_tokens is None else self.sums(lengths.target_tokens)
        sounds = 0 if lengths.sound_units is None else self.sums(lengths.sound_units)
        return Load(self.vision_units(lengths), self.llm_tokens(lengths), squares, vision_squared, targets, sounds)

    def sums(self, values: IntArray, *, squared: bool = False) -> npt.NDArray[np.int64]:
        """Sum of ``values[sample]``, or of its square, over the samples of each pack; 0 for an empty pack."""
        held = values[self.samples].astype(np.int64)  # in 64 bits whatever the values have
        before = _starts(held * held if squared else held)
        return before[self.starts[1:]] - before[self.starts[:-1]]


def deal(packs: Packs, num_packs: int, generator: np.random.Generator, *, split: bool) -> Packs:
    """Shuffle packs and add empty ones, or with ``split`` halves of those with most samples, up to ``num_packs``.

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


def random_padded_steps(
    lengths: SampleLengths, *, batch_size: int, num_replicas: int, micro_batches: int, steps: int, seed: int = 0
) -> Load:
    """What random micro-batches of a fixed number of samples bring to the devices: how most people batch today.

    Loads have the shape (steps, replicas, micro-batches). Images are not padded; the LLM works on ``batch_size``
    sequences as long as the longest. With fewer samples than the steps need there are fewer steps.

    >>> load = random_padded_steps(
    ...     SampleLengths([1, 0], [10, 4]), batch_size=2, num_replicas=1, micro_batches=1, steps=1
    ... )
    >>> load.vision_units.tolist(), load.llm_tokens.tolist(), load.llm_tokens_squared.tolist()
    ([[[1.0]]], [[[20.0]]], [[[200.0]]])
    """
    step_samples = num_replicas * micro_batches * batch_size
    count = min(steps, len(lengths) // step_samples)
    if count < 1:
        raise ConfigError(f"lengths must hold a step of {step_samples} samples, got {len(lengths)}")
    order = np.random.default_rng(seed).permutation(len(lengths))[: count * step_samples]
    samples = order.reshape(count, num_replicas, micro_batches, batch_size)
    longest = lengths.llm_tokens[samples].max(axis=-1).astype(np.float64)
    squared = 0 if lengths.vision_squared is None else lengths.vision_squared[samples].sum(axis=-1)
    vision = lengths.vision_units[samples].sum(axis=-1)
    return Load(vision, batch_size * longest, batch_size * longest**2, squared)


def loads_of(images: int, videos: int, llm_tokens: int, target_tokens: int, sound_units: int = 0) -> Loads:
    """Loads from the vision units of images and of videos; videos and sounds are named where there are any."""
    loads = images + videos, llm_tokens, target_tokens
    if sound_units:
        return (*loads, videos, sound_units)
    return (*loads, videos) if videos else loads


def in_full(loads: Sequence[Any]) -> tuple[Any, ...]:
    """Loads with the numbers of videos and of sounds, which are 0 where they were left out."""
    return (*loads, 0, 0)[:5]


def kinds_of(loads: Loads) -> int:
    vision, _, _, videos, sounds = in_full(loads)
    kinds: int = IMAGE * (vision > videos) + VIDEO * (videos > 0) + SOUND * (sounds > 0)
    return kinds


def smallest_of_kinds(lengths: SampleLengths) -> dict[int, int]:
    """By ``kinds`` of the lengths: the sample with the fewest vision units, then the fewest tokens, then the first."""
    found = dict[int, int]()
    for kinds in np.unique(lengths.kinds):
        among = np.flatnonzero(lengths.kinds == kinds)
        order = np.lexsort((lengths.llm_tokens[among], lengths.vision_units[among]))
        found[int(kinds)] = int(among[order[0]])
    return found


def fillers_for(
    smallest: Mapping[int, Sample], size: Callable[[Sample], Any], has: int, wanted: int, *, is_empty: bool
) -> list[Sample]:
    """Samples that bring the kinds that a pack lacks, and none that the step has not; an empty pack gets one at least.

    ``smallest`` has a sample with each combination of kinds that there is, by the bits of ``SampleLengths.kinds``;
    ``has`` are the kinds of the pack, ``wanted`` those of the step.
    """
    found = list[Sample]()
    allowed = {kinds: sample for kinds, sample in smallest.items() if not kinds & ~wanted}
    while missing := wanted & ~has:
        one = missing & -missing  # a sample with this kind: where it is in the step, so is all that it comes with
        kinds = min((kinds for kinds in allowed if kinds & one), key=lambda kinds: size(allowed[kinds]))
        found.append(allowed[kinds])
        has |= kinds
    if is_empty and not found and allowed:
        found.append(min(allowed.values(), key=size))
    return found


def _integers(name: str, values: npt.ArrayLike) -> IntArray:
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{name} must be one-dimensional and integer, got {array.dtype} of shape {array.shape}")
    return array


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
