"""One pass over all items of a dataset by several processes, and a folder that keeps the lengths that it finds."""

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from omnibal.data.lengths import SampleLengths
from omnibal.data.stored import replaced_folder
from omnibal.errors import DataError, said
from omnibal.formats.files import Problem
from omnibal.records import load_json

FORMAT: Final = 2
"""Changes with the rules by which lengths are measured."""
PROBLEMS_FILE: Final = "problems.json"
BLOCK_ITEMS: Final = 1 << 17
CHUNK_ITEMS: Final = 256
ITEMS_WORTH_A_PROCESS: Final = 4096
"""Starting a process costs about as much as measuring this many items."""
DECODED_WORTH_A_PROCESS: Final = 64
"""Of items whose files are decoded."""
MOST_PROCESSES: Final = 32
"""More would wait for the file system, and take as many copies of a tokenizer's caches."""
SHOWN: Final = 10

Broken = Literal["error", "skip"]
Loads = tuple[int, ...]
Found = list[Loads | Problem]
Items = npt.NDArray[np.int64]
Measure = Callable[[Items], Found]

_measure: Measure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """What was found of each item: its loads, or the problem that makes it unusable."""

    loads: npt.NDArray[np.int64]  # (items, columns), zeros where there is a problem
    usable: npt.NDArray[np.bool_]  # (items,) whether an item has no problem
    problems: tuple[Problem, ...]  # in the order of the items


@dataclass(frozen=True)
class Measured:
    """All that a pass over a dataset finds."""

    lengths: SampleLengths  # of the usable samples
    problems: tuple[Problem, ...]
    broken_items: npt.NDArray[np.int64]  # (problems,) the item of each problem, ascending


class LengthsCache:
    """A folder with one folder for each dataset that was measured, and one for what is being measured."""

    def __init__(self, folder: Path, made_from: Any) -> None:
        key = hashlib.blake2b(json.dumps([FORMAT, made_from], default=str).encode(), digest_size=16).hexdigest()
        self.path = folder / key
        self.unfinished = folder / f"{key}.unfinished"

    def load(self) -> Measured | None:
        """What was kept, its columns memory-mapped; None if nothing was, or it cannot be read."""
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
        """Keep lengths in place of older ones, and forget the blocks."""
        entries = [
            {"item": int(item), **asdict(problem)}
            for item, problem in zip(measured.broken_items, measured.problems, strict=True)
        ]
        with replaced_folder(self.path) as fresh:
            measured.lengths.save(fresh)
            (fresh / PROBLEMS_FILE).write_text(json.dumps(entries, indent=2, default=str) + "\n")
        shutil.rmtree(self.unfinished, ignore_errors=True)


class DecodedFiles:
    """Files that were decoded without a fault, by the states (`state_of`) of the items that hold them."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.states: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        try:
            if path is not None and path.is_file():
                self.states = np.load(path)
        except Exception as error:  # a file of ours that is damaged may hold anything
            logger.warning("Files are decoded anew, because %s cannot be read: %s", path, said(error))

    def __contains__(self, state: int) -> bool:
        place = int(np.searchsorted(self.states, state))
        return place < len(self.states) and int(self.states[place]) == state

    def add(self, states: npt.NDArray[np.int64]) -> None:
        """Note and keep the states of items that were decoded."""
        self.states = np.union1d(self.states, states)
        if self._path is not None:
            _save_array(self._path, self.states)


def state_of(files: Iterable[Path | bytes]) -> int:
    """A number that changes with paths, sizes and times of change of files, and with contents within the data."""
    digest = hashlib.blake2b(digest_size=7)
    for file in files:
        if isinstance(file, bytes):
            digest.update(file)
        else:
            state = file.stat()
            digest.update(f"{file}:{state.st_size}:{state.st_mtime_ns};".encode(errors="surrogateescape"))
    return int.from_bytes(digest.digest())


def survey(
    measure: Measure,
    items: Items,
    columns: int,
    *,
    processes: int | None = None,
    folder: Path | None = None,
    decodes: bool = False,
) -> Survey:
    """Measure items block by block, in their order, with a progress bar.

    ``measure`` gives each item of a chunk its loads or its problem, in forked processes where that is worth it: earlier
    where it ``decodes`` files.
    """
    worth = DECODED_WORTH_A_PROCESS if decodes else ITEMS_WORTH_A_PROCESS
    kind = "decoding" if decodes else "lengths"
    # A block is measured chunk by chunk and kept as a whole in ``folder`` until the lengths are saved: an interrupted
    # pass goes on with its first missing block. A block with problems is not kept: users may mend them before the next
    # try.
    blocks = np.array_split(items, max(1, -(-len(items) // BLOCK_ITEMS)))
    most = processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    nothing, loads, problems = (0,) * columns, list[npt.NDArray[np.int64]](), list[Problem]()
    usable = np.ones(len(items), dtype=np.bool_)
    for number, block in enumerate(blocks):
        file = None if folder is None or len(blocks) == 1 else folder / f"{number}.npy"
        kept = None if file is None else _kept(file, (len(block), columns))
        if kept is None:
            name = kind if len(blocks) == 1 else f"{kind}, part {number + 1} of {len(blocks)}"
            found = _measured(measure, block, min(most, len(block) // worth + 1), name, worth)
            broken = [entry for entry in found if isinstance(entry, Problem)]
            kept = np.array([nothing if isinstance(entry, Problem) else entry for entry in found], dtype=np.int64)
            kept = kept.reshape(-1, columns)
            first = sum(map(len, loads))
            usable[first : first + len(block)] = [not isinstance(entry, Problem) for entry in found]
            problems += broken
            if file is not None and not broken:
                _save_array(file, kept)
        loads.append(kept)
    return Survey(np.concatenate(loads), usable, tuple(problems))


def _measured(measure: Measure, items: Items, workers: int, name: str, worth: int) -> Found:
    found: Found = []
    chunks = np.array_split(items, max(1, -(-len(items) // min(CHUNK_ITEMS, -(-worth // 4)))))
    with tqdm(total=len(items), desc=name, unit=" items", disable=len(items) < worth) as bar:
        for part in _run(measure, chunks, workers):
            found += part
            bar.update(len(part))
    return found


def _run(measure: Measure, chunks: Sequence[Items], workers: int) -> Iterator[Found]:
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


def _measure_chunk(chunk: Items) -> Found:
    return _measure(chunk)


def _save_array(path: Path, array: npt.NDArray[np.int64]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            np.save(fresh, array)
            fresh.replace(path)
    except OSError as error:  # another process of the run was faster and has removed the folder
        logger.info("A part of the lengths is not kept: %s", error)


def _kept(path: Path, shape: tuple[int, int]) -> npt.NDArray[np.int64] | None:
    """The loads of a block without problems; None if they were not kept or cannot be read."""
    if not path.is_file():
        return None
    try:
        loads: npt.NDArray[np.int64] = np.load(path)
    except Exception as error:  # a file of ours that is damaged may hold anything
        logger.warning("A part of the lengths is measured anew, because it cannot be read: %s", said(error))
        return None
    return loads if loads.shape == shape else None


def settle_problems(problems: Sequence[Problem], num_items: int, broken: Broken) -> None:
    """Refuse unusable items, or warn that they are left out."""
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
