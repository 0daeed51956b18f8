"""Options that several verbs have."""

import shlex
from pathlib import Path
from typing import Annotated, Final

import typer

from omnibal.errors import ConfigError

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
PresentOption = Annotated[
    bool, typer.Option("--present", help="Take what the ds_config spells out, not the plan that was made for it.")
]
StagesOption = Annotated[int | None, typer.Option(help="Number of pipeline stages.", min=1)]
PictureOption = Annotated[Path | None, typer.Option(help="Draw a picture, into this PNG.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def read_limits(text: str | None) -> tuple[int, int] | None:
    """Vision units and LLM tokens.

    Raises:
        ConfigError: The text is not two numbers.

    >>> read_limits("16,4096")
    (16, 4096)
    """
    if text is None:
        return None
    words = text.replace(",", " ").split()
    if len(words) != 2 or not all(word.isdecimal() and len(word) < MOST_DIGITS for word in words):
        raise ConfigError(f"--limits must be vision units and LLM tokens such as 16,4096, got {text!r}")
    return int(words[0]), int(words[1])


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
