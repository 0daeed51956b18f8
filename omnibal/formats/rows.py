"""Rows of data files, read by number: of JSON and tar shards by an index of our own.

``datasets`` would read these, too, by a copy of the data in Arrow. For JSON that takes three times as long as to find
where lines begin, and time and memory in every process; for tar shards it copies every picture, and the first samples
of a shard must have the same members, where conversations have pictures or not (tools/start/RESULTS.md).
"""

import codecs
import gzip
import hashlib
import json
import logging
import re
import tarfile
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from os import SEEK_END
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from omnibal.data.lengths import read_only
from omnibal.errors import DataError, said, shortened
from omnibal.formats.chat import BESIDE, IMAGE_MARK, SOUND_MARK, VIDEO_MARK
from omnibal.records import parse_json

BLOCK_BYTES: Final = 1 << 20
HEAD_CHARACTERS: Final = 1 << 16
INDEX_FORMAT: Final = 2
ENTRIES_FILE, RECORD_FILE = "entries.npy", "index.json"
TARS: Final = (".tar", ".tar.gz", ".tgz")
# Kinds of a tar's members that are images, videos and sounds, be they of a kind that is read or refused.
MEMBERS: Final = {
    IMAGE_MARK: (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"),
        *("jp2", "j2k", "avif", "heic", "heif", "tga", "ico"),
    ),
    VIDEO_MARK: ("mp4", "m4v", "mkv", "webm", "mov", "avi", "mpg", "mpeg", "wmv", "flv", "ts", "3gp", "ogv"),
    SOUND_MARK: ("wav", "flac", "ogg", "oga", "opus", "mp3", "m4a", "aac", "aif", "aiff", "wma"),
}
# What file managers and archivers leave beside data, in lower case; hidden files (``._a.jpg``, ``.DS_Store``), too.
SYSTEM_FILES: Final = ("thumbs.db", "ehthumbs.db", "desktop.ini", "@longlink", "icon\r")
SYSTEM_FOLDERS: Final = ("__macosx", "paxheader", "@paxheader", "@eadir", "lost+found", "$recycle.bin")
TEXTS: Final = ("txt", "caption", "text")
NEWLINE: Final = ord("\n")

Record = Mapping[str, Any]
Offsets = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """An unusable row: its file, its line or number (from 1), the reason, and its name if it is no line."""

    file: Path
    line: int
    reason: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.file}, {self.name or f'line {self.line}'}: {self.reason}"


class Row(NamedTuple):
    """A row that is not read yet; ``read`` raises a ``ValueError`` with the reason where it is no record."""

    file: Path
    number: int
    read: Callable[[], Record]
    name: str = ""

    def problem(self, error: Exception) -> Problem:
        return Problem(self.file, self.number, shortened(said(error)), self.name)


class Rows(Protocol):
    """The rows of a file or folder, by their number from 0; ``content_hash`` changes with any of them."""

    path: Path
    content_hash: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row: ...


def is_system_file(name: str) -> bool:
    """Whether a file's or a member's name is one that systems give to files of their own: such a one is no data.

    >>> [is_system_file(name) for name in ("a/._0.jpg", "__MACOSX/0.jpg", "PaxHeaders.7/0.jpg", "./a.b/0.jpg")]
    [True, True, True, False]
    """
    parts = [part.lower() for part in name.split("/") if part not in ("", ".", "..")]
    folders = (part.startswith((".", "paxheaders")) or part in SYSTEM_FOLDERS for part in parts[:-1])
    return any(folders) or any(part.startswith(".") or part in SYSTEM_FILES for part in parts[-1:])


def is_tar(path: Path) -> bool:
    return path.name.endswith(TARS)


class Entries(NamedTuple):
    """Byte offsets of entries, [start, stop), and the lines, from 1, on which they begin (of tars: their numbers)."""

    starts: Offsets
    stops: Offsets
    lines: Offsets


class IndexedFile:
    """The rows of a JSON file or a tar shard; only their places are held, 24 bytes a row, memory-mapped if kept."""

    # A file whose first character is ``[`` is one JSON array, any other has one JSON object a line. Blank lines at the
    # end are not counted; a blank line elsewhere is a broken row. The members of a tar shard that have the same name up
    # to the first dot make a row. JSON is read once, in one to five seconds per gigabyte; of a shard only the members'
    # headers.

    def __init__(self, path: Path, index: Path | None = None) -> None:
        self.path = path
        self._kept: Path | None = None
        folder = None if index is None else _index_of(index, path)
        found = None if folder is None else _load_index(folder)
        self._entries, self.content_hash = found or (_scan_tar(path) if is_tar(path) else scan_json(path))
        if folder is not None and found is None and len(self):
            _save_index(folder, self._entries, self.content_hash)
            found = _load_index(folder)
        if found is not None:
            (self._entries, self.content_hash), self._kept = found, folder

    def __getstate__(self) -> dict[str, Any]:
        # Workers map the places anew from the index on disk: copies of them would take memory in each process.
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

    def __getitem__(self, index: int) -> Row:
        start, number = int(self._entries.starts[index]), int(self._entries.lines[index])
        if is_tar(self.path):
            samples = tar_samples(self.path, start)  # a name of its own keeps the file open
            _, name, held = next(samples)
            return Row(self.path, number, partial(assembled, held()), name)
        return Row(self.path, number, partial(self._parsed, start, int(self._entries.stops[index])))

    def _parsed(self, start: int, stop: int) -> Record:
        with self.path.open("rb") as file:
            file.seek(start)
            return parse_entry(file.read(stop - start))


class JoinedFiles:
    def __init__(self, path: Path, parts: Sequence[IndexedFile]) -> None:
        self.path, self._parts = path, parts
        self._ends = list(accumulate(map(len, parts)))
        hashes = "".join(part.content_hash for part in parts)
        self.content_hash = hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        return self._parts[number][index - (self._ends[number - 1] if number else 0)]


def parse_entry(text: bytes) -> Record:
    try:
        record = parse_json(text)
    except json.JSONDecodeError as error:
        found = f"{error.msg} at character {error.pos + 1}" if error.doc.strip() else "an empty line"
        raise DataError(f"entry must be JSON, got {found}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"entry must be UTF-8, got {error.object[error.start : error.end]!r}") from error
    except ValueError as error:
        raise DataError(f"entry must be readable JSON, got: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"entry must be a JSON object, got {type(record).__name__}")
    return record


def scan_json(path: Path) -> tuple[Entries, str]:
    digest, newlines, size, text_end = hashlib.blake2b(digest_size=16), list[Offsets](), 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            newlines.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == NEWLINE) + size)
            text_end = size + len(block.rstrip()) if block.strip() else text_end
            size += len(block)
    breaks = np.concatenate([np.zeros(0, dtype=np.int64), *newlines])
    with path.open("rb") as file:
        head = file.read(HEAD_CHARACTERS)
        if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            starts, stops = _array_entries(path)
            return Entries(starts, stops, np.searchsorted(breaks, starts) + 1), digest.hexdigest()
    stops = np.append(breaks, size)
    starts = np.append(0, breaks + 1)
    kept = int(np.searchsorted(starts, text_end))
    return Entries(starts[:kept], stops[:kept], np.arange(1, kept + 1)), digest.hexdigest()


def _array_entries(path: Path) -> tuple[Offsets, Offsets]:
    # Latin-1 has a character for each byte, and JSON's own marks are the same in it as in UTF-8.
    with path.open(encoding="latin-1", newline="") as file:
        text = file.read()
    decode, spaces, starts, stops = json.JSONDecoder().raw_decode, re.compile(r"\s*"), list[int](), list[int]()

    def mark_from(offset: int) -> int:
        return spaces.match(text, offset).end()  # type: ignore[union-attr]  # matches nothing at least

    try:
        offset = mark_from(text.index("[") + 1)
        while text[offset : offset + 1] != "]":
            starts.append(offset)
            stops.append(decode(text, offset)[1])
            offset = mark_from(stops[-1])
            if text[offset : offset + 1] != "]":
                if text[offset : offset + 1] != ",":
                    raise json.JSONDecodeError("Expecting ',' or ']'", text, offset)
                offset = mark_from(offset + 1)
        extra = mark_from(offset + 1)
        if extra < len(text):
            raise json.JSONDecodeError("The array has ended, and more follows", text, extra)
    except json.JSONDecodeError as error:
        raise DataError(f"annotation must be a JSON array, got {path}, line {error.lineno}: {error.msg}") from error
    except RecursionError:
        raise DataError(f"annotation must be a JSON array, got {path}: brackets nest too deeply") from None
    return np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)


def _scan_tar(path: Path) -> tuple[Entries, str]:
    if _is_packed(path):
        raise DataError(f"annotation must be an unpacked tar where samples are read by number, got {path}; unpack it")
    digest, stops, starts = hashlib.blake2b(digest_size=16), list[int](), list[int]()
    with _open_tar(path) as (_, members):
        for sample in _samples(path, members):
            starts.append(sample[0].offset)
            stops.append(_end(sample[-1]))
            for member in sample:
                digest.update(f"{member.name}:{member.size}:{member.mtime}:".encode(errors="surrogateescape"))
    return Entries(np.array(starts), np.array(stops), np.arange(1, len(starts) + 1)), digest.hexdigest()


def tar_samples(path: Path, begin: int = 0) -> Iterator[tuple[int, str, Callable[[], dict[str, bytes]]]]:
    """From a byte on, the samples of a tar: the byte behind each, its name, and what reads its members by their kinds.

    What reads them may be called until the next sample is asked for.
    """
    with _open_tar(path, begin) as (tar, members):
        for sample in _samples(path, members):
            yield _end(sample[-1]), _key_and_kind(sample[0])[0], partial(_contents, tar, sample)


def _samples(path: Path, members: Iterable[tarfile.TarInfo]) -> Iterator[list[tarfile.TarInfo]]:
    """The members of each sample, which stand side by side; refused if those of one sample stand in two places."""
    seen: dict[int, frozenset[str]] = {}  # kinds of the members of each name so far
    sets: dict[frozenset[str], frozenset[str]] = {}
    for key, found in groupby(members, key=lambda member: _key_and_kind(member)[0]):
        sample = list(found)
        kinds = frozenset(_key_and_kind(member)[1] for member in sample)
        before = seen.get(hash(key), kinds)
        if not before & kinds:
            raise DataError(
                f"members of a sample must stand side by side in a shard, got {key}.{min(before)} and "
                f"{key}.{min(kinds)} apart in {path}; `tar --sort=name` writes them so"
            )
        seen[hash(key)] = sets.setdefault(kinds, kinds)
        yield sample


@contextmanager
def _open_tar(path: Path, begin: int = 0) -> Iterator[tuple[tarfile.TarFile, Iterator[tarfile.TarInfo]]]:
    """A tar and the files in it, from a byte on at which one begins; it ends where it is cut off with an error."""
    try:
        with gzip.open(path) if _is_packed(path) else path.open("rb") as file:
            file.seek(begin)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                yield tar, _members(tar, file)
    except DataError:
        raise
    except Exception as error:  # decompressors of damaged bytes fail in many ways
        raise DataError(f"data must be shards that can be read, got {path}: {said(error)}") from error


def _members(tar: tarfile.TarFile, file: Any) -> Iterator[tarfile.TarInfo]:
    for member in iter(tar.next, None):
        tar.members.clear()  # type: ignore[attr-defined]  # or the list would grow with the tar
        if member.isfile() and not is_system_file(member.name):
            yield member
    if file.seek(0, SEEK_END) % tarfile.BLOCKSIZE:  # tarfile takes half a header for the end
        raise tarfile.ReadError("unexpected end of data")


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _contents(tar: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> dict[str, bytes]:
    return {_key_and_kind(member)[1]: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def _end(member: tarfile.TarInfo) -> int:
    # A member's content fills whole blocks.
    return member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _key_and_kind(member: tarfile.TarInfo) -> tuple[str, str]:
    """``folder/000.left.jpg`` is the member ``left.jpg`` of the sample ``folder/000``."""
    folder, slash, base = member.name.rpartition("/")
    stem, _, kind = base.partition(".")
    return folder + slash + stem, kind.lower()


def assembled(held: Mapping[str, bytes]) -> Record:
    """The record that a sample's members make, and the images, videos and sounds beside it."""
    texts = [content.decode() for kind, content in held.items() if kind in TEXTS]
    record = parse_entry(held["json"]) if "json" in held else {"response": "\n".join(texts)}
    beside = {
        mark: found
        for mark, kinds in MEMBERS.items()
        if (found := [{"bytes": content} for kind, content in held.items() if kind.rpartition(".")[2] in kinds])
    }
    return {**record, BESIDE: beside} if beside else record


def _index_of(folder: Path, file: Path) -> Path:
    """Where the index of a file as it is now is kept: one of another size or time of change has another."""
    state = file.stat()
    key = json.dumps([INDEX_FORMAT, str(file.absolute()), state.st_size, state.st_mtime_ns])
    return folder / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _load_index(path: Path) -> tuple[Entries, str] | None:
    """The entries, memory-mapped, and the digest of the file's content; None if they are not kept."""
    if not path.is_dir():
        return None
    try:
        content_hash = json.loads((path / RECORD_FILE).read_text())["content_hash"]
        starts, stops, lines = map(read_only, np.load(path / ENTRIES_FILE, mmap_mode="r"))
    except Exception as error:  # a file of ours that is damaged may hold anything
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


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``path`` at the end, when all is written.

    An interrupted run leaves what was there, and whoever has that open keeps it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        yield fresh
        try:
            if path.exists():
                path.replace(Path(scratch) / "old")
            fresh.replace(path)
        except OSError as error:
            logger.info("%s is kept by another process, which was faster: %s", path, error)
