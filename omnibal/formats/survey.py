"""One pass over all items of a dataset by several processes, with a progress bar, and what it finds."""

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from omnibal.data.lengths import SampleLengths
from omnibal.errors import DataError

Broken = Literal["error", "skip"]
SHOWN = 10
CHUNK_ITEMS = 256
ITEMS_WORTH_A_PROCESS = 4096
"""Starting a process costs about as much as measuring this many items."""
MOST_PROCESSES = 32
"""More would wait for the file system, and take as many copies of a tokenizer's caches."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """One unusable item: the annotation file, its line or entry (from 1), and the reason."""

    file: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


Loads = tuple[int, ...]
Found = list[Loads | Problem]
Measure = Callable[[Any], Found]

_measure: Measure


@dataclass(frozen=True)
class Survey:
    """What was found: per item its loads, or the problem that makes it unusable.

    Attributes:
        loads: (items, columns), zeros where there is a problem.
        usable: (items,) whether an item has no problem.
        problems: In the order of the items.
    """

    loads: npt.NDArray[np.int64]
    usable: npt.NDArray[np.bool_]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Measured:
    """All that a pass over a dataset finds.

    Attributes:
        lengths: The loads of the usable samples.
        problems: Why the others are not usable.
        broken_items: (problems,) the items that they are about, ascending.
    """

    lengths: SampleLengths
    problems: tuple[Problem, ...]
    broken_items: npt.NDArray[np.int64]


def survey(
    measure: Measure,
    chunks: Iterable[Any],
    columns: int,
    *,
    total: int | None = None,
    processes: int | None = None,
    name: str = "lengths",
) -> Survey:
    """Measures items chunk by chunk, in their order.

    Args:
        measure: Gives each item of a chunk its loads or its problem; runs in forked processes where that is worth it.
        chunks: The items; read ahead without bound where there are several processes.
        columns: Loads of an item.
        total: Number of items, if known; it decides how many processes are worth starting.
        processes: Most processes; by default as many as there are cores, at most 32.
        name: What the progress bar is called.
    """
    most = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    workers = min(most, (total or 0) // ITEMS_WORTH_A_PROCESS + 1)
    found: Found = []
    with tqdm(total=total, desc=name, unit=" items", disable=(total or 0) < ITEMS_WORTH_A_PROCESS) as bar:
        for part in _run(measure, chunks, workers):
            found += part
            bar.update(len(part))
    nothing = (0,) * columns
    usable = np.array([not isinstance(entry, Problem) for entry in found], dtype=np.bool_)
    loads = np.array([nothing if isinstance(entry, Problem) else entry for entry in found], dtype=np.int64)
    problems = tuple(entry for entry in found if isinstance(entry, Problem))
    return Survey(loads.reshape(-1, columns), usable, problems)


def in_chunks(items: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Item numbers, a chunk's at a time."""
    return np.array_split(items, max(1, -(-len(items) // CHUNK_ITEMS)))


def _run(measure: Measure, chunks: Iterable[Any], workers: int) -> Iterator[Found]:
    if workers == 1:
        yield from map(measure, chunks)
        return
    # Forked, as PyTorch's DataLoader does on Linux: nothing is pickled and the caller needs no __main__ guard. An
    # executor, because a pool would wait for ever for a process that was killed.
    context = multiprocessing.get_context("fork")
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_remember, initargs=(measure,))
    try:
        yield from executor.map(_measure_chunk, chunks)
    finally:
        executor.shutdown(cancel_futures=True)


def _remember(measure: Measure) -> None:
    global _measure  # noqa: PLW0603  (the only way to hand a pool's processes something once)
    _measure = measure


def _measure_chunk(chunk: Any) -> Found:
    return _measure(chunk)


def settle_problems(problems: Sequence[Problem], num_items: int, broken: Broken) -> None:
    """Refuses unusable items, or warns that they are left out.

    Raises:
        DataError: If ``broken`` is ``"error"`` and there are problems; lists the first few and says how many.
    """
    if not problems:
        return
    listed = "\n  ".join(str(problem) for problem in problems[:SHOWN])
    hidden = f"\n  … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    summary = f"{len(problems)} of {num_items} items cannot be used:\n  {listed}{hidden}"
    if broken == "error":
        raise DataError(
            f"{summary}\nCorrect them, or leave them out: 'skip' for omnibal.data.broken of a ds_config, "
            "for `omnibal lengths --broken`, or for broken in code."
        )
    if len(problems) == num_items:
        raise DataError(f"items must hold at least one usable, got none; {summary}")
    logger.warning("Left out: %s", summary)
