"""Which item of which annotation file a sample is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnibal.data.sources.chat import Conversation, parse_conversation
from omnibal.data.sources.problems import Problem
from omnibal.data.sources.records import Records
from omnibal.errors import DataError

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shard:
    """One annotation file.

    Attributes:
        name: What the user calls it.
        records: Its entries.
        root: Where its images are.
        num_samples: Samples drawn from it: its items in order, then again from the first one.
        max_tiles: Most tiles of its images, where it has a limit of its own.
    """

    name: str
    records: Records
    root: Path
    num_samples: int
    max_tiles: int | None = None

    def conversation(self, place: int) -> Conversation:
        """One of its items.

        Raises:
            DataError: It is no conversation; the message names file and line.
        """
        try:
            return parse_conversation(self.records[place], self.root)
        except ValueError as error:
            raise DataError(str(self.problem(place, error))) from error

    def problem(self, place: int, error: ValueError) -> Problem:
        """What is wrong with one of its items."""
        return Problem(self.records.path, self.records.line(place), str(error))


class Shards:
    """Annotation files one after another; items are numbered through, and so are samples.

    Args:
        shards: The annotation files.

    Attributes:
        num_samples: Samples in all.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = tuple(shards)
        self._sizes = np.array([len(shard.records) for shard in shards], dtype=np.int64)
        self._drawn = np.array([shard.num_samples for shard in shards], dtype=np.int64)
        self._first_items: Ids = np.cumsum(self._sizes) - self._sizes
        self._first_samples: Ids = np.cumsum(self._drawn) - self._drawn
        self.num_samples = int(self._drawn.sum())

    @property
    def num_used_items(self) -> int:
        """Items that are drawn at least once."""
        return int(np.minimum(self._sizes, self._drawn).sum())

    def used_items(self) -> Ids:
        """The items that are drawn at least once, ascending."""
        used = np.minimum(self._sizes, self._drawn)
        first_of_used = np.cumsum(used) - used
        return np.repeat(self._first_items - first_of_used, used) + np.arange(used.sum())

    def samples_of(self, items: Ids) -> Ids:
        """All samples that repeat some items, ascending; takes memory for these samples only."""
        shard = np.searchsorted(self._first_items, items, side="right") - 1
        places, sizes = items - self._first_items[shard], self._sizes[shard]
        times = np.maximum(-(-(self._drawn[shard] - places) // sizes), 0)
        repetition = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        first = np.repeat(self._first_samples[shard] + places, times)
        return np.sort(first + repetition * np.repeat(sizes, times))

    def item_of(self, samples: Ids) -> Ids:
        """The item that each sample repeats, of the shape of ``samples``."""
        shard = self.source_of(samples)
        places: Ids = np.mod(samples - self._first_samples[shard], self._sizes[shard])
        return self._first_items[shard] + places

    def source_of(self, samples: Ids) -> Ids:
        """The number of each sample's shard, of the shape of ``samples``."""
        return np.asarray(np.searchsorted(self._first_samples, samples, side="right") - 1, dtype=np.int64)

    def locate(self, item: int) -> tuple[Shard, int]:
        """The shard of an item, and its place in there."""
        number = int(np.searchsorted(self._first_items, item, side="right")) - 1
        return self._shards[number], item - int(self._first_items[number])
