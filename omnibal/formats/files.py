"""Which files hold data, and their rows: by number, or as a stream; Parquet and Arrow by Hugging Face ``datasets``."""

import json
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from omnibal.errors import DataError, missing_extra, said
from omnibal.formats.chat import ANSWER_KEYS, TURN_KEYS
from omnibal.formats.rows import (
    HEAD_CHARACTERS,
    TARS,
    IndexedFile,
    JoinedFiles,
    Record,
    Row,
    Rows,
    assembled,
    is_system_file,
    is_tar,
    parse_entry,
    tar_samples,
)

# One of these lies where ``datasets`` saved something.
SAVED: Final = ("dataset_dict.json", "dataset_info.json", "state.json")
KINDS: Final = "JSON lines, a JSON list, a tar shard, Parquet, or a folder that datasets saved"


def open_rows(path: Path, index: Path | None = None) -> Rows:
    """Open one of `KINDS`, or a folder of Parquet files, tar shards or JSON lines.

    ``index`` is a folder that keeps where the rows of JSON and tar files begin, for as long as the files stay as they
    are: processes share these bytes, and only the first one reads the file.
    """
    try:
        files = files_of(path)
        if is_table(files[0]):
            rows: Rows = TableRows(path, files)
        else:
            parts = [IndexedFile(file, index) for file in files]
            rows = JoinedFiles(path, parts) if path.is_dir() else parts[0]
    except OSError as error:
        raise DataError(f"annotation must be a readable file, got {path} ({error.strerror})") from error
    if not len(rows):
        raise DataError(f"annotation must hold at least one entry, got none in {path}")
    return rows


def files_of(path: Path) -> list[Path]:
    """The data files of a folder, which are of one kind; of a file or a folder that ``datasets`` saved, itself."""
    if not path.is_dir() or any((path / name).is_file() for name in SAVED):
        return [path]
    kinds = ((".parquet",), (".arrow",), TARS, (".jsonl",))
    held_files = [file for file in path.iterdir() if not is_system_file(file.name)]
    found = [sorted(file for file in held_files if file.name.endswith(kind)) for kind in kinds]
    if sum(map(bool, found)) != 1:
        held = ", ".join(files[0].name for files in found if files) or "none"
        raise DataError(
            f"data must be {KINDS}, or a folder of such files of one kind, got the folder {path} with {held}"
        )
    return next(filter(None, found))


def is_table(path: Path) -> bool:
    if path.is_dir() or path.suffix == ".arrow":
        return True
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith((b"SQLite", b"ARROW1")):
        raise DataError(f"annotation must be {KINDS}, got {path} in {start[:6].decode()}; write its rows as JSON lines")
    return start.startswith(b"PAR1")


def is_dataset(path: Path) -> bool:
    """Whether a file or folder holds rows, by its name and its first characters."""
    if path.is_dir():
        return any((path / name).is_file() for name in SAVED) or any(
            file.name.endswith((".parquet", ".jsonl", *TARS)) and not is_system_file(file.name)
            for file in path.iterdir()
        )
    if is_tar(path) or is_table(path):
        return True
    with path.open(encoding="utf-8-sig", errors="replace") as text:
        start = text.read(HEAD_CHARACTERS).lstrip()
    start = start[1:].lstrip() if start.startswith("[") else start.partition("\n")[0]
    try:
        first, _ = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):  # longer than what was read, or an object that goes on on the next line
        return '"conversations"' in start or '"messages"' in start
    return isinstance(first, dict) and any(key in first for key in (*TURN_KEYS, *ANSWER_KEYS))


# Tables ------------------------------------------------------------------------------------------------------------


class TableRows:
    """The rows of a table of ``datasets``, memory-mapped; pictures stay as they are, undecoded."""

    def __init__(self, path: Path, source: Any) -> None:
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise missing_extra("datasets") from error
        verbosity = datasets.logging.get_verbosity()
        try:
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what fails is said below, with the file
            table = _load_table(datasets, path, source) if isinstance(source, list) else source
        except DataError:
            raise
        except Exception as error:  # damaged files fail in any way
            raise DataError(f"data must be a table that datasets can load, got {path}: {said(error)}") from error
        finally:
            datasets.logging.set_verbosity(verbosity)
        self.path, self.content_hash = path, str(table._fingerprint)
        # Rows are taken as Arrow has them: to cast the pictures' columns would copy all of the data.
        self._features = datasets.Features({name: _undecoded(kind) for name, kind in table.features.items()})
        self._table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]  # refuses what is no row's number, which ends loops over rows
        return Row(self.path, index + 1, partial(self._read, index), f"row {index + 1}")

    def _read(self, index: int) -> Record:
        row: Record = self._features.decode_example(self._table[index].to_pylist()[0])
        return row


def _load_table(datasets: Any, path: Path, files: Sequence[Path]) -> Any:
    if files[0].is_file() and files[0].suffix != ".arrow":
        return datasets.Dataset.from_parquet([str(file) for file in files])
    if files[0].suffix == ".arrow":
        return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in files])
    table = datasets.load_from_disk(str(path))
    if not isinstance(table, datasets.DatasetDict):
        return table
    if len(table) > 1 and "train" not in table:
        raise DataError(f"data must have a split 'train', got {', '.join(table)} in {path}; name the folder of one")
    return table["train"] if "train" in table else next(iter(table.values()))


def _undecoded(feature: Any) -> Any:
    """A column's kind whose pictures, sounds and videos stay bytes."""
    if isinstance(feature, dict):
        return {name: _undecoded(kind) for name, kind in feature.items()}
    kept = copy(feature)
    if hasattr(feature, "feature"):
        kept.feature = _undecoded(feature.feature)
    elif hasattr(feature, "decode") and type(feature).__name__ != "Json":
        kept.decode = False
    return kept


# Streams -----------------------------------------------------------------------------------------------------------


class RowPosition(NamedTuple):
    """Where a stream goes on: rows of the file before it, the byte in the file, and the number of the file."""

    lines: int = 0
    offset: int = 0
    file: int = 0


def stream_rows(path: Path, begin: RowPosition = RowPosition()) -> Iterator[tuple[RowPosition, Row]]:  # noqa: B008  (immutable)
    """The rows of a file or folder in their order, each with the position behind it; nothing is read beforehand.

    A row may be read until the next one is asked for.
    """
    files = files_of(path)
    for number in range(begin.file, len(files)):
        read = _stream_tar if is_tar(files[number]) else _stream_table if is_table(files[number]) else _stream_lines
        for lines, offset, row in read(files[number], begin if number == begin.file else RowPosition()):
            yield RowPosition(lines, offset, number), row


def _stream_lines(path: Path, begin: RowPosition) -> Iterator[tuple[int, int, Row]]:
    with path.open("rb") as file:
        file.seek(begin.offset)
        for number, line in enumerate(file, start=begin.lines + 1):
            if line.strip():
                yield number, file.tell(), Row(path, number, partial(parse_entry, line))


def _stream_tar(path: Path, begin: RowPosition) -> Iterator[tuple[int, int, Row]]:
    for number, (end, name, held) in enumerate(tar_samples(path, begin.offset), start=begin.lines + 1):
        yield number, end, Row(path, number, lambda held=held: assembled(held()), name)  # type: ignore[misc]


def _stream_table(path: Path, begin: RowPosition) -> Iterator[tuple[int, int, Row]]:
    """Rows of a Parquet file a group at a time, so that nothing is copied to Arrow first; of others, by number."""
    if path.is_dir() or path.suffix == ".arrow":
        table = TableRows(path, [path])
        for number in range(begin.lines, len(table)):
            yield number + 1, 0, table[number]
        return
    try:
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise missing_extra("datasets") from error
    number = 0
    try:
        file = ParquetFile(path)
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number + rows > begin.lines:
                for line, row in enumerate(file.read_row_group(group).to_pylist(), start=number + 1):
                    if line > begin.lines:
                        yield line, 0, Row(path, line, partial(dict, row), f"row {line}")
            number += rows
    except Exception as error:  # damaged files fail in any way
        raise DataError(f"data must be Parquet that can be read, got {path}: {said(error)}") from error
