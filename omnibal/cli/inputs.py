"""Sample lengths from whatever a user names: files of lengths, saved lengths, or a dataset."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from omnibal.cli.files import NAMES, expect
from omnibal.data.lengths import SampleLengths
from omnibal.data.mixture import Mixture
from omnibal.errors import ConfigError, DataError
from omnibal.records import load_json

if TYPE_CHECKING:
    from omnibal.data.sources.survey import Problem

NAMES_FILE: Final = "sources.json"
SHOWN_PROBLEMS: Final = 10


@dataclass(frozen=True)
class NamedLengths:
    """Lengths, what their sources are called, and what could not be used.

    Attributes:
        lengths: The loads of every sample.
        names: One per source, in the order of the numbers in ``lengths.source``.
        problems: Items that were left out.
        repeat_time: The mixture that a meta file's repetitions make, where each item was measured once.
    """

    lengths: SampleLengths
    names: tuple[str, ...]
    problems: tuple["Problem", ...] = ()
    repeat_time: Mixture | None = None

    def save(self, folder: Path) -> None:
        """Save the lengths, and the names beside them."""
        self.lengths.save(folder)
        (folder / NAMES_FILE).write_text(json.dumps(self.names, indent=2) + "\n")

    def problem_lines(self) -> list[str]:
        """How many items were left out, and why the first ones were; nothing where none was."""
        if not self.problems:
            return []
        shown = (f"  {problem}" for problem in self.problems[:SHOWN_PROBLEMS])
        return [f"{len(self.problems)} items cannot be used and are left out:", *shown]


def read_lengths(paths: Sequence[Path], name: str) -> NamedLengths:
    """Read lengths that were measured.

    Args:
        paths: JSON lists of ``{"vit_num", "token_num"}``; or one folder that ``SampleLengths.save`` wrote.
        name: What the command line calls them.

    Raises:
        ConfigError: A path holds something else, there are several folders, or one file is named twice.
        DataError: A file is damaged, or there is no sample.
    """
    for path in paths:
        kind = expect(name, path, ("saved lengths", "token lengths"), remedy="`omnibal lengths` measures a dataset")
        if kind == "saved lengths" and len(paths) > 1:
            raise ConfigError(f"{name} must be {NAMES['token lengths']} where there are several, got the folder {path}")
    twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
    if twice:
        raise ConfigError(f"{name} must be different files, got {twice[0]} twice; all samples would count twice")
    return not_empty(_saved_lengths(paths[0]) if paths[0].is_dir() else _listed_lengths(paths), paths)


def measure_dataset(path: Path, model: Path, **options: Any) -> NamedLengths:
    """Measure a dataset, with a bar; arguments as of ``open_dataset``.

    Raises:
        ConfigError: The model's folder cannot be used.
        DataError: There are broken samples that are not skipped, or none that can be used.
    """
    from omnibal.data.sources.conversations import open_dataset

    dataset = open_dataset(path, model, **options)
    names = tuple(shard.name for shard in dataset.shards)
    return not_empty(NamedLengths(dataset.lengths(), names, dataset.skipped, dataset.repeat_time()), [path])


def not_empty(named: NamedLengths, paths: Sequence[Path]) -> NamedLengths:
    """The lengths, if there are any.

    Raises:
        DataError: There are none.
    """
    if not len(named.lengths):
        raise DataError(f"lengths must hold at least one sample, got none in {', '.join(map(str, paths))}")
    return named


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
