"""Annotation files, JSON lines or one JSON array, whose records are read one at a time by byte offset."""

import codecs
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.data.sources.index import AnnotationIndex
from omnibal.data.sources.scan import ArrayScanner, Entries, LineScanner
from omnibal.errors import DataError
from omnibal.records import parse_json

BLOCK_BYTES = 1 << 20


class Records:
    """The entries of an annotation file as a sequence of dicts; only their places are held, 24 bytes an entry.

    Processes that are told the same ``index`` share these bytes, and only the first reads the file.

    A file whose first character is ``[`` is one JSON array, any other has one JSON object a line. Blank lines at its
    end are not counted; a blank line elsewhere is a broken entry.

    Args:
        path: The file. It is read once, in two to four seconds per gigabyte.
        index: Folder that keeps the places for as long as the file stays as it is, None for none.

    Attributes:
        path: The file.
        content_hash: A digest of its content (hexadecimal).

    Raises:
        DataError: If the file cannot be read, holds no entry, or is an array that does not end or that more follows.
    """

    def __init__(self, path: str | Path, index: Path | None = None) -> None:
        self.path = Path(path)
        try:
            kept = None if index is None else AnnotationIndex(index, self.path)
            found = kept.load() if kept else None
            self._entries, self.content_hash = found or _scan(self.path)
        except OSError as error:
            raise DataError(f"annotation must be a readable file, got {self.path} ({error.strerror})") from error
        if not len(self):
            raise DataError(f"annotation must hold at least one entry, got none in {self.path}")
        if kept and not found:
            kept.save(self._entries, self.content_hash)
            self._entries, self.content_hash = kept.load() or (self._entries, self.content_hash)

    def __len__(self) -> int:
        return len(self._entries.starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Parse one entry.

        Raises:
            ValueError: With the reason, if it is not a JSON object.
        """
        start, stop = self._entries.starts[index], self._entries.stops[index]
        with self.path.open("rb") as file:
            file.seek(start)
            text = file.read(stop - start)
        try:
            record = parse_json(text)
        except json.JSONDecodeError as error:
            found = f"{error.msg} at character {error.pos + 1}" if error.doc.strip() else "an empty line"
            raise ValueError(f"entry must be JSON, got {found}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"entry must be UTF-8, got {error.object[error.start : error.end]!r}") from error
        except ValueError as error:
            raise ValueError(f"entry must be readable JSON, got: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"entry must be a JSON object, got {type(record).__name__}")
        return record

    def line(self, index: int) -> int:
        """The number of the line on which an entry begins, from 1."""
        return int(self._entries.lines[index])


def _scan(path: Path) -> tuple[Entries, str]:
    digest = hashlib.blake2b(digest_size=16)
    scanner: ArrayScanner | LineScanner | None = None
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            if scanner is None:
                start = block.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
                scanner = ArrayScanner() if start == b"[" else LineScanner()
            scanner.feed(np.frombuffer(block, dtype=np.uint8))
    try:
        entries = LineScanner().finish() if scanner is None else scanner.finish()
    except ValueError as error:
        raise DataError(f"annotation must be a whole JSON array, got {path}: {error}") from error
    return entries, digest.hexdigest()
