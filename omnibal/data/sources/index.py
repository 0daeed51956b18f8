"""Where the entries of an annotation file stand, kept on disk: found once, and memory-mapped by whoever opens it."""

import hashlib
import json
import logging
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from omnibal.data.sources.scan import Entries
from omnibal.data.stored import read_only

FORMAT: Final = 1
ENTRIES_FILE, RECORD_FILE = "entries.npy", "index.json"

logger = logging.getLogger(__name__)


class AnnotationIndex:
    """The index of one annotation file as it is now: a file of another size or time of change has another.

    Args:
        folder: Holds the indexes of many files; made where missing.
        path: The annotation file.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        state = path.stat()
        key = json.dumps([FORMAT, str(path.absolute()), state.st_size, state.st_mtime_ns])
        self.path = folder / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    def load(self) -> tuple[Entries, str] | None:
        """The entries, memory-mapped, and the digest of the file's content; None if they are not kept."""
        if not self.path.is_dir():
            return None
        try:
            content_hash = json.loads((self.path / RECORD_FILE).read_text())["content_hash"]
            starts, stops, lines = map(read_only, np.load(self.path / ENTRIES_FILE, mmap_mode="r"))
        except (OSError, ValueError, KeyError) as error:
            logger.warning("Annotations are indexed anew, because the kept index cannot be read: %s", error)
            return None
        return Entries(starts, stops, lines), content_hash

    def save(self, entries: Entries, content_hash: str) -> None:
        """Keep an index; what an interrupted run leaves is not taken for one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent, ignore_cleanup_errors=True) as scratch:
            fresh = Path(scratch) / "fresh"
            fresh.mkdir()
            kept = np.lib.format.open_memmap(fresh / ENTRIES_FILE, "w+", dtype=np.int64, shape=(3, len(entries.starts)))
            for row, column in zip(kept, entries, strict=True):  # in one array, it would all be copied first
                row[:] = column
            kept.flush()
            (fresh / RECORD_FILE).write_text(json.dumps({"content_hash": content_hash}) + "\n")
            try:
                if self.path.exists():
                    self.path.replace(Path(scratch) / "old")
                fresh.replace(self.path)
            except OSError as error:  # another process was faster
                logger.info("An index is kept by another process: %s", error)
