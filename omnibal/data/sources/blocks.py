"""A long pass over a dataset, block by block: one that was interrupted goes on with the block it was in."""

import logging
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from omnibal.data.sources.survey import Measure, Survey, in_chunks, survey

BLOCK_ITEMS: Final = 1 << 17

logger = logging.getLogger(__name__)


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
        folder: Keeps what was measured of several blocks until ``forget_blocks``; None for nothing. Blocks with
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


def forget_blocks(folder: Path) -> None:
    """Removes what was kept."""
    shutil.rmtree(folder, ignore_errors=True)


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
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        logger.warning("A part of the lengths is measured anew, because it cannot be read: %s", error)
        return None
    return Survey(loads, np.ones(len(loads), dtype=np.bool_), ()) if loads.shape == shape else None
