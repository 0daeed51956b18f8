"""Columns of lengths in a folder: replaced all at once, and opened by memory-mapping."""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from omnibal.errors import DataError, said
from omnibal.records import parse_json

SUMMARY_FILE: Final = "lengths.json"
FORMAT: Final = 1
REQUIRED_COLUMNS: Final = ("vision_units", "llm_tokens")

logger = logging.getLogger(__name__)


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


class ColumnsRecord(BaseModel):
    """What stands in the summary file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: int
    columns: list[str]
    content_hash: str
    summary: LengthSummary
    source_names: list[str] | None = None
    unit_name: str | None = None


def write_columns(
    folder: Path,
    columns: Mapping[str, npt.NDArray[Any]],
    content_hash: str,
    summary: LengthSummary,
    named: Mapping[str, str | Sequence[str] | None],
) -> None:
    """Write columns and their summary in place of what the folder held of them.

    All is written beside it first. Then files are renamed, the summary last: a folder without it is not complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "format": FORMAT,
        "columns": list(columns),
        "content_hash": content_hash,
        "summary": asdict(summary),
        **{name: value for name, value in named.items() if value is not None},
    }
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
        for name, column in columns.items():
            np.save(Path(scratch) / f"{name}.npy", column)
        (Path(scratch) / SUMMARY_FILE).write_text(json.dumps(record, indent=2) + "\n")
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        for file in (*(f"{name}.npy" for name in columns), SUMMARY_FILE):
            (Path(scratch) / file).replace(folder / file)


def open_columns(folder: Path, types: Mapping[str, npt.DTypeLike]) -> tuple[ColumnsRecord, dict[str, npt.NDArray[Any]]]:
    record = _read_record(folder / SUMMARY_FILE)
    if not set(REQUIRED_COLUMNS) <= set(record.columns) <= set(types):
        raise DataError(
            f"{folder / SUMMARY_FILE} must list columns of {tuple(types)}, the first two among them, "
            f"got {record.columns}"
        )
    columns = {name: _map_column(folder / f"{name}.npy", types[name]) for name in record.columns}
    for name, column in columns.items():
        if len(column) != record.summary.num_samples:
            raise DataError(
                f"{folder / name}.npy must hold {record.summary.num_samples} samples as {SUMMARY_FILE} says, "
                f"got {len(column)}"
            )
    return record, columns


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


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def _read_record(path: Path) -> ColumnsRecord:
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
        return ColumnsRecord.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"]))
        raise DataError(f"{path}: {key} must be as it was written, got: {wrong['msg']}; measure again") from error


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
