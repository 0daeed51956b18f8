"""Annotation files, JSON lines or one JSON array, whose records are read one at a time by byte offset."""

import codecs
import hashlib
import json
import logging
from pathlib import Path
from typing import Any, Final

import numpy as np

from omnibal.data.stored import read_only, replaced_folder
from omnibal.errors import DataError, said
from omnibal.formats.scan import ArrayScanner, Entries, LineScanner
from omnibal.records import parse_json

BLOCK_BYTES: Final = 1 << 20
INDEX_FORMAT: Final = 1
TABLES: Final = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"SQLite": "SQLite"}
"""What files of tables begin with."""
AS_LINES: Final = "write its rows as JSON lines, its pictures as files that they name"
ENTRIES_FILE, RECORD_FILE = "entries.npy", "index.json"

logger = logging.getLogger(__name__)


class Records:
    """The entries of an annotation file as a sequence of dicts; only their places are held, 24 bytes an entry.

    Processes that are told the same ``index`` share these bytes, and only the first reads the file. Pickled, a sequence
    with an index takes a few hundred bytes.

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
        self._kept: Path | None = None
        try:
            table = table_format(self.path)
            if table is not None:
                raise DataError(f"annotation must be JSON lines or a JSON list, got {self.path} in {table}; {AS_LINES}")
            place = None if index is None else _index_of(index, self.path)
            found = None if place is None else _load_index(place)
            self._entries, self.content_hash = found or _scan(self.path)
        except OSError as error:
            raise DataError(f"annotation must be a readable file, got {self.path} ({error.strerror})") from error
        if not len(self):
            raise DataError(f"annotation must hold at least one entry, got none in {self.path}")
        if place is not None and found is None:
            _save_index(place, self._entries, self.content_hash)
            found = _load_index(place)
        if found is not None:
            (self._entries, self.content_hash), self._kept = found, place

    def __getstate__(self) -> dict[str, Any]:
        """Where the index is kept, the places stay there: they would be copied for every process that loads samples."""
        return {name: value for name, value in self.__dict__.items() if self._kept is None or name != "_entries"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._kept is not None:
            entries, content_hash = _load_index(self._kept) or (None, None)
            if entries is None or content_hash != self.content_hash:
                raise DataError(f"index of {self.path} must stay while samples are read, got none in {self._kept}")
            self._entries = entries

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
            return parse_entry(file.read(stop - start))

    def line(self, index: int) -> int:
        """The number of the line on which an entry begins, from 1."""
        return int(self._entries.lines[index])


def table_format(path: Path) -> str | None:
    """The format of a binary table, whose rows are no annotations as they are; None of any other file."""
    with path.open("rb") as file:
        start = file.read(max(map(len, TABLES)))
    return next((name for magic, name in TABLES.items() if start.startswith(magic)), None)


def parse_entry(text: bytes) -> dict[str, Any]:
    """An entry of an annotation file.

    Raises:
        ValueError: With the reason, if it is not a JSON object.
    """
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


def _index_of(folder: Path, file: Path) -> Path:
    """Where the index of a file as it is now is kept: one of another size or time of change has another."""
    state = file.stat()
    key = json.dumps([INDEX_FORMAT, str(file.absolute()), state.st_size, state.st_mtime_ns])
    return folder / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _load_index(path: Path) -> tuple[Entries, str] | None:
    """The entries, memory-mapped, and the digest of the annotation file's content; None if they are not kept."""
    if not path.is_dir():
        return None
    try:
        content_hash = json.loads((path / RECORD_FILE).read_text())["content_hash"]
        starts, stops, lines = map(read_only, np.load(path / ENTRIES_FILE, mmap_mode="r"))
    except Exception as error:  # as in ``omnibal.data.stored``
        logger.warning("Annotations are indexed anew, because the kept index cannot be read: %s", said(error))
        return None
    return Entries(starts, stops, lines), content_hash


def _save_index(path: Path, entries: Entries, content_hash: str) -> None:
    with replaced_folder(path) as fresh:
        kept = np.lib.format.open_memmap(fresh / ENTRIES_FILE, "w+", dtype=np.int64, shape=(3, len(entries.starts)))
        for row, column in zip(kept, entries, strict=True):  # in one array, it would all be copied first
            row[:] = column
        kept.flush()
        (fresh / RECORD_FILE).write_text(json.dumps({"content_hash": content_hash}) + "\n")
