"""Lengths of any dataset by a function of the user's: Hugging Face `datasets`, lists, iterables of anything."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.data.lengths import SampleLengths
from omnibal.data.sources.survey import (
    CHUNK_ITEMS,
    Broken,
    Found,
    Loads,
    Measured,
    Problem,
    in_chunks,
    settle_problems,
    survey,
)
from omnibal.errors import DataError

COLUMNS = ("vision_units", "llm_tokens", "target_tokens", "vision_squared", "source")
REQUIRED = COLUMNS[:2]

MeasureItem = Callable[[Any], Mapping[str, int]]


def measure_lengths(
    items: Iterable[Any],
    measure: MeasureItem,
    *,
    columns: Sequence[str] = REQUIRED,
    name: str = "items",
    broken: Broken = "error",
    processes: int | None = None,
) -> Measured:
    """Measures every item of a dataset.

    Args:
        items: Where it has a length and takes indices (a list, a ``datasets.Dataset``), several processes read it;
            anything else is read once, in this process. Tell `datasets` not to decode images
            (``cast_column("image", Image(decode=False))``): headers suffice.
        measure: The loads of one item by the names in ``columns``. Whatever it raises is taken as the reason why the
            item cannot be used.
        columns: Columns of `SampleLengths` that ``measure`` gives.
        name: What a report calls the dataset; an item's "line" is its number, from 1.
        broken: ``"error"`` refuses unusable items in one report, ``"skip"`` leaves them out with a warning.
        processes: Most processes; by default as many as there are cores, at most 32.

    Returns:
        Lengths of the usable items in their order, the problems of the others, and which those are, from 0.

    Raises:
        DataError: If there are unusable items that are not skipped, no item at all, or a column is unknown or missing.

    >>> captions = [{"tiles": 3, "text": "a cat"}, {"tiles": 0, "text": "no picture here"}]
    >>> count_loads = lambda item: {"vision_units": item["tiles"], "llm_tokens": len(item["text"].split())}
    >>> measured = measure_lengths(captions, count_loads)
    >>> measured.lengths.vision_units.tolist(), measured.lengths.llm_tokens.tolist()
    ([3, 0], [2, 3])
    """
    if not set(REQUIRED) <= set(columns) <= set(COLUMNS):
        raise DataError(f"columns must be of {COLUMNS}, the first two among them, got {tuple(columns)}")
    if isinstance(items, Sized) and hasattr(items, "__getitem__"):
        numbers = np.arange(len(items))
        by_number = partial(_measure_numbers, items, measure, tuple(columns), name)
        found = survey(by_number, in_chunks(numbers), len(columns), total=len(numbers), processes=processes)
    else:
        one_by_one = partial(_measure_items, measure, tuple(columns), name)
        found = survey(one_by_one, _numbered_chunks(items), len(columns), processes=1)
    if not len(found.usable):
        raise DataError(f"{name} must hold at least one item, got none")
    settle_problems(found.problems, len(found.usable), broken)
    lengths = SampleLengths(**dict(zip(columns, found.loads[found.usable].T, strict=True)))
    return Measured(lengths, found.problems, np.flatnonzero(~found.usable))


def _numbered_chunks(items: Iterable[Any]) -> Iterator[list[tuple[int, Any]]]:
    numbered = zip(count(), items, strict=False)
    while chunk := list(islice(numbered, CHUNK_ITEMS)):
        yield chunk


def _measure_numbers(items: Any, measure: MeasureItem, columns: tuple[str, ...], name: str, numbers: Any) -> Found:
    return [_measure_one(lambda n: measure(items[n]), columns, name, number, number) for number in numbers.tolist()]


def _measure_items(measure: MeasureItem, columns: tuple[str, ...], name: str, chunk: list[tuple[int, Any]]) -> Found:
    return [_measure_one(measure, columns, name, number, item) for number, item in chunk]


def _measure_one(measure: MeasureItem, columns: tuple[str, ...], name: str, number: int, item: Any) -> Loads | Problem:
    try:
        loads = measure(item)
        return tuple(_count(column, loads[column]) for column in columns)
    except Exception as error:  # a user's function may raise anything, and one item must not end the pass
        return Problem(Path(name), number + 1, f"{type(error).__name__}: {error}")


def _count(column: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{column} must be an integer of at least 0, got {value!r}")
    return int(value)
