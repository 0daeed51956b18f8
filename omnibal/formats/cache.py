"""Lengths kept on disk: those that are measured, and blocks of those that are being measured."""

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.data.lengths import SampleLengths
from omnibal.data.stored import replaced_folder
from omnibal.errors import said
from omnibal.formats.survey import Measure, Measured, Problem, Survey, in_chunks, survey
from omnibal.records import load_json

FORMAT: Final = 1
"""Changes with the rules by which lengths are measured."""
PROBLEMS_FILE: Final = "problems.json"
BLOCK_ITEMS: Final = 1 << 17

logger = logging.getLogger(__name__)


class LengthsCache:
    """A folder with one folder for each dataset that was measured, and one for what is being measured.

    Args:
        folder: Made where missing.
        made_from: Everything that the lengths depend on, as JSON values.
    """

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
            problems = tuple(Problem(Path(entry["file"]), entry["line"], entry["reason"]) for entry in kept)
            return Measured(lengths, problems, np.array([entry["item"] for entry in kept], dtype=np.int64))
        except Exception as error:  # a file of ours that is damaged may hold anything
            logger.warning("Lengths are measured anew, because the kept ones cannot be read: %s", said(error))
            return None

    def save(self, measured: Measured) -> None:
        """Keeps lengths in place of older ones, and forgets the blocks."""
        entries = [
            {"item": int(item), "file": str(problem.file), "line": problem.line, "reason": problem.reason}
            for item, problem in zip(measured.broken_items, measured.problems, strict=True)
        ]
        with replaced_folder(self.path) as fresh:
            measured.lengths.save(fresh)
            (fresh / PROBLEMS_FILE).write_text(json.dumps(entries, indent=2) + "\n")
        shutil.rmtree(self.unfinished, ignore_errors=True)


def survey_in_blocks(
    measure: Measure,
    items: npt.NDArray[np.int64],
    columns: int,
    *,
    processes: int | None = None,
    folder: Path | None = None,
) -> Survey:
    """Measures items as `survey` does.

    Args:
        measure: As of `survey`.
        items: Numbers of the items, handed to ``measure`` a chunk at a time.
        columns: Loads of an item.
        processes: As of `survey`.
        folder: Keeps what was measured of several blocks until the lengths are saved; None for nothing. Blocks with
            problems are not kept: these may be mended before the next try.
    """
    blocks = np.array_split(items, max(1, -(-len(items) // BLOCK_ITEMS)))
    if len(blocks) == 1:
        folder = None
    parts = []
    for number, block in enumerate(blocks):
        part = None if folder is None else _kept(folder / f"{number}.npz", (len(block), columns))
        if part is None:
            name = "lengths" if len(blocks) == 1 else f"lengths, part {number + 1} of {len(blocks)}"
            part = survey(measure, in_chunks(block), columns, total=len(block), processes=processes, name=name)
            if folder is not None and not part.problems:
                _keep(folder / f"{number}.npz", part)
        parts.append(part)
    return Survey(
        np.concatenate([part.loads for part in parts]),
        np.concatenate([part.usable for part in parts]),
        tuple(problem for part in parts for problem in part.problems),
    )


def _keep(path: Path, part: Survey) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            np.savez(fresh, loads=part.loads)
            fresh.replace(path)
    except OSError as error:  # another process of the run was faster and has removed the folder
        logger.info("A part of the lengths is not kept: %s", error)


def _kept(path: Path, shape: tuple[int, int]) -> Survey | None:
    """A block without problems; None if it was not kept or cannot be read."""
    if not path.is_file():
        return None
    try:
        loads = np.load(path)["loads"]
    except Exception as error:  # as in ``omnibal.data.stored``
        logger.warning("A part of the lengths is measured anew, because it cannot be read: %s", said(error))
        return None
    return Survey(loads, np.ones(len(loads), dtype=np.bool_), ()) if loads.shape == shape else None
