"""Sources that samples are drawn from one by one, and where they stand."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, Final
from zlib import crc32

import numpy as np

from omnibal.data.balance.planner import shuffle_keys, shuffled
from omnibal.errors import ConfigError, DataError, said

END: Final = object()  # in place of an item of a source that has ended
ROUNDS: Final = 8  # times that each worker's items are compared with the other workers': no two may read the same


class ShuffledItems:
    """A rank's part of a dataset that is read by index and the same on all ranks, in another order each pass."""

    def __init__(self, dataset: Sequence[Any], *, rank: int, num_ranks: int, seed: int) -> None:
        self._dataset, self._rank, self._num_ranks, self._seed = dataset, rank, num_ranks, seed
        self._pass, self._next = 0, rank

    def __iter__(self) -> Iterator[Any]:
        keys = shuffle_keys(self._seed, self._pass)
        while self._next < len(self._dataset):
            place, self._next = self._next, self._next + self._num_ranks
            yield self._dataset[int(shuffled(len(self._dataset), place, place + 1, keys)[0])]

    def set_epoch(self, epoch: int) -> None:
        self._pass, self._next = epoch, self._rank

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next, "samples": len(self._dataset)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state["samples"] != len(self._dataset):
            raise DataError(
                f"the dataset must have the {state['samples']} samples that its order was made for, got "
                f"{len(self._dataset)}; under another name it begins at its start"
            )
        self._next = state["next"]


class EveryNth:
    """A rank's part of a source that is the same on all ranks: of n ranks each gets every n-th item."""

    def __init__(self, dataset: Any, rank: int, num_ranks: int) -> None:
        self.dataset, self._rank, self._num_ranks = dataset, rank, num_ranks
        self._first = rank
        # Whoever draws looks whether a source has these methods: this has those that the dataset has.
        own = ("set_epoch", "state_dict") if hasattr(dataset, "state_dict") else ("set_epoch",)
        vars(self).update({name: getattr(dataset, name) for name in own if hasattr(dataset, name)})

    def __iter__(self) -> Iterator[Any]:
        first, self._first = self._first, self._rank
        return islice(iterated(self.dataset), first, None, self._num_ranks)

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)
        self._first = self._num_ranks - 1


class Source:
    """A source that is drawn from item by item, and its position."""

    def __init__(self, name: str, items: Iterable[Any], *, repeats: bool, first_pass: int) -> None:
        # With ``state_dict`` and ``load_state_dict`` items resume at their own position; without, what was drawn is
        # drawn again and thrown away. ``set_epoch`` gets the number of each pass.
        self.name, self._source, self._repeats = name, items, repeats
        self._pass, self._drawn, self._own = first_pass, 0, None
        self._items: Iterator[Any] | None = None
        self.heard = 0  # signs of life: items that the source has yielded, to whatever end

    @property
    def last_item(self) -> str:
        return f"source {self.name!r}, sample {self._drawn - 1}"

    def draw(self) -> Any:
        """The next item, or ``END`` where the source has ended and does not repeat; its errors name the source."""
        while True:
            try:
                if self._items is None:
                    self._items = self._begin()
                item = next(self._items, END)
            except Exception as error:  # whatever a user's source raises, the other ranks wait for an answer
                raise DataError(f"source {self.name!r}: {said(error)}") from error
            if item is not END:
                self._drawn, self.heard = self._drawn + 1, self.heard + 1
                return item
            if self._drawn == 0:
                raise DataError(f"source {self.name!r} must yield samples in every pass, got none")
            if not self._repeats:
                return END
            self._pass, self._drawn, self._own, self._items = self._pass + 1, 0, None, None

    def _begin(self) -> Iterator[Any]:
        source: Any = self._source
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._pass)
        if self._own is not None:
            source.load_state_dict(self._own)
        items = iterated(source)
        if self._own is None:
            for number in range(self._drawn):
                if next(items, END) is END:
                    raise DataError(f"the {self._drawn} samples that were drawn before must come again, got {number}")
                self.heard += 1
        return items

    def state(self) -> dict[str, Any]:
        source: Any = self._source
        if self._items is not None and hasattr(source, "state_dict"):
            self._own = deepcopy(source.state_dict())
        return {"pass": self._pass, "drawn": self._drawn, "own": self._own}

    def go_to(self, state: Mapping[str, Any]) -> None:
        self._pass, self._drawn, self._own = state["pass"], state["drawn"], state["own"]
        self._items = None


class Lanes:
    """What ranks of an earlier run have left of a source; a rank reads the lanes of some of them in turns."""

    # Where there are more ranks than lanes, several ranks share one: each reads all of it, and takes its part.

    def __init__(self, lanes: Sequence[Source], part: int, num_parts: int) -> None:
        self._lanes, self._part, self._num_parts = lanes, part, num_parts
        self._turn = 0
        # Of each lane: whether each of its next items was trained by the earlier run; how many came that were not.
        self._trained: list[list[bool]] = [[] for _ in lanes]
        self._counts = [0] * len(lanes)

    def __iter__(self) -> Iterator[Any]:
        ended = set[int]()
        while len(ended) < len(self._lanes):
            lane, self._turn = self._turn, (self._turn + 1) % len(self._lanes)
            if lane not in ended and (item := self._next(lane)) is not END:
                yield item
            else:
                ended.add(lane)

    def _next(self, lane: int) -> Any:
        while (item := self._lanes[lane].draw()) is not END:
            if self._trained[lane] and self._trained[lane].pop(0):
                continue
            self._counts[lane] += 1
            if (self._counts[lane] - 1) % self._num_parts == self._part:
                break
        return item

    def state_dict(self) -> dict[str, Any]:
        found = zip(self._lanes, self._trained, self._counts, strict=True)
        return {
            "lanes": [lane_state(lane.state(), trained, count) for lane, trained, count in found],
            "turn": self._turn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for lane, saved in zip(self._lanes, state["lanes"], strict=True):
            lane.go_to(saved["at"])
        self._trained = [[*saved["trained"]] for saved in state["lanes"]]
        self._counts, self._turn = [saved["count"] for saved in state["lanes"]], state["turn"]


def lane_state(at: Mapping[str, Any], trained: Sequence[bool], count: int = 0) -> dict[str, Any]:
    return {"at": at, "trained": [*trained], "count": count}


def lanes_of(reader: int, num_readers: int, num_before: int) -> tuple[list[int], int, int]:
    """Which earlier readers' lanes a reader takes over, which part of each is its own, and in how many parts they are.

    >>> [lanes_of(reader, 2, 3) for reader in range(2)], [lanes_of(reader, 3, 2) for reader in range(3)]
    ([([0, 2], 0, 1), ([1], 0, 1)], [([0], 0, 2), ([1], 0, 1), ([0], 1, 2)])
    """
    if num_readers <= num_before:
        return [*range(reader, num_before, num_readers)], 0, 1
    part, lane = divmod(reader, num_before)
    return [lane], part, len(range(lane, num_readers, num_before))


def iterated(source: Any) -> Iterator[Any]:
    """Iterate a source; refuse one whose worker processes all read the same, when that shows."""
    # A PyTorch dataset that does not divide itself over a DataLoader's workers yields every sample once for each.
    workers = getattr(source, "num_workers", 0)
    return _divided(iter(source), workers) if isinstance(workers, int) and workers > 1 else iter(source)


def _divided(items: Iterator[Any], workers: int) -> Iterator[Any]:
    # Workers take turns: a round holds an item of each. Where all items of every round are alike, but rounds are not,
    # all workers read the same.
    rounds: list[int] = []
    while len(rounds) < ROUNDS:
        marks = []
        for item in islice(items, workers):
            marks.append(mark_of(item))
            yield item
        if len(marks) < workers or len(set(marks)) > 1:
            break
        rounds.append(marks[0])
    if len(set(rounds)) > 1 and (len(rounds) == ROUNDS or not marks):
        raise DataError(
            f"samples must be divided over {workers} worker processes, got each one {workers} times; let the dataset "
            "skip what torch.utils.data.get_worker_info() leaves to the others, or read it with num_workers=0"
        )
    yield from items


def mark_of(content: Any, mark: int = 0) -> int:
    """Checksum of an item's integers (in lists and 1-D arrays), texts and bytes, not of pixels: crops may be random.

    >>> mark_of({"ids": [1, 2]}) == mark_of({"ids": [1, 2], "pixels": np.zeros((3, 8, 8))}) != mark_of({"ids": [1, 3]})
    True
    """
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, list | tuple) and not (content and isinstance(content[0], int)):
        for part in content:
            mark = mark_of(part, mark)
        return mark
    if getattr(content, "ndim", 0) == 1 and not str(content.dtype).rpartition(".")[2].startswith(("float", "bfloat")):
        return crc32(np.ascontiguousarray(content).tobytes(), mark)
    if isinstance(content, str | bytes | int | float | list | tuple):
        return crc32(content if isinstance(content, bytes) else repr(content).encode(), mark)
    return mark


def is_indexed(items: Any) -> bool:
    # torch gives its iterable datasets a __getitem__, which raises; no torch is imported here.
    is_iterable = any(base.__name__ == "IterableDataset" for base in type(items).__mro__)
    return hasattr(items, "__len__") and hasattr(items, "__getitem__") and not is_iterable


def divided(
    name: str,
    items: Any,
    rank: int,
    division: Sequence[int],
    *,
    part: Callable[[str, Any, int, int], Any],
    seed: int,
    repeats: bool,
    first_pass: int,
) -> Any:
    """A rank's part of a source.

    Args:
        division: Numbers of ranks: of those that the source was divided over when its pass began, then of all that
            took over from those before.
        part: As `part_of`, for what is not read by index.
    """
    *before, num_ranks = division
    if not before:
        if is_indexed(items):
            return ShuffledItems(items, rank=rank, num_ranks=num_ranks, seed=seed)
        return part(name, items, rank, num_ranks)
    lanes, own, num_parts = lanes_of(rank, num_ranks, before[-1])
    found = []
    for lane in lanes:
        inner = divided(
            name, _copied(name, items), lane, before, part=part, seed=seed, repeats=repeats, first_pass=first_pass
        )
        found.append(Source(f"{name} of replica {lane}", inner, repeats=repeats, first_pass=first_pass))
    return Lanes(found, own, num_parts)


def _copied(name: str, items: Any) -> Any:
    """A copy of a source that stands at one place; lanes stand at several."""
    if not hasattr(items, "load_state_dict"):
        return items
    try:
        return deepcopy(items)
    except Exception as error:  # what an object holds: files, generators
        raise ConfigError(
            f"source {name!r} must allow a copy, with which replicas read on from other places, got {said(error)}; go "
            "on with as many replicas as before"
        ) from error


def already_divided(name: str, items: Any, rank: int, num_ranks: int) -> Any:
    """A rank's part of a source that was divided over the ranks before."""
    return items


def part_of(name: str, items: Any, rank: int, num_ranks: int) -> Any:
    """A rank's part of a source that is the same on all ranks; ``SampleBuffer`` divides what is read by index."""
    if num_ranks == 1 or is_indexed(items):
        return items
    if hasattr(items, "part"):  # knows best how to leave out what is another rank's
        return items.part(rank, num_ranks)
    if not hasattr(items, "num_shards"):
        return EveryNth(items, rank, num_ranks)
    from datasets.distributed import split_dataset_by_node

    if items.num_shards < num_ranks:
        raise ConfigError(
            f"source {name!r} must have a shard for each of {num_ranks} replicas, got {items.num_shards}; each would "
            "read all of them: write it in more shards"
        )
    return split_dataset_by_node(items, rank, num_ranks)
