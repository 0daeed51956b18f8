"""SampleLengths: what each sample brings to each encoder and to the LLM, as columns that can be memory-mapped."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from omnibal.errors import DataError, said
from omnibal.records import Record, explain, load_json, parse_json

IntArray = npt.NDArray[np.integer[Any]]

# Fixed types: compiled loops then exist once, and 100 million samples take 8 bytes each for the two loads.
COLUMN_TYPES: Final = {
    "vision_units": np.int32,
    "llm_tokens": np.int32,
    "target_tokens": np.int32,
    "vision_squared": np.int64,
    "video_units": np.int32,
    "source": np.int32,
    "sound_units": np.int32,
}
FURTHER_ENCODERS: Final = ("sound_units",)
"""Columns of encoders beside the first one, whose column is ``vision_units``: the planner levels each of them apart."""
IMAGE, VIDEO, SOUND = 1, 2, 4  # bits of `SampleLengths.kinds`
MOST_COUNT: Final = 2**31 - 1


SUMMARY_FILE: Final = "lengths.json"
FORMAT: Final = 1


@dataclass(frozen=True)
class LengthSummary:
    """What planners ask of all samples at once; a saved copy is read back without touching the columns."""

    num_samples: int
    total_vision_units: int
    total_llm_tokens: int
    total_target_tokens: int | None
    max_vision_units: int
    max_llm_tokens: int
    total_sound_units: int | None = None
    max_sound_units: int | None = None


class _LengthsRecord(Record):
    format: int
    columns: list[str]
    content_hash: str
    summary: LengthSummary
    source_names: list[str] | None = None
    unit_name: str | None = None


class SampleLengths:
    """The loads of every sample of a dataset, one entry per sample (an item that is repeated has several).

    Columns are one-dimensional, read-only and of fixed types (int32; ``vision_squared`` int64). A given array of the
    right type is not copied: do not change it afterwards. Lengths that were loaded from a folder are pickled as its
    name, so that every process that gets them maps the same memory.

    Args:
        vision_units: What each sample brings to the ViT: tiles, or patches of a native-resolution ViT; where the model
            has another encoder alone, what the sample brings to that. At least 0.
        llm_tokens: Tokens each sample brings to the LLM, image tokens included. At least 0.
        target_tokens: Tokens of each sample that carry loss.
        vision_squared: Sum of patches² over each sample's images and over temporal slices of its videos: the attention
            cost of a native-resolution ViT.
        video_units: Those of each sample's vision units that videos bring; None where there is no video.
        source: Which dataset each sample comes from, as small integers.
        source_names: What the datasets are called, by these integers; by default "0", "1", ….
        sound_units: What each sample brings to an encoder of sound that the model has beside its ViT.
        unit_name: What ``vision_units`` count, such as ``"windows"``; by default patches where their squares are known.

    Raises:
        DataError: A column is not one-dimensional and integer, has another length, or holds an entry that is
            negative or too large for its type. Or sources lack names, or share one.

    >>> lengths = SampleLengths([1, 5, 0], [300, 1400, 40], source=[0, 0, 1])
    >>> len(lengths), lengths.summary.total_llm_tokens, lengths.take([1]).llm_tokens.tolist()
    (3, 1740, [1400])
    """

    vision_units: npt.NDArray[np.int32]
    llm_tokens: npt.NDArray[np.int32]
    target_tokens: npt.NDArray[np.int32] | None
    vision_squared: npt.NDArray[np.int64] | None
    video_units: npt.NDArray[np.int32] | None
    source: npt.NDArray[np.int32] | None
    sound_units: npt.NDArray[np.int32] | None

    def __init__(
        self,
        vision_units: npt.ArrayLike,
        llm_tokens: npt.ArrayLike,
        *,
        target_tokens: npt.ArrayLike | None = None,
        vision_squared: npt.ArrayLike | None = None,
        video_units: npt.ArrayLike | None = None,
        source: npt.ArrayLike | None = None,
        source_names: Sequence[str] | npt.NDArray[Any] | None = None,
        sound_units: npt.ArrayLike | None = None,
        unit_name: str | None = None,
    ) -> None:
        self._folder: Path | None = None
        given = {
            "vision_units": vision_units,
            "llm_tokens": llm_tokens,
            "target_tokens": target_tokens,
            "vision_squared": vision_squared,
            "video_units": video_units,
            "source": source,
            "sound_units": sound_units,
        }
        for name, values in given.items():
            setattr(self, name, None if values is None else _column(name, values))
        for name, column in self.columns().items():
            if len(column) != len(self):
                raise DataError(f"{name} must have one entry per sample ({len(self)}), got {len(column)}")
        self._unit_name = unit_name
        self._names = None if source_names is None else _checked_names(source_names, self.source)
        if self.video_units is not None and (self.video_units > self.vision_units).any():
            worst = int(np.argmax(self.video_units > self.vision_units))
            raise DataError(
                f"video_units must be part of vision_units, got {self.video_units[worst]} of "
                f"{self.vision_units[worst]} for sample {worst}"
            )

    def __len__(self) -> int:
        return len(self.vision_units)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a folder's name in place of its columns, which would be copied for every process."""
        if self._folder is None:
            return super().__reduce__()
        return _reopen, (self._folder, self.content_hash)

    def __repr__(self) -> str:
        return f"SampleLengths({len(self)} samples: {', '.join(self.columns())})"

    @property
    def vision_unit(self) -> str:
        """What ``vision_units`` count: by the given name, or ``"patches"`` where their squares are known."""
        return self._unit_name or ("vision units" if self.vision_squared is None else "patches")

    def further_units(self) -> dict[str, npt.NDArray[np.int32]]:
        """Return the columns of further encoders that are present, by name."""
        return {name: column for name in FURTHER_ENCODERS if (column := getattr(self, name)) is not None}

    def columns(self) -> dict[str, Any]:
        return {name: column for name in COLUMN_TYPES if (column := getattr(self, name)) is not None}

    @cached_property
    def kinds(self) -> npt.NDArray[np.int8]:
        """What each sample brings to encoders, as bits: 1 an image, 2 a video, 4 sound. A model runs one for each."""
        videos, sound = (
            np.zeros(len(self), dtype=np.int32) if units is None else units
            for units in (self.video_units, self.sound_units)
        )
        kinds = IMAGE * (self.vision_units > videos) + VIDEO * (videos > 0) + SOUND * (sound > 0)
        return np.asarray(kinds, dtype=np.int8)

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """What the sources are called, by their numbers."""
        if self._names is not None:
            return self._names
        return tuple(map(str, range(0 if self.source is None else int(self.source.max(initial=-1)) + 1)))

    @cached_property
    def summary(self) -> LengthSummary:
        """Totals and maxima: one pass over the columns, or none where they were saved."""
        return LengthSummary(
            num_samples=len(self),
            total_vision_units=int(self.vision_units.sum(dtype=np.int64)),
            total_llm_tokens=int(self.llm_tokens.sum(dtype=np.int64)),
            total_target_tokens=None if self.target_tokens is None else int(self.target_tokens.sum(dtype=np.int64)),
            max_vision_units=int(self.vision_units.max(initial=0)),
            max_llm_tokens=int(self.llm_tokens.max(initial=0)),
            total_sound_units=None if self.sound_units is None else int(self.sound_units.sum(dtype=np.int64)),
            max_sound_units=None if self.sound_units is None else int(self.sound_units.max(initial=0)),
        )

    @cached_property
    def content_hash(self) -> str:
        """A digest of all columns (hexadecimal): equal exactly where the lengths are equal; about 1 s per GB."""
        digest = hashlib.blake2b(digest_size=16)
        for name, column in self.columns().items():
            digest.update(f"{name}:{len(column)}:".encode())
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def take(self, samples: npt.ArrayLike) -> "SampleLengths":
        """Return the lengths of the given sample indices, in their order."""
        chosen = np.asarray(samples, dtype=np.int64)
        return SampleLengths(
            **{name: column[chosen] for name, column in self.columns().items()},
            source_names=None if self._names is None else np.array(self._names),
            unit_name=self._unit_name,
        )

    @classmethod
    def concatenate(
        cls, parts: Iterable["SampleLengths"], source_names: Sequence[str] | None = None
    ) -> "SampleLengths":
        """Lay several datasets one after another; ``source`` then numbers the parts 0, 1, ….

        Raises:
            DataError: The parts have different columns (``source`` aside), or there is none.
        """
        parts = list(parts)
        if not parts:
            raise DataError("parts must hold at least one SampleLengths, got none")
        names = [set(part.columns()) - {"source"} for part in parts]
        for number, (first, other) in enumerate(pairwise(names), start=1):
            if first != other:
                raise DataError(
                    f"part {number} must have the columns of the part before, got {sorted(other)} after {sorted(first)}"
                )
        joined = {name: np.concatenate([part.columns()[name] for part in parts]) for name in names[0]}
        source = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return cls(**joined, source=source, source_names=source_names, unit_name=parts[0]._unit_name)

    @classmethod
    def from_token_lengths(cls, paths: str | Path | Sequence[str | Path]) -> "SampleLengths":
        """Read JSON lists of ``{"vit_num": tiles, "token_num": tokens}``, as InternVL's packed training uses them.

        Args:
            paths: One file, or several: sources, which are called as the files are, with their folders where several
                have the same name.

        Raises:
            DataError: A file is not such a list; the message names the file and the entry.
        """
        files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        stems = [file.stem for file in files]
        names = stems if len(set(stems)) == len(stems) else [str(file) for file in files]
        return cls.concatenate((cls(*_read_token_lengths(file)) for file in files), names)

    def save(self, path: str | Path) -> None:
        """Write the columns as ``<path>/<column>.npy`` and their summary as ``<path>/lengths.json``.

        What was there is replaced at the end, when all is written: an interrupted write leaves it as it was (between
        the renamings, a folder that ``load`` refuses), and whoever has it open (also ``self``) keeps it.
        """
        folder, named = Path(path), {"source_names": self._names, "unit_name": self._unit_name}
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "format": FORMAT,
            "columns": list(self.columns()),
            "content_hash": self.content_hash,
            "summary": asdict(self.summary),
            **{name: value for name, value in named.items() if value is not None},
        }
        # All is written beside it first. Then files are renamed, the summary last: a folder without it is not complete.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
            for name, column in self.columns().items():
                np.save(Path(scratch) / f"{name}.npy", column)
            (Path(scratch) / SUMMARY_FILE).write_text(json.dumps(record, indent=2) + "\n")
            (folder / SUMMARY_FILE).unlink(missing_ok=True)
            for file in (*(f"{name}.npy" for name in self.columns()), SUMMARY_FILE):
                (Path(scratch) / file).replace(folder / file)

    @classmethod
    def load(cls, path: str | Path) -> "SampleLengths":
        """Open a folder that ``save`` wrote: columns are memory-mapped, so this takes the same time at any size.

        Raises:
            DataError: The folder is not a complete one of this format, or a column does not fit its summary.
        """
        folder = Path(path).absolute()
        record = _read_record(folder / SUMMARY_FILE)
        if not {"vision_units", "llm_tokens"} <= set(record.columns) <= set(COLUMN_TYPES):
            raise DataError(
                f"{folder / SUMMARY_FILE} must list columns of {tuple(COLUMN_TYPES)}, the first two among them, "
                f"got {record.columns}"
            )
        lengths = cls.__new__(cls)
        lengths._folder = folder
        for name, dtype in COLUMN_TYPES.items():
            column = _map_column(folder / f"{name}.npy", dtype) if name in record.columns else None
            if column is not None and len(column) != record.summary.num_samples:
                raise DataError(
                    f"{folder / name}.npy must hold {record.summary.num_samples} samples as {SUMMARY_FILE} says, "
                    f"got {len(column)}"
                )
            setattr(lengths, name, column)
        lengths._names = None if record.source_names is None else tuple(record.source_names)
        lengths._unit_name = record.unit_name
        lengths.summary = record.summary
        lengths.content_hash = record.content_hash
        return lengths


def _checked_names(names: Sequence[str] | npt.NDArray[Any], source: IntArray | None) -> tuple[str, ...]:
    count = 0 if source is None else int(source.max(initial=-1)) + 1
    if isinstance(names, str) or len(names) < count or len(set(names)) < len(names):
        raise DataError(f"source_names must be {count} different names, one for each source, got {names!r:.80}")
    return tuple(map(str, names))


def _reopen(folder: Path, content_hash: str) -> SampleLengths:
    lengths = SampleLengths.load(folder)
    if lengths.content_hash != content_hash:
        raise DataError(f"{folder} must hold the lengths that were pickled, got others; keep each in its own folder")
    return lengths


def _column(name: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"{name} must be one-dimensional, got {values!r:.80}") from error
    if array.ndim != 1:
        raise DataError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"{name} must hold integers, got {array.dtype}")
    dtype = np.dtype(COLUMN_TYPES[name])
    limit = 2 ** (8 * dtype.itemsize - 1) - 1
    if array.size and (array.min() < 0 or array.max() > limit):
        worst = int(np.argmax((array < 0) | (array > limit)))
        raise DataError(f"{name} must lie between 0 and {limit}, got {array[worst]} for sample {worst}")
    return read_only(np.ascontiguousarray(array, dtype=dtype))


def _read_token_lengths(path: Path) -> tuple[list[int], list[int]]:
    try:
        entries = load_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} must be a readable JSON file, got {error}") from error
    if not isinstance(entries, list):
        raise DataError(f"{path} must hold a JSON list, got {type(entries).__name__}")
    for number, entry in enumerate(entries):
        counts = [entry.get("vit_num"), entry.get("token_num")] if isinstance(entry, dict) else [None]
        if not all(type(count) is int and 0 <= count <= MOST_COUNT for count in counts):
            raise DataError(
                f"{path}, entry {number}: vit_num and token_num must be integers from 0 to {MOST_COUNT}, got {entry!r}"
            )
    return [entry["vit_num"] for entry in entries], [entry["token_num"] for entry in entries]


def _read_record(path: Path) -> _LengthsRecord:
    try:
        text = path.read_bytes()
        kept = parse_json(text)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path.parent} must be a folder of lengths, written completely by `omnibal lengths` or "
            f"SampleLengths.save, got {error}"
        ) from error
    found = kept.get("format") if isinstance(kept, dict) else kept
    if found != FORMAT:
        raise DataError(f"{path} must have format {FORMAT}, got {found!r:.80}; measure the lengths again")
    try:
        return _LengthsRecord.model_validate_json(text)
    except ValidationError as error:
        raise DataError(f"{path.parent}: {explain(_LengthsRecord, error, path.name)}; measure again") from error


def _map_column(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        column = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy parses headers as Python, which damaged ones make fail in many ways
        raise DataError(f"{path} must be a column that SampleLengths.save wrote, got {said(error)}") from error
    if not isinstance(column, np.ndarray):  # of a zip file
        raise DataError(f"{path} must be a column that SampleLengths.save wrote, got an archive")
    if column.ndim != 1 or column.dtype != dtype:
        raise DataError(
            f"{path} must be one-dimensional of {np.dtype(dtype)}, got {column.dtype} of shape {column.shape}"
        )
    return read_only(column)


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
