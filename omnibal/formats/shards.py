"""Annotation files as people name them, and which item of which of them a sample is.

InternVL's own trainer takes a meta file that names annotation files (https://internvl.readthedocs.io, "Chat Data
Format"):

    {"shapes": {"root": "images/", "annotation": "train.jsonl", "repeat_time": 1, "length": 1000}, …}

LLaVA's takes an annotation file, a JSON array or JSON lines, and a folder of images. ``repeat_time`` may be any
positive number: 0.5 takes the first half of the file and 2.5 the file twice and its first half once more, as InternVL
does for fractions below one and for whole numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from omnibal.errors import ConfigError, DataError
from omnibal.formats.chat import Conversation, read_conversation
from omnibal.formats.files import TableRows, is_table, open_rows
from omnibal.formats.rows import Rows, is_tar
from omnibal.records import load_json, once

KEYS: Final = ("root", "annotation", "repeat_time", "length", "max_dynamic_patch", "data_augment")
MOST_REPEATED: Final = 10_000

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AnnotationFile:
    """An annotation file or folder as the user or a meta file names it, unread."""

    name: str
    path: Path
    root: Path  # folder of the images
    max_tiles: int | None = None  # most tiles of an image, where the meta file states it
    repeat: float = 1
    length: Any = None  # rows, as the meta file states them
    meta: Path | None = None

    def refused(self, key: str, rule: str, got: object) -> DataError:
        return DataError(f"{self.meta}: {self.name}.{key} must {rule}, got {got}")


@dataclass(frozen=True)
class Shard:
    """The rows of one annotation file, and how many samples are drawn of them: in order, then again from the first."""

    name: str
    rows: Rows
    root: Path
    num_samples: int
    max_tiles: int | None = None
    repeated: int | None = None  # samples that ``repeat_time`` asks for, where ``num_samples`` is another number

    def conversation(self, number: int) -> Conversation:
        """The conversation of a row; a ``DataError`` that names file and line where the row holds none."""
        row = self.rows[number]
        try:
            return read_conversation(row.read(), self.root)
        except ValueError as error:
            raise DataError(str(row.problem(error))) from error


class Shards:
    """Annotation files one after another; items are numbered through, and so are samples."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.parts = tuple(shards)
        self._sizes = np.array([len(shard.rows) for shard in shards], dtype=np.int64)
        self._drawn = np.array([shard.num_samples for shard in shards], dtype=np.int64)
        self._first_items: Ids = np.cumsum(self._sizes) - self._sizes
        self._first_samples: Ids = np.cumsum(self._drawn) - self._drawn
        self.num_samples = int(self._drawn.sum())

    @property
    def num_used_items(self) -> int:
        return int(np.minimum(self._sizes, self._drawn).sum())

    def used_items(self) -> Ids:
        used = np.minimum(self._sizes, self._drawn)
        first_of_used = np.cumsum(used) - used
        return np.repeat(self._first_items - first_of_used, used) + np.arange(used.sum())

    def samples_of(self, items: Ids) -> Ids:
        """All samples that repeat some items, ascending; takes memory for these samples only."""
        # Item i of a shard of n items and m samples is repeated ceil((m - i) / n) times, n samples apart.
        shard = np.searchsorted(self._first_items, items, side="right") - 1
        places, sizes = items - self._first_items[shard], self._sizes[shard]
        times = np.maximum(-(-(self._drawn[shard] - places) // sizes), 0)
        repetition = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        first = np.repeat(self._first_samples[shard] + places, times)
        return np.sort(first + repetition * np.repeat(sizes, times))

    def item_of(self, samples: Ids) -> Ids:
        """The item that each sample repeats, of the shape of ``samples``."""
        shard = self.source_of(samples)
        places: Ids = np.mod(samples - self._first_samples[shard], self._sizes[shard])
        return self._first_items[shard] + places

    def source_of(self, samples: Ids) -> Ids:
        return np.asarray(np.searchsorted(self._first_samples, samples, side="right") - 1, dtype=np.int64)

    def locate(self, item: int) -> tuple[Shard, int]:
        """The shard of an item, and its place in there."""
        number = int(np.searchsorted(self._first_items, item, side="right")) - 1
        return self.parts[number], item - int(self._first_items[number])


def among_all(usable: Ids, left_out: Ids) -> Ids:
    """From numbers that count usable samples to those that count all; ``left_out`` is ascending."""
    usable_before = left_out - np.arange(len(left_out))
    return usable + np.searchsorted(usable_before, usable, side="right")


def names_of(shards: Sequence[Shard | AnnotationFile]) -> tuple[str, ...]:
    """What the shards are called as sources: their names, or their numbers where several have the same name."""
    names = tuple(shard.name for shard in shards)
    return names if len(set(names)) == len(names) else tuple(map(str, range(len(names))))


def open_shards(paths: Any, *, image_folder: str | Path | None = None, index: Path | None = None) -> list[Shard]:
    """The annotation files that a user names: InternVL meta files, what ``open_rows`` opens, or a ``Dataset``."""
    if hasattr(paths, "features"):
        rows = TableRows(Path("dataset"), paths)
        return [Shard("dataset", rows, Path(image_folder or ""), len(rows))]
    return [_opened(file, index) for file in named_files(paths, image_folder)]


def named_files(
    paths: str | Path | Sequence[str | Path], image_folder: str | Path | None = None
) -> list[AnnotationFile]:
    """The annotation files that ``open_shards`` would open, unread; arguments and errors are those of it."""
    files: list[AnnotationFile] = []
    for path in [Path(paths)] if isinstance(paths, str | Path) else map(Path, paths):
        if not _is_meta(path):
            beside = path if path.is_dir() else path.parent
            files.append(AnnotationFile(path.stem, path, beside if image_folder is None else Path(image_folder)))
        elif image_folder is None:
            files += _read_meta(path)
        else:
            raise ConfigError(f"image_folder must be left out for a meta file, which names its own, got {image_folder}")
    return files


def _opened(file: AnnotationFile, index: Path | None) -> Shard:
    rows = open_rows(file.path, index)
    if file.length not in (None, len(rows)):
        raise file.refused("length", f"be the {len(rows)} entries of {rows.path}", repr(file.length))
    num_samples = int(len(rows) * file.repeat)
    if not num_samples:
        raise file.refused("repeat_time", f"draw at least one of {len(rows)} items", repr(file.repeat))
    return Shard(file.name, rows, file.root, num_samples, file.max_tiles)


def _is_meta(path: Path) -> bool:
    try:
        if path.is_dir() or is_tar(path) or is_table(path):
            return False
        with path.open(encoding="utf-8-sig") as file:
            return path.suffix == ".json" and file.read(1024).lstrip().startswith("{")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"dataset must be a readable text file, got {path} ({error})") from error


def _read_meta(meta: Path) -> list[AnnotationFile]:
    try:
        datasets = load_json(meta, object_pairs_hook=once)
    except (OSError, ValueError) as error:
        raise DataError(f"meta must be a readable JSON file, got {meta} ({error})") from error
    if not datasets:
        raise DataError(f"meta must be an object of datasets, got {datasets!r:.80} in {meta}")
    return [_read_entry(meta, name, entry) for name, entry in datasets.items()]


def _read_entry(meta: Path, name: str, entry: Any) -> AnnotationFile:
    def refuse(key: str, rule: str, got: object) -> DataError:
        return AnnotationFile(name, meta, meta, meta=meta).refused(key, rule, got)

    if not isinstance(entry, Mapping):
        raise DataError(f"{meta}: {name} must be an object, got {entry!r:.80}")
    for key in entry:
        known = get_close_matches(key, KEYS, 1, cutoff=0.8)
        if known and key not in KEYS:
            raise refuse(key, f"be spelt {known[0]}", repr(key))
    for key in ("root", "annotation"):
        if not isinstance(entry.get(key), str) or "\0" in entry[key]:
            raise refuse(key, "be a path", repr(entry.get(key, "nothing")))
    repeat = entry.get("repeat_time", 1)
    if isinstance(repeat, bool) or not isinstance(repeat, int | float) or not 0 < repeat <= MOST_REPEATED:
        raise refuse("repeat_time", f"be a number above 0 and at most {MOST_REPEATED}", repr(repeat))
    max_tiles = entry.get("max_dynamic_patch")
    if max_tiles is not None and (type(max_tiles) is not int or max_tiles < 1):
        raise refuse("max_dynamic_patch", "be an integer of at least 1", repr(max_tiles))
    if entry.get("data_augment"):
        raise refuse("data_augment", "be false: images are not augmented", "true")
    annotation, root = _resolve(meta, entry["annotation"]), _resolve(meta, entry["root"])
    return AnnotationFile(name, annotation, root, max_tiles, repeat, entry.get("length"), meta)


def _resolve(meta: Path, path: str) -> Path:
    beside = meta.parent / path
    try:
        return Path(path) if Path(path).exists() and not beside.exists() else beside
    except OSError:  # a name that is too long, say: whoever opens the file tells
        return beside
