"""Measured lengths kept on disk, memory-mapped when they are opened again."""

import hashlib
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnibal.data.lengths import SampleLengths
from omnibal.data.sources.problems import Problem
from omnibal.errors import DataError
from omnibal.records import load_json

FORMAT = 1
"""Changes with the rules by which lengths are measured."""

PROBLEMS_FILE = "problems.json"

logger = logging.getLogger(__name__)


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
        except (OSError, ValueError, DataError) as error:
            logger.warning("Lengths are measured anew, because the kept ones cannot be read: %s", error)
            return None
        problems = tuple(Problem(Path(entry["file"]), entry["line"], entry["reason"]) for entry in kept)
        return Measured(lengths, problems, np.array([entry["item"] for entry in kept], dtype=np.int64))

    def save(self, measured: Measured) -> None:
        """Keeps lengths in place of older ones; a run that is interrupted leaves nothing that is taken for them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent, ignore_cleanup_errors=True) as scratch:
            fresh, old = Path(scratch) / "fresh", Path(scratch) / "old"
            measured.lengths.save(fresh)
            entries = [
                {"item": int(item), "file": str(problem.file), "line": problem.line, "reason": problem.reason}
                for item, problem in zip(measured.broken_items, measured.problems, strict=True)
            ]
            (fresh / PROBLEMS_FILE).write_text(json.dumps(entries, indent=2) + "\n")
            try:
                if self.path.exists():
                    self.path.replace(old)
                fresh.replace(self.path)
            except OSError as error:  # another process of the run was faster
                logger.info("Lengths are kept by another process: %s", error)
