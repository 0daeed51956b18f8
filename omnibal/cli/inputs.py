"""Sample lengths from whatever a user names: files of lengths, saved lengths, or a dataset."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omnibal.cli.files import NAMES, expect
from omnibal.data.lengths import SampleLengths
from omnibal.data.mixture import Mixture
from omnibal.errors import ConfigError, DataError

if TYPE_CHECKING:
    from omnibal.formats.files import Problem

SHOWN_PROBLEMS: Final = 10


@dataclass(frozen=True)
class UsableLengths:
    """Lengths, and what could not be used.

    Attributes:
        lengths: The loads of every sample.
        problems: Items that were left out.
        repeat_time: The mixture that a meta file's repetitions make, where each item was measured once.
    """

    lengths: SampleLengths
    problems: tuple["Problem", ...] = ()
    repeat_time: Mixture | None = None

    def problem_lines(self) -> list[str]:
        """How many items were left out, and why the first ones were; nothing where none was."""
        if not self.problems:
            return []
        shown = (f"  {problem}" for problem in self.problems[:SHOWN_PROBLEMS])
        return [f"{len(self.problems)} items cannot be used and are left out:", *shown]


def read_lengths(paths: Sequence[Path], name: str) -> UsableLengths:
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
    lengths = SampleLengths.load(paths[0]) if paths[0].is_dir() else SampleLengths.from_token_lengths(paths)
    return not_empty(UsableLengths(lengths), paths)


def measure_dataset(path: Path, model: Path, **options: Any) -> UsableLengths:
    """Measure a dataset, with a bar; arguments as of ``open_dataset``.

    Raises:
        ConfigError: The model's folder cannot be used.
        DataError: There are broken samples that are not skipped, or none that can be used.
    """
    from omnibal.formats.conversations import open_dataset

    dataset = open_dataset(path, model, **options)
    return not_empty(UsableLengths(dataset.lengths(), dataset.skipped, dataset.repeat_time()), [path])


def not_empty(found: UsableLengths, paths: Sequence[Path]) -> UsableLengths:
    """The lengths, if there are any.

    Raises:
        DataError: There are none.
    """
    if not len(found.lengths):
        raise DataError(f"lengths must hold at least one sample, got none in {', '.join(map(str, paths))}")
    return found
