"""Sample lengths from whatever a user names: files of lengths, saved lengths, or a dataset."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from rich.console import Console

from omnibal.data.lengths import SampleLengths
from omnibal.errors import ConfigError, DataError
from omnibal.records import load_json

if TYPE_CHECKING:
    from omnibal.data.sources.survey import Problem

Kind = Literal["folder", "lengths", "dataset"]

NAMES_FILE: Final = "sources.json"
HEAD_CHARACTERS: Final = 1 << 16
SHOWN_PROBLEMS: Final = 10


@dataclass(frozen=True)
class NamedLengths:
    """Lengths, what their sources are called, and what could not be used.

    Attributes:
        lengths: The loads of every sample.
        names: One per source, in the order of the numbers in ``lengths.source``.
        problems: Items that were left out.
    """

    lengths: SampleLengths
    names: tuple[str, ...]
    problems: tuple["Problem", ...] = ()

    def save(self, folder: Path) -> None:
        """Save the lengths, and the names beside them."""
        self.lengths.save(folder)
        (folder / NAMES_FILE).write_text(json.dumps(self.names, indent=2) + "\n")

    def print_problems(self, console: Console) -> None:
        """Print how many items were left out, and why the first ones were."""
        if self.problems:
            console.print(f"{len(self.problems)} items cannot be used and are left out:")
        for problem in self.problems[:SHOWN_PROBLEMS]:
            console.print(f"  {problem}", highlight=False, markup=False)


@dataclass(frozen=True)
class Reading:
    """How a dataset is read: the model's folder, the images' folder, and options as of ``open_dataset``."""

    model: Path | None = None
    images: Path | None = None
    max_tiles: int | None = None
    broken: Literal["error", "skip"] = "error"
    processes: int | None = None
    cache: Path | None = None


def read_lengths(paths: Sequence[Path], reading: Reading) -> NamedLengths:
    """Read lengths.

    Args:
        paths: JSON lists of ``{"vit_num", "token_num"}``; or one folder that ``SampleLengths.save`` wrote; or one
            dataset: an InternVL meta file, or annotations as LLaVA has them.
        reading: For a dataset, which needs the model's folder.

    Raises:
        ConfigError: The model's folder is missing or not needed, or there are several folders or datasets.
        DataError: A path is none of these, or there is no sample.
    """
    named = _read(paths, reading)
    if not len(named.lengths):
        raise DataError(f"lengths must hold at least one sample, got none in {', '.join(map(str, paths))}")
    return named


def _read(paths: Sequence[Path], reading: Reading) -> NamedLengths:
    kinds = {path: _kind(path) for path in paths}
    if len(paths) > 1 and set(kinds.values()) != {"lengths"}:
        listed = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
        raise ConfigError(f"paths must be JSON lists of lengths where there are several, got {listed}")
    twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
    if twice:
        raise ConfigError(f"paths must be different files, got {twice[0]} twice; all samples would count twice")
    kind = kinds[paths[0]]
    if kind == "dataset":
        return _dataset_lengths(paths[0], reading)
    given = [field.name for field in fields(reading) if getattr(reading, field.name) != field.default]
    if given:
        value = getattr(reading, given[0])
        raise ConfigError(f"--{given[0].replace('_', '-')} must be left out where lengths are given, got {value}")
    return _listed_lengths(paths) if kind == "lengths" else _saved_lengths(paths[0])


def _kind(path: Path) -> Kind:
    """What a path holds, by its first few thousand characters."""
    if path.is_dir():
        return "folder"
    try:
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(HEAD_CHARACTERS).lstrip()
    except OSError as error:
        raise DataError(f"lengths must be a readable file or folder, got {path} ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"lengths must be text in UTF-8, got {path} ({error})") from error
    if start[:1] not in ("[", "{"):
        raise DataError(f"lengths must be a folder, JSON or JSON lines, got {start[:20]!r} in {path}")
    listed = start[0] == "[" or '"vit_num"' in start
    return "lengths" if listed and '"conversations"' not in start else "dataset"


def _listed_lengths(paths: Sequence[Path]) -> NamedLengths:
    stems = tuple(path.stem for path in paths)
    names = stems if len(set(stems)) == len(stems) else tuple(map(str, paths))
    return NamedLengths(SampleLengths.from_token_lengths(list(paths)), names)


def _saved_lengths(folder: Path) -> NamedLengths:
    lengths = SampleLengths.load(folder)
    count = 1 if lengths.source is None else int(np.max(lengths.source, initial=0)) + 1
    file = folder / NAMES_FILE
    if not file.is_file():
        return NamedLengths(lengths, tuple(f"source {number}" for number in range(count)))
    try:
        names = load_json(file)
    except ValueError as error:
        raise DataError(f"{file} must be a JSON list of names, got {error}") from error
    if not isinstance(names, list) or len(names) < count or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file} must be a list of {count} names, one for each source, got {names!r:.80}")
    return NamedLengths(lengths, tuple(names))


def _dataset_lengths(path: Path, reading: Reading) -> NamedLengths:
    from omnibal.data.sources.conversations import open_dataset

    if reading.model is None:
        raise ConfigError(f"--model must name the model's folder, got nothing: {path} is a dataset, not its lengths")
    dataset = open_dataset(
        path,
        reading.model,
        image_folder=reading.images,
        max_tiles=reading.max_tiles,
        broken=reading.broken,
        processes=reading.processes,
        cache=reading.cache,
    )
    return NamedLengths(dataset.lengths(), tuple(shard.name for shard in dataset.shards), dataset.skipped)
