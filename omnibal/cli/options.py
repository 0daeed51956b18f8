"""What verbs share of a command line: options, checks of the paths that they name, and how they answer.

Answers go to stdout, as tables for people or as JSON for programs; what a command says beside them goes to stderr.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from omnibal.cluster import Cluster
from omnibal.errors import ConfigError
from omnibal.records import read_json
from omnibal.workspace import Say

MOST_DIGITS: Final = 20

ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="The machines, such as 4x8xA100-80GB, or a JSON record or its file; by default those that a ds_config or "
        "plan names, or this machine's CUDA devices."
    ),
]
LengthsOption = Annotated[
    list[Path] | None,
    typer.Option(help="A folder of lengths, or JSON lists of them (repeatable), in place of the ds_config's data."),
]
ProfileOption = Annotated[
    Path | None, typer.Option(help="A file of layers' costs, in place of those that are kept or counted.")
]
LimitsOption = Annotated[
    str | None, typer.Option(help="The most vision units and LLM tokens that a pack may hold, such as 16,4096.")
]
PictureOption = Annotated[Path | None, typer.Option(help="Draw a picture, into this PNG.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def _check_quotes(options: str | None) -> str | None:
    try:
        shlex.split(options or "")
    except ValueError as error:
        raise typer.BadParameter(f"must be options as on a command line, got {options!r}: {error}") from error
    return options


LauncherOption = Annotated[
    str | None,
    typer.Option(
        help="Options of the deepspeed launcher that runs trials; by default a process here for each device.",
        callback=_check_quotes,
    ),
]


def read_limits(text: str | None) -> tuple[int, int] | None:
    """Vision units and LLM tokens of ``--limits``.

    >>> read_limits("16,4096")
    (16, 4096)
    """
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if len(words) != 2 or not all(word.isdecimal() and len(word) < MOST_DIGITS for word in words):
        raise ConfigError(f"--limits must be vision units and LLM tokens such as 16,4096, got {text!r}")
    return int(words[0]), int(words[1])


def read_cluster(text: str) -> Cluster:
    """A cluster as the command line gives it: nodes x devices x device, or a JSON record or its file."""
    if text.endswith(".json"):
        return Cluster.of(read_json(text, "--cluster"))
    if not text.lstrip().startswith("{"):
        return Cluster.parse(text)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--cluster must be JSON where it begins with a brace, got {text!r}: {error}") from error
    return Cluster.of(record)


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Refuse options that say what something else says."""
    for name, value in options.items():
        if value:
            raise ConfigError(f"--{name} must be left out here, got {value}: {reason}")


# Paths are checked before a command computes anything: hours of work shall not end at a folder that cannot be written.


def check_folder(name: str, folder: Path | None) -> None:
    """Refuse a folder that cannot be made or written into; makes nothing."""
    if folder is None:
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{name} must be a folder, got {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} must be a folder that can be written to, got {folder}: {there} is read-only")


def check_file(name: str, path: Path | None) -> None:
    """Refuse a file that cannot be written; makes nothing."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{name} must be a file, got the folder {path}")
    check_folder(f"the folder of {name}", path.parent)


def check_new_folder(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be made, or that holds something already."""
    check_folder(name, folder)
    held = next(folder.iterdir(), None) if folder.exists() else None
    if held is not None:
        raise ConfigError(f"{name} must be empty or not exist yet, got {folder} with {held.name} in it")


def check_picture(name: str, path: Path | None) -> None:
    """Refuse a file that no picture can be written to; makes nothing."""
    check_file(name, path)
    if path is not None and path.suffix.lower() != ".png":
        raise ConfigError(f"{name} must be a PNG, whose name ends in .png, got {path}")


def say(*lines: str) -> None:
    """Print lines on stderr, beside a command's answer."""
    for line in lines:
        Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def working(doing: str) -> Iterator[Say]:
    """Show on stderr what takes long while it does; what is yielded changes the words."""
    with Console(stderr=True).status(doing) as status:
        yield status.update


def answer(record: Any, *parts: str | Table, as_json: bool) -> None:
    """Print what a command found.

    Args:
        record: JSON values, paths among them, for programs.
        parts: Lines and tables for people; long lines are broken on a terminal only, so that scripts read whole paths.
        as_json: Which of them.
    """
    if as_json:
        typer.echo(json.dumps(record, indent=2, default=str))
        return
    console = Console(markup=False)  # also of cells: what users call things may look like tags
    for part in parts:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str) and not console.is_terminal)
