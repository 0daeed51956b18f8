"""The measurer of lengths: one pass over items by several processes, and a folder that keeps what was found.

Callers say how an item is measured: `omnibal.formats.conversations` for files, `omnibal.integrations.lengths` for the
share of a host's dataset that each rank reads.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from omnibal.data.lengths import SampleLengths
from omnibal.errors import DataError, said
from omnibal.formats.rows import Problem, replaced_folder
from omnibal.records import load_json

FORMAT: Final = 2  # changes with the rules by which lengths are measured
PROBLEMS_FILE: Final = "problems.json"
COLUMNS: Final = ("vision_units", "llm_tokens", "target_tokens", "vision_squared", "video_units", "sound_units")
OPTIONAL: Final = COLUMNS[3:]
CHUNK_ITEMS: Final = 256
# Starting a process costs about as much as measuring this many items, or decoding the files of so many.
ITEMS_WORTH_A_PROCESS: Final = 4096
DECODED_WORTH_A_PROCESS: Final = 64
MOST_PROCESSES: Final = 32  # more would wait for the file system, and take as many copies of a tokenizer's caches
SHOWN: Final = 10  # problems that a message lists

Broken = Literal["error", "skip"]
Loads = tuple[int, ...]
Found = list[Loads | Problem]
Items = npt.NDArray[np.int64]
Measure = Callable[[Items], Found]

_measure: Measure

logger = logging.getLogger(__name__)


def lengths_of(loads: npt.NDArray[np.int64], names: Sequence[str] = COLUMNS, **facts: Any) -> SampleLengths:
    """Lengths from loads (samples, columns); an optional column that holds zeros alone is left out."""
    columns = dict(zip(names, loads.T, strict=True))
    return SampleLengths(**{n: c for n, c in columns.items() if n not in OPTIONAL or c.any()}, **facts)


def summed(images: Sequence[Any], videos: Sequence[Any], sounds: Sequence[Any]) -> Loads:
    """What the loads of a sample's images, videos and sounds bring together, in the order of `COLUMNS`; no targets."""
    return (
        sum(load.vision_units for load in (*images, *videos, *sounds)),
        sum(load.llm_tokens for load in (*images, *videos, *sounds)),
        0,
        sum(load.vision_squared for load in (*images, *videos)),
        sum(load.vision_units for load in videos),
        sum(load.sound_units for load in sounds),
    )


@dataclass(frozen=True)
class Survey:
    loads: npt.NDArray[np.int64]  # (items, columns), zeros where there is a problem
    usable: npt.NDArray[np.bool_]  # (items,) whether an item has no problem
    problems: tuple[Problem, ...]  # in the order of the items


@dataclass(frozen=True)
class Measured:
    lengths: SampleLengths  # of the usable samples
    problems: tuple[Problem, ...]
    broken_items: npt.NDArray[np.int64]  # (problems,) the item of each problem, ascending


class LengthsCache:
    """A folder with one folder for each dataset that was measured."""

    def __init__(self, folder: Path, made_from: Any) -> None:
        key = hashlib.blake2b(json.dumps([FORMAT, made_from], default=str).encode(), digest_size=16).hexdigest()
        self.path = folder / key

    def load(self) -> Measured | None:
        """The kept lengths, memory-mapped; None if there are none, or they cannot be read."""
        if not self.path.is_dir():
            return None
        try:
            lengths = SampleLengths.load(self.path)
            kept = load_json(self.path / PROBLEMS_FILE)
            items = np.array([entry.pop("item") for entry in kept], dtype=np.int64)
            return Measured(lengths, tuple(Problem(Path(entry.pop("file")), **entry) for entry in kept), items)
        except Exception as error:  # a file of ours that is damaged may hold anything
            logger.warning("Lengths are measured anew, because the kept ones cannot be read: %s", said(error))
            return None

    def save(self, measured: Measured) -> None:
        entries = [
            {"item": int(item), **asdict(problem)}
            for item, problem in zip(measured.broken_items, measured.problems, strict=True)
        ]
        with replaced_folder(self.path) as fresh:
            measured.lengths.save(fresh)
            (fresh / PROBLEMS_FILE).write_text(json.dumps(entries, indent=2, default=str) + "\n")


def survey(
    measure: Measure,
    items: Items,
    columns: int,
    *,
    processes: int | None = None,
    workers: int | None = None,
    decodes: bool = False,
    name: str = "lengths",
    is_shown: bool = True,
) -> Survey:
    """Measure items in their order, with a progress bar called ``name`` if ``is_shown``.

    ``measure`` gives each item of a chunk its loads or its problem, in ``workers`` forked processes (0: in this one);
    by default in up to ``processes`` of them, as many as are worth it: more where files are decoded.
    """
    worth = DECODED_WORTH_A_PROCESS if decodes else ITEMS_WORTH_A_PROCESS
    if workers is None:
        most = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        workers = min(most, len(items) // worth + 1)
        workers = workers if workers > 1 else 0
    chunks = np.array_split(items, max(1, -(-len(items) // min(CHUNK_ITEMS, -(-worth // 4)))))
    loads, usable = np.zeros((len(items), columns), dtype=np.int64), np.ones(len(items), dtype=np.bool_)
    problems, done = list[Problem](), 0
    with ExitStack() as stack:
        parts: Iterable[Found] = map(measure, chunks)
        if workers:
            # Forked, as PyTorch's DataLoader does on Linux: nothing is pickled and the caller needs no __main__ guard.
            # An executor, because a pool would wait for ever for a process that was killed. It forks before the bar
            # starts a thread: a lock that the thread holds would be held in the copies for ever.
            context = multiprocessing.get_context("fork")
            executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(measure,))
            stack.callback(executor.shutdown, cancel_futures=True)
            parts = executor.map(_measure_chunk, chunks)
        hidden = not is_shown or len(items) < worth
        bar = stack.enter_context(tqdm(total=len(items), desc=name, unit=" items", disable=hidden))
        for part in parts:
            for number, entry in enumerate(part, start=done):
                if isinstance(entry, Problem):
                    usable[number] = False
                    problems.append(entry)
                else:
                    loads[number] = entry
            done += len(part)
            bar.update(len(part))
    return Survey(loads, usable, tuple(problems))


def _begin(measure: Measure) -> None:
    global _measure  # noqa: PLW0603  (the only way to hand an executor's processes something once)
    _measure = measure
    if "torch" in sys.modules:  # as DataLoader's workers do: OpenMP's threads do not survive a fork
        sys.modules["torch"].set_num_threads(1)


def _measure_chunk(chunk: Items) -> Found:
    return _measure(chunk)


def settle_problems(problems: Sequence[Problem], num_items: int, broken: Broken) -> None:
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
